"""Tables sharded over many processes."""
