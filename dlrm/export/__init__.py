"""Trained models as directories that do not need this package: weights, programs, a reader."""
