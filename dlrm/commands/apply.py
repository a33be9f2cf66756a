"""Apply a delta of an export: the program is ``examples/apply_delta.py``, which needs no dlrm."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dlrm.utils import startup
from dlrm.utils.shipped import shipped_program


def main(argv: Sequence[str]) -> int:
    """Run the program; returns the exit status."""
    startup.imported()
    sys.argv[1:] = argv
    return int(shipped_program("apply_delta").main())
