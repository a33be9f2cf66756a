"""The training step and what surrounds it: prefetch, metrics, checkpoints, reports."""
