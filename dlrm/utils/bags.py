"""Bags of ids: the ids, where each bag begins, and a factor for each id."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlrm.utils.offsets import offsets_of


def check_weights(weights: Tensor | None, ids: Tensor, mode: str) -> None:
    """Raise a ``ValueError`` if weights are not one for each id, or rows are not summed."""
    if weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights need mode sum, the mode is {mode}")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(weights.shape)}, they must have the shape of "
            f"the ids, {tuple(ids.shape)}"
        )


@dataclass(frozen=True)
class Bags:
    """The bags of ``F`` tables and ``B`` samples, table by table.

    The bag of table ``f`` and sample ``b`` is ``ids[offsets[f * B + b] : offsets[f * B + b + 1]]``.
    """

    ids: Tensor
    """Ids of all bags, ``[nnz]``."""
    offsets: Tensor
    """Where each bag begins in ``ids``, then where the last one ends, ``[F * B + 1]``."""
    weights: Tensor | None = None
    """A factor for each id, ``[nnz]``; None: all 1."""

    @classmethod
    def one_each(cls, ids: Tensor, weights: Tensor | None = None) -> Bags:
        """Bags of one id each, from ``ids [F, B]``."""
        offsets = torch.arange(ids.numel() + 1, device=ids.device)
        return cls(ids.reshape(-1), offsets, None if weights is None else weights.reshape(-1))

    @property
    def count(self) -> int:
        """The number of bags, F * B."""
        return self.offsets.numel() - 1

    def tables(self, num_tables: int) -> Tensor:
        """The table of each id, ``[nnz]``; the last table for ids beyond the last bag."""
        batch = self.count // num_tables
        begins = self.offsets[batch:-1:batch] if batch else self.offsets[:0]  # but the first table
        index = torch.arange(len(self.ids), dtype=self.offsets.dtype, device=self.ids.device)
        return torch.searchsorted(begins.contiguous(), index, right=True)

    def filled(self) -> Bags:
        """The same bags without ids beyond the last one; the host waits for the device."""
        end = int(self.offsets[-1])
        weights = None if self.weights is None else self.weights[:end]
        return Bags(self.ids[:end], self.offsets, weights)

    def without(self, id: int) -> Bags:
        """The same bags without one id, such as that of padding."""
        keep = self.ids != id
        offsets = offsets_of(keep)[self.offsets]
        weights = None if self.weights is None else self.weights[keep]
        return Bags(self.ids[keep], offsets, weights)

    def contiguous(self) -> Bags:
        """The same bags in contiguous memory, as kernels read them."""
        weights = None if self.weights is None else self.weights.contiguous()
        return replace(
            self, ids=self.ids.contiguous(), offsets=self.offsets.contiguous(), weights=weights
        )

    def check(self, num_tables: int, mode: str) -> None:
        """Raise unless there are offsets for these tables, and weights as they go with the mode."""
        check_weights(self.weights, self.ids, mode)
        if self.count < 0 or self.count % num_tables:
            raise ValueError(
                f"{self.count + 1} offsets for {num_tables} tables: there must be one more than "
                "tables times samples"
            )

    def check_offsets(self) -> None:
        """Raise unless offsets rise from 0 to the number of ids; asynchronous on a GPU."""
        offsets, count = self.offsets, len(self.ids)
        good = (offsets[0] == 0) & (offsets[-1] == count) & (offsets.diff() >= 0).all()
        if good.is_cuda:
            torch._assert_async(good)
        elif not good:
            raise ValueError(
                f"offsets must rise from 0 to the number of ids, {count}; "
                f"got {offsets.tolist()[:8]} ..."
            )
