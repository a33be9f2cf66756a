"""Files that are shipped with the package, and programs that need no package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[1]


def shipped(directory: str) -> Path:
    """A directory of such files: in an installed package, or next to the package in a checkout."""
    inside = PACKAGE / directory
    return inside if inside.is_dir() else PACKAGE.parent / directory


def shipped_program(name: str) -> ModuleType:
    """A program of ``examples/`` as a module."""
    sys.path.insert(0, str(shipped("examples")))
    try:
        return import_module(name)
    finally:
        sys.path.pop(0)
