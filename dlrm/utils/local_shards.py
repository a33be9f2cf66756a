"""A tensor whose parts lie on many processes, as checkpoints know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LocalShards:
    """The local parts of a tensor; other processes have others, or the same ones.

    The methods with underscores are what ``torch.distributed.checkpoint`` asks of objects that
    it writes and reads by parts.

    Args:
        size: of the whole tensor.
        parts: offset in the whole tensor and values of each local part.
        dtype: of the whole tensor.
        copies: pairs of a tensor that has parts here and another that must equal it.
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
        """Of the whole tensor."""
        return self._size

    @torch.no_grad()
    def loaded(self) -> None:
        """Bring the copies up to date."""
        for values, copy in self._copies:
            copy.copy_(values)

    @torch.no_grad()
    def copy_to(self, other: LocalShards) -> None:
        """Give the values to another of the same parts."""
        for offset, values in self.parts.items():
            other.parts[offset].copy_(values)

    def __create_chunk_list__(self) -> list[object]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=offset, sizes=values.shape)
            for offset, values in self.parts.items()
        ]

    def __create_write_items__(self, name: str, _: object) -> list[object]:
        from torch.distributed.checkpoint import planner
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )

        return [
            planner.WriteItem(
                index=MetadataIndex(name, offset),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=values.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self._size,
                ),
            )
            for offset, values in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: object) -> Tensor:
        return self.parts[index.offset]  # type: ignore[attr-defined]


def saved_weight(
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
