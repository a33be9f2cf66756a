"""Rows in pinned host memory behind a cache on the GPU."""
