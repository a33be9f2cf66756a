"""One look-up in tensor-train tables by Triton kernels, with one of two strategies.

- *Direct*: each look-up multiplies its two factors, and adds its part of their gradients
  atomically.
- *Unique*, for many look-ups: the unique ids are numbered first, those with the same right factor
  next to each other, and tiles of them are multiplied by this factor on the tensor cores. How often
  an id occurs matters only for the copies of its row and for the sum of its gradients.

Gradients are added atomically, in an order that varies. Deterministic ones are added as integers,
multiples of a power of two that is chosen such that no sum overflows: their order does not matter.

See :mod:`dlrm.kernels.tt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels import triton
from dlrm.kernels.tt import _rows as row_kernels
from dlrm.kernels.tt import _unique as unique_kernels
from dlrm.kernels.tt._rows import Sums
from dlrm.kernels.tt.factors import ZerosOnce, largest, total
from dlrm.kernels.tt.indexing import LookupIndex, LookupRequest
from dlrm.kernels.tt.layout import padded

_TILE = 2048  # numbers that a program of 4 warps holds
_TILES_EACH = 4  # tiles of unique ids per program, on average
_PARTS = 32  # programs per segment, at most


class Lookup:
    """One look-up, whose factors are computed immediately and kept for the backward pass.

    Args:
        request: the look-up.
        weights: weight of each id in its bag, ``[n]``.
        cores: all cores, contiguous.
        precision: how matrices are multiplied.
        trains: whether there will be a backward pass.
    """

    def __init__(
        self,
        request: LookupRequest,
        weights: Tensor | None,
        cores: Sequence[Tensor],
        *,
        precision: str,
        trains: bool,
    ) -> None:
        self.request = request
        self.precision = precision
        # Rows of bags are summed before they are rounded.
        self.row_dtype = request.dtype if request.offsets is None else cores[0].dtype
        self.n = request.ids.numel()
        self.dim = request.layout.sizes["A"] * request.layout.sizes["C"]

        adds = trains and not request.deterministic  # to gradients, which must be zeros before
        self.index = LookupIndex(request, weights, [cores[0], cores[-1]] if adds else [])
        self.left, self.right = self.index.left, self.index.right
        for factor in (self.left, self.right):
            factor.multiply(cores, precision)
        if request.strategy == "unique":
            self._compute_unique_rows(trains)

    def rows(self, *, pooled: bool) -> Tensor:
        """The results in memory order, ``[results, D]``; not pooled, the row of every id."""
        sizes, offsets, results = self.request.layout.sizes, None, self.index.results
        num_results, dtype = self.n, self.row_dtype
        if pooled:
            offsets, num_results = self.request.offsets, self.request.num_results
            dtype = self.request.dtype
        else:
            results = results._replace(scale=None, batch=1, tables=1)
        out = self.left.data.new_empty(num_results, self.dim, dtype=dtype)

        # Each program has a block of look-ups, or one bag.
        if self.request.strategy == "unique":
            block, tile = self._row_blocks()
            grid = (triton.cdiv(num_results, block) if offsets is None else num_results,)
            unique_kernels.gather_rows[grid](
                self.unique_rows, self.index.unique_of, offsets, results, out, num_results, **tile
            )
            return out

        held, warps = (_TILE // 4, 1) if offsets is None else (_TILE, 4)
        block = max(1, min(16, held // (padded(sizes["A"], 2) * padded(sizes["R"], 2))))
        grid = (triton.cdiv(num_results, block) if offsets is None else num_results,)
        row_kernels.rows[grid](
            self.left.of_lookups, self.right.of_lookups, offsets, results, out, num_results,
            **sizes, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return out

    def backward(self, grad: Tensor, cores: Sequence[Tensor]) -> list[Tensor]:
        """The fp32 gradient of each core, from the gradient of the results, ``[results, D]``."""
        unique = self.request.strategy == "unique"
        add_gradients = self._unique_gradients if unique else self._direct_gradients
        d_left, d_right = map(total, add_gradients(grad, cores))

        deterministic = self.request.deterministic
        grads = {
            **self.left.backward(d_left, cores, self.precision, deterministic=deterministic),
            **self.right.backward(d_right, cores, self.precision, deterministic=deterministic),
        }
        return [grads[core] for core in range(len(cores))]

    def _scaled_limit(self, grad: Tensor) -> Tensor | None:
        """The limit of a sum of gradients ``[results, D]``, one for each look-up, with its scale;
        None unless sums are deterministic.
        """
        if not self.request.deterministic:
            return None
        bag, scale, *_ = self.index.results
        limit = self.n * largest(grad)
        if bag is None or scale is None or self.request.mean:
            return limit
        return limit * largest(scale.masked_fill(bag < 0, 0.0))  # undefined after the last bag

    def _zero_gradients(self, limit: Tensor | None, cores: Sequence[Tensor]) -> tuple[Sums, Sums]:
        """Zeros for the gradients of the factors, given the limit of a sum of those of rows."""
        if limit is None:
            return self.left.zero_gradient(None), self.right.zero_gradient(None)
        sizes = self.request.layout.sizes
        return (
            self.left.zero_gradient(limit * sizes["C"] * self.right.largest(cores)),
            self.right.zero_gradient(limit * sizes["A"] * self.left.largest(cores)),
        )

    # Strategy direct ----------------------------------------------------------------------------

    def _direct_gradients(self, grad: Tensor, cores: Sequence[Tensor]) -> tuple[Sums, Sums]:
        """Gradients of the left and right factors, to which each look-up adds its part."""
        sizes = self.request.layout.sizes
        d_left, d_right = self._zero_gradients(self._scaled_limit(grad), cores)
        a, r, c = (padded(sizes[name], 2) for name in "ARC")
        block = max(1, min(4, _TILE // 2 // (max(a, c) * r)))
        row_kernels.factor_gradients[(triton.cdiv(self.n, block),)](
            self.left.of_lookups, self.right.of_lookups, grad, self.index.results, d_left, d_right,
            self.n, **sizes, BLOCK=block, num_warps=1,
        )  # fmt: skip
        return d_left, d_right

    # Strategy unique ----------------------------------------------------------------------------

    def _compute_unique_rows(self, trains: bool) -> None:
        """The row of every unique id, ``[n, D]``, and zeros for its gradient."""
        shape = self.n, self.dim
        self.unique_rows = self.left.data.new_empty(shape, dtype=self.row_dtype)
        clears = trains and not self.request.deterministic
        zeros = self.left.data.new_empty(shape, dtype=torch.float32) if clears else None
        self._unique_zeros = ZerosOnce(zeros)

        grid, tile = self._unique_tiles()
        warps = 1 if tile["BM"] * padded(tile["R"], 16) <= _TILE else 2
        unique_kernels.unique_rows[grid](
            self._unique_ids(), self.unique_rows, zeros, **tile, num_warps=warps
        )

    def _unique_gradients(self, grad: Tensor, cores: Sequence[Tensor]) -> tuple[Sums, Sums]:
        """Gradients of the left and right factors, after those of equal ids are summed."""
        block, rows = self._row_blocks()
        limit = self._scaled_limit(grad)
        sums = self._unique_zeros.take(self.unique_rows, limit)
        unique_kernels.sum_gradients[(triton.cdiv(self.n, block),)](
            grad, self.index.unique_of, self.index.results, sums, self.n, **rows
        )
        d_rows = total(sums)

        grid, tile = self._unique_tiles()
        d_left, d_right = self._zero_gradients(limit, cores)
        # With one stage, fp32 takes 27 us instead of 36 with four cores, and 114 instead of 125
        # with three of dim 64 on an H100: loading ahead costs more room than it saves time.
        stages = 3 if self.left.data.dtype == torch.bfloat16 else 1
        unique_kernels.unique_gradients[grid](
            self._unique_ids(), d_rows, d_left, d_right, **tile, num_warps=2, num_stages=stages
        )
        return d_left, d_right

    def _unique_ids(self) -> unique_kernels.UniqueIds:
        index, segments = self.index, self.request.layout.segments
        return unique_kernels.UniqueIds(
            self.left.data, self.right.data, index.unique_left, index.segments, segments.right,
            self.right.slots,
        )  # fmt: skip

    def _unique_tiles(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Grid and compile-time constants for tiles of unique ids."""
        sizes, segments = self.request.layout.sizes, len(self.index.segments)
        rows = max(32 if sizes["R"] <= 32 else 64, padded(sizes["A"], 2))
        tiles = triton.cdiv(self.n, rows // sizes["A"])  # at most: if all ids are different
        parts = min(_PARTS, triton.cdiv(tiles, segments * _TILES_EACH))
        return (segments, parts), {**sizes, "BM": rows, "PRECISION": self.precision}

    def _row_blocks(self) -> tuple[int, dict[str, int]]:
        """Rows per program, and compile-time constants, for passes over rows of the result."""
        columns = padded(self.dim)
        block = max(1, _TILE // columns)
        return block, {"DIM": self.dim, "BLOCK": block, "BLOCK_D": columns}
