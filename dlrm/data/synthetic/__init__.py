"""Synthetic click logs with the skew of Criteo's columns and labels from a known model."""

from dlrm.data.synthetic.dataset import DEMO_CAP, MAX_CARDINALITY, write, write_demo
from dlrm.data.synthetic.generator import DEMO_FRACTIONS, DEMO_ROWS

__all__ = [
    "DEMO_CAP",
    "DEMO_FRACTIONS",
    "DEMO_ROWS",
    "MAX_CARDINALITY",
    "write",
    "write_demo",
]
