"""Train and compress deep learning recommendation models (DLRM)."""

__version__ = "0.1.0"
