"""The tables of a model: the kind of each, and their joint look-up."""
