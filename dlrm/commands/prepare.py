"""``dlrm prepare``: any table, or with ``--criteo`` raw logs of Criteo, to data for training."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm.commands import prepare_criteo, prepare_table

CRITEO = "--criteo"


def main(argv: Sequence[str]) -> int:
    """Run the program; returns the exit status, which is 2 for bad input."""
    if CRITEO in argv:
        return prepare_criteo.main([each for each in argv if each != CRITEO])
    return prepare_table.main(argv)
