"""The index of a look-up in tensor-train tables: what depends on its ids, but not on the cores.

See :mod:`dlrm.kernels.tt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlrm.kernels import triton
from dlrm.kernels.tt import _index as kernels
from dlrm.kernels.tt._pairs import rank_pairs
from dlrm.kernels.tt._rows import ResultOfLookups
from dlrm.kernels.tt.layout import FactorLayout, PairLayout, padded
from dlrm.kernels.update.in_backward import FusedUpdates

Strategy = Literal["direct", "unique", "ordered"]


@dataclass(frozen=True, kw_only=True)
class LookupRequest:
    """The arguments of a look-up, apart from the tensors that have gradients."""

    layout: FactorLayout
    ids: Tensor  # [n], contiguous
    num_results: int
    batch: int  # result k is row (k % batch) * tables + k // batch
    tables: int
    strategy: Strategy
    table_of: Tensor | None = None  # without offsets: table of every run of per_table ids
    per_table: int = 1
    skip: Tensor | None = None  # [n] bool
    offsets: Tensor | None = None  # [F * B + 1]
    mean: bool = False
    updates: FusedUpdates | None = None  # of cores, for the backward pass to apply


class FactorIndex:
    """The left or the right factor of every look-up, and the pairs of slices in use.

    Args:
        pairs: those that the factors are products of; None if the factors are slices.
        of_lookup: slice or pair of every look-up, int32 ``[n]``, to be filled; None if not needed.
        n: look-ups.
        flags: zeros, to flag the pairs in use.
        total: a zero, to count them.
    """

    slots: Tensor | None = None  # [pairs] where the product of a pair in use is
    members: Tensor  # [slots] small slice of each
    segments: Tensor  # [big slices, 2] their slots

    def __init__(
        self,
        pairs: PairLayout | None,
        of_lookup: Tensor | None,
        n: int,
        flags: Tensor | None,
        total: Tensor | None,
    ) -> None:
        self.pairs, self.of_lookup, self.n = pairs, of_lookup, n
        self.flags, self.total = flags, total
        if pairs is not None:
            assert flags is not None
            self.num_slots = min(n, pairs.pairs)
            self.slots = torch.empty_like(flags)
            self.members = flags.new_empty(self.num_slots)
            self.segments = flags.new_empty(len(pairs.small_start), 2)

    def rank(self) -> None:
        """Assign slots to the pairs in use, if the factors are pairs."""
        if self.pairs is not None:
            rank_pairs[(len(self.segments),)](
                self.flags, self.pairs.pair_start, self.pairs.small_start, self.total, self.slots,
                self.members, self.segments, BLOCK=256,
            )  # fmt: skip


class LookupIndex:
    """The factors of the ids of one look-up, and its unique ids.

    Args:
        request: the look-up.
        weights: the factor of each id in its bag, ``[n]``.
        zeros: sizes of further fp32 buffers of zeros, by name, which the same launch fills.
    """

    # With strategy unique:
    unique_of: Tensor  # [n] the unique id of every look-up, -1 for none
    unique_left: Tensor  # [n] row of the left factor of each unique id
    segments: Tensor  # [segments, 2] the unique ids of each segment

    def __init__(
        self, request: LookupRequest, weights: Tensor | None, zeros: Mapping[str, int]
    ) -> None:
        self.request = request
        n, unique = request.ids.numel(), request.strategy == "unique"
        cleared = _zeros_in_one_launch({**zeros, **self._own_zeros(unique)}, request.ids.device)
        self.zeros = {name: cleared[name].view(torch.float32) for name in zeros}
        right: Tensor | None
        if request.offsets is None:
            left, right = request.ids.new_empty(2, n, dtype=torch.int32)
            bag = None
        else:
            # Ids after the last bag stay at -1: a buffer of static size may be longer than used.
            left, right, bag = request.ids.new_full((3, n), -1, dtype=torch.int32)
        if unique:  # their right factors follow from their segments
            right = None
        scale = None if weights is None else weights.detach().float()
        if request.mean:
            scale = torch.empty(n, device=request.ids.device)
        self.results = ResultOfLookups(bag, scale, request.batch, request.tables)
        self.left = self._factor_index("left", request.layout.left, left, cleared)
        self.right = self._factor_index("right", request.layout.right, right, cleared)
        keys = self._new_keys() if unique else None
        self._index(keys, cleared.get("bitmap"))
        self.left.rank()
        self.right.rank()
        if keys is not None:
            self._number_unique(keys, cleared["bitmap"], cleared["unique total"])

    def _own_zeros(self, unique: bool) -> dict[str, int]:
        """Sizes of the zeros that the index itself needs, by name."""
        layout = self.request.layout
        sizes = {"bitmap": layout.words, "unique total": 1} if unique else {}
        for side, pairs in (("left", layout.left), ("right", layout.right)):
            if pairs is not None:
                sizes |= {f"{side} flags": pairs.pairs, f"{side} total": 1}
        return sizes

    def _factor_index(
        self,
        side: str,
        pairs: PairLayout | None,
        of_lookup: Tensor | None,
        zeros: Mapping[str, Tensor],
    ) -> FactorIndex:
        flags, total = zeros.get(f"{side} flags"), zeros.get(f"{side} total")
        return FactorIndex(pairs, of_lookup, self.request.ids.numel(), flags, total)

    def _new_keys(self) -> Tensor:
        """A buffer for the keys of all ids, -1 after the last bag."""
        request = self.request
        dtype = torch.int64 if request.layout.words >= 1 << 26 else torch.int32
        keys = torch.empty_like(request.ids, dtype=dtype)
        return keys if request.offsets is None else keys.fill_(-1)

    def _index(self, keys: Tensor | None, bitmap: Tensor | None) -> None:
        request, left, right = self.request, self.left, self.right
        layout, n = request.layout, request.ids.numel()
        out = kernels.IndexOutputs(
            left.of_lookup, right.of_lookup, left.flags, right.flags, keys, bitmap
        )
        if request.offsets is None:
            per_table = request.per_table
            runs = n // per_table if per_table > 1 else 1
            kernels.index_ids[(triton.cdiv(n // runs, 256) * runs,)](
                request.ids, request.skip, request.table_of, per_table, layout.tables, out, n,
                CORES=layout.cores, WIDE=layout.wide, RUNS=per_table > 1, BLOCK=256,
            )  # fmt: skip
        else:
            kernels.index_bags[(request.num_results,)](
                request.ids, request.offsets, request.batch, layout.tables, out, self.results.bag,
                self.results.scale if request.mean else None, CORES=layout.cores, WIDE=layout.wide,
                BLOCK=32, num_warps=1,
            )  # fmt: skip

    def _number_unique(self, keys: Tensor, bitmap: Tensor, total: Tensor) -> None:
        """Number the unique ids and note their left factors."""
        segments, left, n = self.request.layout.segments, self.left.of_lookup, len(keys)
        assert left is not None
        scan = torch.empty_like(bitmap)
        self.segments = left.new_empty(len(segments.right), 2)
        kernels.rank_ids[(len(segments.right),)](
            bitmap, segments.start, total, scan, self.segments, BLOCK=padded(segments.longest)
        )
        self.unique_of, self.unique_left = torch.empty_like(left), torch.empty_like(left)
        kernels.number_ids[(triton.cdiv(n, 256),)](
            keys, bitmap, scan, left, self.left.slots, self.unique_of, self.unique_left, n,
            BLOCK=256,
        )  # fmt: skip


def _zeros_in_one_launch(sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros, int32, each aligned to 16 bytes."""
    whole = [-(-size // 4) * 4 for size in sizes.values()]
    parts = torch.zeros(sum(whole), dtype=torch.int32, device=device).split(whole)
    return {name: part[:size] for (name, size), part in zip(sizes.items(), parts, strict=True)}
