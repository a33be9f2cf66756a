"""Trained models as directories that need nothing of this package: weights, programs, a reader."""
