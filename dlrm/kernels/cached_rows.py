"""Rows in host memory of which a GPU holds some: being written."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class CachedRows:
    """Rows in host memory, of which a GPU holds some."""

    slots: Tensor
    gaps: tuple[int, ...]
    read: Any
    write: Any
    start: Any
    new_rows: Any
    release: Any
    flush: Any
    updated: Any


def cached_rows(parameter: Tensor) -> CachedRows | None:
    """What was attached to a parameter whose rows lie in host memory; None for others."""
    return getattr(parameter, "cached_rows", None)
