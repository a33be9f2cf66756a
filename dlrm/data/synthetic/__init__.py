"""Synthetic click logs with the skew of Criteo's columns and a known label model."""

from dlrm.data.synthetic.dataset import (
    DEMO_CAP,
    DEMO_FRACTIONS,
    DEMO_ROWS,
    MAX_CARDINALITY,
    TSV_META_FILE,
    split_rows,
    write,
    write_demo,
)

__all__ = [
    "DEMO_CAP",
    "DEMO_FRACTIONS",
    "DEMO_ROWS",
    "MAX_CARDINALITY",
    "TSV_META_FILE",
    "split_rows",
    "write",
    "write_demo",
]
