"""Synthetic click logs with the skew of Criteo's columns and labels from a known model."""

from dlrm.data.synthetic.dataset import (
    DEMO_CAP,
    DEMO_FRACTIONS,
    DEMO_ROWS,
    MAX_CARDINALITY,
    write,
    write_demo,
)

__all__ = [
    "DEMO_CAP",
    "DEMO_FRACTIONS",
    "DEMO_ROWS",
    "MAX_CARDINALITY",
    "write",
    "write_demo",
]
