"""What a look-up in tensor-train tables needs to know of its ids, whatever is in the cores.

See :mod:`dlrm.kernels.tt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm.kernels.tt import _index as index_kernels
from dlrm.kernels.tt import _pairs as pair_kernels
from dlrm.kernels.tt.layout import FactorLayout, Pairs, power
from dlrm.kernels.update.in_backward import FusedUpdates

COPIES = 8  # of what the look-ups of a table's most frequent ids add to


@dataclass(frozen=True, kw_only=True)
class LookupRequest:
    """What a look-up is asked for, other than the tensors that have gradients."""

    chain: FactorLayout
    p: Tensor  # [F, d]
    starts: Tensor  # [F, d] first slice of each table in each core
    ids: Tensor  # [n], contiguous
    results: int  # rows of the result
    inner: int  # result k is row (k % inner) * outer + k // inner
    outer: int
    way: str  # direct, merged or ordered
    tables: Tensor | None = None  # without offsets: table of every run of per_table ids
    per_table: int = 1
    skip: Tensor | None = None  # [n] bool
    offsets: Tensor | None = None  # [F * B + 1]
    mean: bool = False
    updates: FusedUpdates | None = None  # of cores, for the backward pass to apply


class FactorIndex:
    """One factor of all look-ups: which one each has, and which pairs of slices are in use."""

    flags: Tensor | None = None  # [pairs] those in use
    slots: Tensor | None = None  # [pairs] where the product of a pair in use is
    members: Tensor  # [slots] small slice of each
    spans: Tensor  # [big slices, 2] their slots
    total: Tensor  # [1] how many there are

    def __init__(self, pairs: Pairs | None, index: Tensor, copies: int = 1) -> None:
        self.pairs = pairs
        self.index = index  # [n] slice or pair of every look-up
        self.copies = copies  # slots of the first pair of a table
        if pairs is not None:
            self.many = min(len(index), pairs.number) + (copies - 1) * len(pairs.base)
            self.slots = index.new_empty(pairs.number)
            self.members = index.new_empty(self.many)
            self.spans = index.new_empty(len(pairs.small_start), 2)

    def rank(self) -> None:
        """Give the pairs in use their slots; without pairs there is nothing to do."""
        if self.pairs is not None:
            pair_kernels.rank_pairs[(len(self.spans),)](
                self.flags, self.pairs.pair_start, self.pairs.small_start, self.total, self.slots,
                self.members, self.spans, COPIES=self.copies, BLOCK=256,
            )  # fmt: skip


class LookupIndex:
    """All that is known of the ids of one look-up.

    Args:
        call: the look-up.
        weights: the factor of each id in its bag, ``[n]``.
        spare: sizes of fp32 buffers of zeros that the same launch fills for the caller.
    """

    bitmap: Tensor  # [words] of the merged way: the ids in use
    distinct: Tensor  # [1] how many they are
    spans: Tensor  # [spans, 2] those of each span of the keys
    which: Tensor  # [n] the rank among them of every look-up
    lefts: Tensor  # [distinct] slice or slot of the left factor of each

    def __init__(
        self, call: LookupRequest, weights: Tensor | None, spare: Sequence[int] = ()
    ) -> None:
        self.call, self.merged = call, call.way == "merged"
        n, new = call.ids.numel(), call.ids.new_empty
        self.bag_of: Tensor | None = None
        self.scale: Tensor | None = None
        if call.offsets is None:
            left, right = new(2, n, dtype=torch.int32)
        else:
            # Ids behind the last bag stay at -1: a buffer of static size may be longer than used.
            left, right, self.bag_of = call.ids.new_full((3, n), -1, dtype=torch.int32)
            if call.mean or weights is not None:
                self.scale = call.ids.new_zeros(n, dtype=torch.float32)
        copies = 1 if call.way == "ordered" else COPIES
        self.left, self.right = (
            FactorIndex(call.chain.left, left, copies),
            FactorIndex(call.chain.right, right),
        )
        zeros: list[tuple[Any, str, int]] = []
        for used in (self.left, self.right):
            if used.pairs is not None:
                zeros += [(used, "flags", used.pairs.number), (used, "total", 1)]
        if self.merged:
            zeros += [(self, "bitmap", call.chain.words), (self, "distinct", 1)]
        sizes = [*(size for _, _, size in zeros), *spare]
        whole = [-(-size // 4) * 4 for size in sizes]  # each begins on 16 bytes
        filled = torch.zeros(sum(whole), dtype=torch.int32, device=call.ids.device).split(whole)
        parts = [part[:size] for part, size in zip(filled, sizes, strict=True)]
        for (owner, name, _), part in zip(zeros, parts, strict=False):
            setattr(owner, name, part)
        self.spare = [part.view(torch.float32) for part in parts[len(zeros) :]]
        keys = self._new_keys() if self.merged else None
        self._index(weights, keys)
        self.left.rank()
        self.right.rank()
        if keys is not None:
            self._number(keys)

    def _new_keys(self) -> Tensor:
        """For the keys of all ids; those behind the last bag are -1."""
        wide = self.call.chain.words >= 1 << 26
        keys = torch.empty_like(self.left.index, dtype=torch.int64 if wide else torch.int32)
        return keys if self.call.offsets is None else keys.fill_(-1)

    def _index(self, weights: Tensor | None, keys: Tensor | None) -> None:
        call, left, right = self.call, self.left, self.right
        bases = [None if used.pairs is None else used.pairs.base for used in (left, right)]
        arguments = (
            call.p, call.starts, *bases, left.index, right.index, left.flags, right.flags,
            call.chain.keys, keys, self.bitmap if self.merged else None,
        )  # fmt: skip
        n, cores = len(left.index), call.p.shape[1]
        if call.offsets is None:
            runs = n // call.per_table if call.per_table > 1 else 1
            index_kernels.index_ids[(triton.cdiv(n // runs, 256) * runs,)](
                call.ids, call.skip, call.tables, call.per_table, *arguments, n,
                CORES=cores, WIDE=call.chain.wide, RUNS=call.per_table > 1, BLOCK=256,
            )  # fmt: skip
        else:
            index_kernels.index_bags[(call.results,)](
                call.ids, call.skip, call.offsets, weights, call.inner, *arguments, self.bag_of,
                self.scale, CORES=cores, WIDE=call.chain.wide, MEAN=call.mean, BLOCK=32,
                num_warps=1,
            )  # fmt: skip

    def _number(self, keys: Tensor) -> None:
        """Number the distinct ids and note their left factors."""
        spans, left, n = self.call.chain.spans, self.left.index, len(keys)
        scan = torch.empty_like(self.bitmap)
        self.spans = left.new_empty(len(spans.right), 2)
        index_kernels.rank_ids[(len(spans.right),)](
            self.bitmap, spans.start, self.distinct, scan, self.spans, BLOCK=power(spans.words)
        )
        self.which, self.lefts = torch.empty_like(left), torch.empty_like(left)
        index_kernels.number_ids[(triton.cdiv(n, 256),)](
            keys, self.bitmap, scan, left, self.left.slots, self.which, self.lefts, n,
            COPIES=COPIES, BLOCK=256,
        )  # fmt: skip
