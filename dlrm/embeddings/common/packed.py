"""Modules with packed rows: how they are made, moved, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dlrm.kernels.update.packed import BITS, CHUNK, PackedParameter, PackedRows


class PacksRows(nn.Module):
    """A module whose rows may be int8 or int4, see :mod:`dlrm.kernels.update.packed`.

    Its state dict has their records, uint8, by the names of the parameters.
    """

    packs_rows: ClassVar[bool] = False
    """Whether rows of this kind can be int8 or int4."""
    dtype: str | None
    """``int8`` or ``int4``; None for parameters as ``torch`` has them."""

    @classmethod
    def kind(cls) -> str:
        """The name of the kind, for messages."""
        return cls.__name__

    def _set_dtype(self, dtype: str | None, sparse: bool) -> None:
        """Set the type of the rows.

        Raises:
            ValueError: an unknown type, or one that this kind or dense gradients do not go with.
        """
        if dtype is not None and dtype not in BITS:
            raise ValueError(f"dtype is {dtype!r}, it must be one of {', '.join(BITS)}, or None")
        if dtype is not None and not self.packs_rows:
            raise ValueError(f"--emb {self.kind()} has no {dtype} rows: set --tables.dtype bf16")
        if dtype is not None and not sparse:
            raise ValueError(f"{dtype} rows have sparse gradients only: set sparse=True")
        self.dtype = dtype

    def _new_rows(self, count: int, dim: int, wide: int = 0) -> nn.Parameter:
        """Rows ``[count, dim]`` of the type of the tables; of int4 ``wide`` have 8 bits."""
        if self.dtype is None:
            return nn.Parameter(torch.empty(count, dim))
        return PackedParameter(
            PackedRows.empty(count, dim, count if self.dtype == "int8" else wide)
        )

    @torch.no_grad()
    def unpack(self) -> Self:
        """Replace packed rows by parameters in fp32, in the same order."""
        for name, weight in self._packed().items():
            rows = torch.arange(len(weight), device=weight.device)
            values = torch.cat([weight.packed.read(part) for part in rows.split(CHUNK)])
            self._parameters[name] = nn.Parameter(values)
        self.dtype = None
        return self

    def _packed(self) -> dict[str, PackedParameter]:
        own = self._parameters.items()
        return {name: weight for name, weight in own if isinstance(weight, PackedParameter)}

    @contextmanager
    def _without(self, names: Iterable[str]) -> Iterator[None]:
        """Hide parameters from ``nn.Module``, such as packed rows, whose elements it would read."""
        every = dict(self._parameters)
        for name in [*names]:
            del self._parameters[name]
        try:
            yield
        finally:
            for name, weight in every.items():  # in the order before
                self._parameters[name] = self._parameters.pop(name, weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in self._packed().items():
            destination[prefix + name] = weight.packed.data

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        packed = {prefix + name: weight.packed.data for name, weight in self._packed().items()}
        rest = {key: value for key, value in state_dict.items() if key not in packed}
        lists = missing_keys, unexpected_keys, error_msgs
        with self._without(self._packed()):
            super()._load_from_state_dict(rest, prefix, local_metadata, strict, *lists)
        for key, data in packed.items():
            saved = state_dict.get(key)
            if saved is None:
                missing_keys.extend([key] if strict else [])
            elif (saved.dtype, saved.shape) != (data.dtype, data.shape):
                error_msgs.append(
                    f"{key} is {saved.dtype} {tuple(saved.shape)}, the {self.dtype} rows here take "
                    f"uint8 {tuple(data.shape)}: create the tables with the dtype of the saved ones"
                )
            else:
                data.copy_(saved)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._without(self._packed()):
            super()._apply(fn, recurse)
        for name, weight in self._packed().items():
            grad = weight.grad
            moved = self._parameters[name] = weight.moved(fn)
            moved.grad = None if grad is None else fn(grad)
        return self
