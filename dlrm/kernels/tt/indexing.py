"""The index of a look-up in tensor-train tables: everything that depends on its ids alone.

See :mod:`dlrm.kernels.tt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dlrm.kernels import triton
from dlrm.kernels.tt import _index as kernels
from dlrm.kernels.tt._rows import ResultOfLookups
from dlrm.kernels.tt.factors import Factor
from dlrm.kernels.tt.layout import FactorLayout, padded

Strategy = Literal["direct", "unique"]


@dataclass(frozen=True, kw_only=True)
class LookupRequest:
    """The arguments of a look-up, apart from the tensors that have gradients."""

    layout: FactorLayout
    ids: Tensor  # [n], contiguous
    num_results: int
    batch: int  # result k is stored as row (k % batch) * tables + k // batch
    tables: int
    strategy: Strategy
    dtype: torch.dtype  # of the results
    table_of: Tensor | None = None  # without offsets: the table of each run of per_table ids
    per_table: int = 1
    skip: Tensor | None = None  # [n] bool
    offsets: Tensor | None = None  # [F * B + 1]
    mean: bool = False
    deterministic: bool = False  # equal inputs give bitwise equal gradients


class LookupIndex:
    """The factors of the ids of one look-up, and its unique ids.

    Args:
        request: the look-up.
        weights: weight of each id in its bag, ``[n]``.
        outer: the first and the last core, if look-ups will add to their gradients: zeros for
            these are filled by the same launch as all others.
    """

    # With the strategy unique:
    unique_of: Tensor  # [n] the unique id of every look-up, -1 for none
    unique_left: Tensor  # [n] row of the left factor of each unique id
    segments: Tensor  # [segments, 2] the unique ids of each segment

    def __init__(
        self, request: LookupRequest, weights: Tensor | None, outer: Sequence[Tensor]
    ) -> None:
        self.request = request
        layout, ids = request.layout, request.ids
        n, unique = ids.numel(), request.strategy == "unique"

        # All buffers of zeros, in one launch.
        sizes: dict[str, int] = {}
        for side, pairs in (("left", layout.left), ("right", layout.right)):
            if pairs is not None:
                sizes |= {f"{side} flags": pairs.pairs, f"{side} total": 1}
        if unique:
            sizes |= {"bitmap": layout.words, "unique total": 1}
        for side, core in zip(("left", "right"), outer, strict=False):
            sizes[f"{side} gradient"] = core.numel()
        zeros = _zeros_in_one_launch(sizes, ids.device)

        # The results and factors of the look-ups. After the last bag, in a buffer of static size
        # that is longer than its ids, there are none: -1.
        bag = None
        if request.offsets is None:
            left, right = ids.new_empty(2, n, dtype=torch.int32)
        else:
            left, right, bag = ids.new_full((3, n), -1, dtype=torch.int32)
        scale = None if weights is None else weights.detach().float()
        if request.mean:
            scale = torch.empty(n, device=ids.device)
        self.results = ResultOfLookups(bag, scale, request.batch, request.tables)
        self.left = Factor("left", 0, layout.left, left, n, zeros)
        # The right factor of a unique id is that of its segment.
        right = None if unique else right
        self.right = Factor("right", layout.cores - 1, layout.right, right, n, zeros)

        keys = self._new_keys() if unique else None
        self._find_factors(keys, zeros.get("bitmap"))
        self.left.assign_slots()
        self.right.assign_slots()
        if keys is not None:
            self._number_unique(keys, zeros["bitmap"], zeros["unique total"])

    def _new_keys(self) -> Tensor:
        """A buffer for the keys of all ids, -1 after the last bag."""
        request = self.request
        dtype = torch.int64 if request.layout.words >= 1 << 26 else torch.int32
        keys = torch.empty_like(request.ids, dtype=dtype)
        return keys if request.offsets is None else keys.fill_(-1)

    def _find_factors(self, keys: Tensor | None, bitmap: Tensor | None) -> None:
        """Store the factors of every id, flag the pairs in use and, with a bitmap, the ids."""
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
        """Number the unique ids and store their left factors."""
        segments, left, n = self.request.layout.segments, self.left.of_lookup, len(keys)
        assert left is not None

        scan = torch.empty_like(bitmap)
        self.segments = left.new_empty(len(segments.right), 2)
        kernels.rank_ids[(len(segments.right),)](
            bitmap, segments.start, total, scan, self.segments, BLOCK=padded(segments.longest)
        )

        self.unique_of = torch.empty_like(left)
        self.unique_left = torch.empty_like(left)
        kernels.number_ids[(triton.cdiv(n, 256),)](
            keys, bitmap, scan, left, self.left.slots, self.unique_of, self.unique_left, n,
            BLOCK=256,
        )  # fmt: skip


def _zeros_in_one_launch(sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Buffers of zeros, int32, each aligned to 16 bytes."""
    whole = [-(-size // 4) * 4 for size in sizes.values()]
    parts = torch.zeros(sum(whole), dtype=torch.int32, device=device).split(whole)
    return {name: part[:size] for (name, size), part in zip(sizes.items(), parts, strict=True)}
