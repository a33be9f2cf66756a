"""The size of the first rows of dense tables, and of those that store rows like them."""

from __future__ import annotations

FACTOR = 0.1
"""Of the bound in the reference DLRM, 1 / sqrt(V). A row is noise until its id occurs, and in small
tables that noise is as large as what rows learn. At a tenth of it, the log loss of rows with rare
and unseen ids is lower, and nothing is lost elsewhere."""


def initial_bound(rows: int) -> float:
    """The bound b of U(-b, b), from which the rows of a table of ``rows`` ids are drawn."""
    return FACTOR * rows**-0.5
