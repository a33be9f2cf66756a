"""Look-ups of rows: one op a file, each with its PyTorch reference."""
