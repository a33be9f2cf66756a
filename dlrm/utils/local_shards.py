"""Tensors that are sharded over processes, as checkpoints read and write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LocalShards:
    """The local shards of a tensor. Other processes hold other shards, or copies of these.

    Args:
        size: of the whole tensor.
        parts: the offset of each local shard in the whole tensor, and its values.
        dtype: of the whole tensor.
        copies: pairs of a tensor with local shards and a copy that must stay equal to it.
    """

    def __init__(
        self,
        size: Sequence[int],
        parts: Sequence[tuple[tuple[int, ...], Tensor]],
        dtype: torch.dtype,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._copies = copies
        self.parts = {torch.Size(offset): values for offset, values in parts}
        self.dtype = dtype
        self._size = torch.Size(size)

    def size(self) -> torch.Size:
        """Size of the whole tensor."""
        return self._size

    @torch.no_grad()
    def loaded(self) -> None:
        """Update the copies; called after the shards have been loaded."""
        for values, copy in self._copies:
            copy.copy_(values)

    @torch.no_grad()
    def copy_to(self, other: LocalShards) -> None:
        """Copy the values to a tensor with the same shards."""
        for offset, values in self.parts.items():
            other.parts[offset].copy_(values)


def saved_weight(
    state_dict: Mapping[str, Any],
    prefix: str,
    shape: tuple[int, ...],
    missing: list[str],
    errors: list[str],
) -> Any:
    """Return the saved ``weight`` of a module that stores its rows in another form.

    The arguments are those of ``nn.Module._load_from_state_dict``, and the expected shape.

    Returns:
        The weight, or None if there is none of this shape; the lists of errors then say why.
    """
    key = f"{prefix}weight"
    weight = state_dict.get(key)
    if weight is None:
        missing.append(key)
    elif tuple(weight.size()) != shape:
        errors.append(f"{key} has shape {tuple(weight.size())}, it must be {shape}")
        weight = None
    return weight
