"""Files that are shipped with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped(directory: str) -> Path:
    """A directory of such files: in an installed package, or next to the package in a checkout."""
    inside = PACKAGE / directory
    return inside if inside.is_dir() else PACKAGE.parent / directory
