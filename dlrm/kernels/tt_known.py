"""What a look-up in tensor-train tables needs to know of its ids, whatever is in the cores.

See :mod:`dlrm.kernels.tt`. It may be found out ahead of the look-up, while a GPU is not busy with
it: :class:`Known` keeps its memory, so that a CUDA graph finds the next batch's where it found that
of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm.kernels import tt_index, tt_pairs
from dlrm.kernels.tt_chain import Chain, Pairs


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a look-up is asked for, other than the tensors that have gradients."""

    chain: Chain
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


class Used:
    """One factor of all look-ups: which one each has, and which pairs of slices are in use."""

    flags: Tensor | None = None  # [pairs] those in use
    slots: Tensor | None = None  # [pairs] where the product of a pair in use is
    members: Tensor  # [slots] small slice of each
    spans: Tensor  # [big slices, 2] their slots
    total: Tensor  # [1] how many there are

    def __init__(self, pairs: Pairs | None, index: Tensor) -> None:
        self.pairs = pairs
        self.index = index  # [n] slice or pair of every look-up
        if pairs is not None:
            self.many = min(len(index), pairs.number)
            self.slots = index.new_empty(pairs.number)
            self.members = index.new_empty(self.many)
            self.spans = index.new_empty(len(pairs.small_start), 2)

    def rank(self) -> None:
        """Give the pairs in use their slots; without pairs there is nothing to do."""
        if self.pairs is not None:
            tt_pairs.rank_pairs[(len(self.spans),)](
                self.flags, self.pairs.pair_start, self.pairs.small_start, self.total, self.slots,
                self.members, self.spans, BLOCK=256,
            )  # fmt: skip


class Known:
    """All that is known of the ids of one look-up.

    Args:
        call: the look-up.
        weights: the factor of each id in its bag, ``[n]``.
    """

    bitmap: Tensor  # [words] of the merged way: the ids in use
    distinct: Tensor  # [1] how many they are
    which: Tensor  # [n] the rank among them of every look-up
    factors: Tensor  # [distinct] both factors of each

    def __init__(self, call: Call, weights: Tensor | None = None) -> None:
        n, bags = call.ids.numel(), call.offsets is not None
        self._places = call.ids.new_empty(3 if bags else 2, n, dtype=torch.int32)
        self.left = Used(call.chain.left, self._places[0])
        self.right = Used(call.chain.right, self._places[1])
        self.bag_of = self._places[2] if bags else None
        self.scale: Tensor | None = None
        if bags and (call.mean or weights is not None):
            self.scale = call.ids.new_empty(n, dtype=torch.float32)
        zeros: list[tuple[Any, str, int]] = []
        for used in (self.left, self.right):
            if used.pairs is not None:
                zeros += [(used, "flags", used.pairs.number), (used, "total", 1)]
        self.merged = call.way == "merged"
        if self.merged:
            words = call.chain.words
            zeros += [(self, "bitmap", words), (self, "distinct", 1)]
            wide = torch.int64 if words >= 1 << 26 else torch.int32
            self._keys = torch.empty_like(self.left.index, dtype=wide)
            self._scan = self._places.new_empty(words)
            self.which = torch.empty_like(self.left.index)
            self.factors = torch.empty_like(self.left.index, dtype=torch.int64)
        sizes = [-(-size // 4) * 4 for _, _, size in zeros]  # each begins on 16 bytes
        self._zeros = self._places.new_empty(sum(sizes))
        for (owner, name, size), part in zip(zeros, self._zeros.split(sizes), strict=True):
            setattr(owner, name, part[:size])
        self.find(call, weights)

    def find(self, call: Call, weights: Tensor | None = None) -> None:
        """Find it out, for another look-up of the same shape too."""
        self.call = call
        self._zeros.zero_()
        if call.offsets is not None:
            # Ids behind the last bag stay at -1: a buffer of static size may be longer than used.
            self._places.fill_(-1)
            if self.scale is not None:
                self.scale.zero_()
            if self.merged:
                self._keys.fill_(-1)
        self._index(weights)
        self.left.rank()
        self.right.rank()
        if self.merged:
            self._number()

    def _index(self, weights: Tensor | None) -> None:
        call, left, right = self.call, self.left, self.right
        bases = [None if used.pairs is None else used.pairs.base for used in (left, right)]
        arguments = (
            call.p, call.starts, *bases, left.index, right.index, left.flags, right.flags,
            call.chain.keys, *((self._keys, self.bitmap) if self.merged else (None, None)),
        )  # fmt: skip
        n, cores = len(left.index), call.p.shape[1]
        if call.offsets is None:
            tt_index.index_ids[(triton.cdiv(n, 256),)](
                call.ids, call.skip, call.tables, call.per_table, *arguments, n,
                CORES=cores, WIDE=call.chain.wide, BLOCK=256,
            )  # fmt: skip
        else:
            tt_index.index_bags[(call.results,)](
                call.ids, call.skip, call.offsets, weights, call.inner, *arguments, self.bag_of,
                self.scale, CORES=cores, WIDE=call.chain.wide, MEAN=call.mean, BLOCK=32,
                num_warps=1,
            )  # fmt: skip

    def _number(self) -> None:
        """Number the distinct ids and note their factors."""
        words, n = len(self.bitmap), len(self.which)
        tt_index.count_ids[(triton.cdiv(words, 1024),)](
            self.bitmap, self._scan, self.distinct, words, BLOCK=1024
        )
        tt_index.number_ids[(triton.cdiv(n, 256),)](
            self._keys, self.bitmap, self._scan, self.left.index, self.right.index, self.which,
            self.factors, n, BLOCK=256,
        )  # fmt: skip
