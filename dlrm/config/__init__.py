"""The configuration of a run: its schema, the command line, the arguments of the model."""
