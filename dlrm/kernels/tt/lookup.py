"""One look-up in tables in tensor-train format on its way through the Triton kernels.

See :mod:`dlrm.kernels.tt`. There are three ways through. *Direct*: each look-up multiplies its two
factors, and adds its part of their gradients atomically. *Merged*, for many look-ups: the distinct
ids are numbered first, in an order in which those with the same right factor lie together, and
whole tiles of them multiply by that one factor on the tensor cores; nothing grows with how often
an id occurs but the copies of its row and the sum of its gradients. *Ordered*: as direct, but
gradients are summed in an order of the look-ups, so that they repeat to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm.kernels.tt import _rows as row_kernels
from dlrm.kernels.tt import _unique as distinct_kernels
from dlrm.kernels.tt.factors import Factor
from dlrm.kernels.tt.indexing import COPIES, LookupIndex, LookupRequest
from dlrm.kernels.tt.layout import power

_STEPS = 8  # look-ups that one chunk of the ordered backward pass walks over
_TILE = 2048  # numbers that a program of 4 warps holds
_TILES_EACH = 4  # tiles of distinct ids that a program walks over, on average
_PARTS = 32  # programs of a span at most


class Lookup:
    """The factors of the ids of one look-up, made at once and kept for the backward pass."""

    def __init__(
        self,
        call: LookupRequest,
        weights: Tensor | None,
        cores: Sequence[Tensor],
        *,
        precision: str,
        trains: bool,
    ) -> None:
        self.call, self.precision, self.dtype = call, precision, cores[0].dtype
        self.n = call.ids.numel()
        self.dim = call.chain.sizes["A"] * call.chain.sizes["C"]
        ordered = call.way == "ordered"
        ends = (call.chain.left, 0), (call.chain.right, -1)
        added = [cores[core if pairs is None else pairs.small].numel() for pairs, core in ends]
        adds = trains and not ordered
        self.known = known = LookupIndex(call, weights, spare=added if adds else ())
        zeros = known.spare or (None, None)
        self.left = Factor(known.left, cores[0], zeros[0], ordered=ordered)
        self.right = Factor(known.right, cores[-1], zeros[1], ordered=ordered)
        updates = call.updates if trains else None
        self.left.multiply(cores, precision, updates)
        self.right.multiply(cores, precision, updates)
        self.once: Tensor | None = None  # zeros to add the gradients of equal ids to
        if known.merged:
            self.distinct = self._distinct_rows(trains)

    def _operands(self) -> tuple[Tensor | None, ...]:
        left, right = self.known.left, self.known.right
        return (
            self.left.values, self.right.values, left.index, right.index, left.slots, right.slots
        )  # fmt: skip

    def _distinct(self) -> tuple[Any, ...]:
        known = self.known
        return (
            self.left.values, self.right.values, known.lefts, known.spans,
            self.call.chain.spans.right, known.right.slots,
        )  # fmt: skip

    def _tiles(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Grid and compile-time constants for tiles of distinct ids."""
        sizes, spans = self.call.chain.sizes, len(self.known.spans)
        rows = max(32 if sizes["R2"] <= 32 else 64, sizes["A2"])
        tile = {"R2": max(16, sizes["R2"]), "C2": max(16, sizes["C2"]), "BM": rows}
        tile |= {name: sizes[name] for name in "ARC"}
        tiles = triton.cdiv(self.n, rows // sizes["A"])  # if no two ids are equal
        parts = min(_PARTS, triton.cdiv(tiles, spans * _TILES_EACH))
        return (spans, parts), {**tile, "PRECISION": self.precision, "COPIES": COPIES}

    @property
    def _summed(self) -> int:
        """Rows of the buffer in which the gradients of equal ids are summed."""
        return self.n + COPIES * self.call.chain.number_of_rights

    def _distinct_rows(self, trains: bool) -> Tensor:
        values = self.left.values.new_empty(self.n, self.dim, dtype=self.dtype)
        if trains:
            self.once = values.new_empty(self._summed, self.dim, dtype=torch.float32)
        grid, tile = self._tiles()
        warps = 1 if tile["BM"] * tile["R2"] <= _TILE else 2
        distinct_kernels.distinct_rows[grid](
            *self._distinct(), values, self.once, self.n, self.call.chain.number_of_rights, **tile,
            num_warps=warps,
        )  # fmt: skip
        return values

    def _row_blocks(self) -> tuple[int, dict[str, int]]:
        """Rows a program, and compile-time constants, for passes over rows of the result."""
        pad = power(self.dim)
        block = max(1, _TILE // pad)
        return block, {"DIM": self.dim, "BLOCK": block, "BLOCK_D": pad}

    def rows(self, *, pooled: bool) -> Tensor:
        """The results, ``[results, D]`` as they lie, or without pooling the row of every id."""
        call = self.call
        offsets, scale = (call.offsets, self.known.scale) if pooled else (None, None)
        inner, outer = (call.inner, call.outer) if pooled else (1, 1)
        results = call.results if pooled else self.n
        out = self.left.values.new_empty(results, self.dim, dtype=self.dtype)
        if self.known.merged:
            block, tile = self._row_blocks()
            grid = (triton.cdiv(results, block) if offsets is None else results,)
            distinct_kernels.spread_rows[grid](
                self.distinct, self.known.which, offsets, scale, out, results, inner, outer, **tile
            )
            return out
        sizes = call.chain.sizes
        held, warps = (_TILE // 4, 1) if offsets is None else (_TILE, 4)
        block = max(1, min(16, held // (sizes["A2"] * sizes["R2"])))
        grid = (triton.cdiv(results, block) if offsets is None else results,)
        row_kernels.rows[grid](
            *self._operands(), offsets, scale, out, results, inner, outer, **sizes,
            COPIES=self.known.left.copies, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return out

    def backward(self, grad: Tensor, cores: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of all cores from that of the results, ``[results, D]``, in fp32.

        Cores that are updated here have none.
        """
        grads: list[Tensor | None] = [None] * len(cores)
        if self.known.merged:
            d_left, d_right = self._merged_gradients(grad)
        elif self.call.way == "ordered":
            d_left = self._ordered_gradient(grad, self.left, self.right)
            d_right = self._ordered_gradient(grad, self.right, self.left)
        else:
            d_left, d_right = self._gradients(grad)
        for factor, gradient, core in ((self.left, d_left, 0), (self.right, d_right, -1)):
            if factor.used.pairs is None:
                grads[core] = gradient
            else:
                factor.backward(gradient, cores, grads, self.precision)
        return grads

    def _merged_gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the left and right factors."""
        call, known, (block, rows) = self.call, self.known, self._row_blocks()
        rights = call.chain.number_of_rights
        once, self.once = self.once, None
        if once is None:  # a second backward pass
            once = grad.new_zeros(self._summed, self.dim, dtype=torch.float32)
        distinct_kernels.merge_gradients[(triton.cdiv(self.n, block),)](
            grad, known.which, known.right.index, known.bag_of, known.scale, once, self.n, rights,
            call.inner, call.outer, **rows, COPIES=COPIES,
        )  # fmt: skip
        grid, tile = self._tiles()
        d_left, d_right = self.left.zero_gradient(), self.right.zero_gradient()
        # Loads of fp32 ahead of their use take more room than they save time: on an H100, 27 us in
        # place of 36 with four cores, 114 in place of 125 with three of dim 64.
        stages = 3 if self.left.values.dtype == torch.bfloat16 else 1
        distinct_kernels.distinct_gradient[grid](
            *self._distinct(), once, d_left, d_right, self.n, rights, **tile, num_warps=2,
            num_stages=stages,
        )  # fmt: skip
        return d_left, d_right

    def _gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same, each look-up adding its part."""
        call, sizes = self.call, self.call.chain.sizes
        d_left, d_right = self.left.zero_gradient(), self.right.zero_gradient()
        block = max(1, min(4, _TILE // 2 // (max(sizes["A2"], sizes["C2"]) * sizes["R2"])))
        row_kernels.factor_gradients[(triton.cdiv(self.n, block),)](
            *self._operands(), grad, self.known.bag_of, self.known.scale, d_left, d_right,
            self.n, call.inner, call.outer, **sizes, COPIES=self.known.left.copies, BLOCK=block,
            num_warps=1,
        )  # fmt: skip
        return d_left, d_right

    def _ordered_gradient(self, grad: Tensor, factor: Factor, other: Factor) -> Tensor:
        """Gradient of the products or slices of one factor, summed in an order of the look-ups."""
        call, sizes, used = self.call, self.call.chain.sizes, factor.used
        left = factor is self.left
        length = sizes["A" if left else "C"] * sizes["R"]
        block = max(2, min(16, _TILE // 2 // (sizes["A2" if left else "C2"] * sizes["R2"])))
        chunks = triton.cdiv(self.n, _STEPS)
        rows = len(factor.values)
        # Products in use are all written, but slices need not be in use.
        make = grad.new_zeros if factor.used.pairs is None else grad.new_empty
        out = make(rows + chunks, length, dtype=torch.float32)
        order = factor.order()
        row_kernels.ordered_gradient[(triton.cdiv(chunks, block),)](
            other.values, grad, used.index, used.slots, other.used.index, other.used.slots,
            self.known.bag_of, self.known.scale, order, out, rows, self.n, call.inner, call.outer,
            **sizes, LEFT=left, STEPS=_STEPS, BLOCK=block,
        )  # fmt: skip
        width = min(128, power(length))
        row_kernels.carry_runs[(chunks, triton.cdiv(length, width))](
            used.index, used.slots, order, out, rows, self.n,
            LENGTH=length, STEPS=_STEPS, TILE=16, BLOCK=width,
        )  # fmt: skip
        return out[:rows]
