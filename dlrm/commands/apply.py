"""Apply a delta of an export: the program is ``examples/apply_delta.py``, which needs no dlrm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from dlrm.utils import startup
from dlrm.utils.shipped import shipped


def apply_delta() -> Callable[[Path, Path, Path], None]:
    """The function that makes a newer export from an export, a delta and its new directory."""
    sys.path.insert(0, str(shipped("examples")))
    try:
        return cast(Callable[[Path, Path, Path], None], import_module("apply_delta").apply_delta)
    finally:
        sys.path.pop(0)


def main(argv: Sequence[str]) -> int:
    """Run the program; returns the exit status."""
    startup.imported()
    apply_delta()
    sys.argv[1:] = argv
    return int(import_module("apply_delta").main())
