"""Saved weights of modules that keep their rows in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole_weight(
    state_dict: Mapping[str, Any],
    prefix: str,
    shape: tuple[int, int],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> Any:
    """The saved ``weight`` of a module that keeps its rows otherwise; None if there is none of
    this shape. The other arguments are those of ``nn.Module._load_from_state_dict``.
    """
    key = f"{prefix}weight"
    if strict:
        unexpected += [name for name in state_dict if name.startswith(prefix) and name != key]
    weight = state_dict.get(key)
    if weight is None:
        missing.append(key)
    elif tuple(weight.size()) != shape:
        errors.append(f"{key} has shape {tuple(weight.size())}, it must be {shape}")
        weight = None
    return weight
