"""Criteo-format data: its schema, the synthetic maker, and the way from Parquet to batches."""
