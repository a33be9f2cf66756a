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
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm.kernels import tt_distinct, tt_index, tt_rows
from dlrm.kernels.tt_factors import Chain, Factor, clear_rows, power

_STEPS = 8  # look-ups that one chunk of the ordered backward pass walks over
_TILE = 2048  # numbers that a program of 4 warps holds


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
    precision: str
    way: str  # direct, merged or ordered
    tables: Tensor | None = None  # without offsets: table of every run of per_table ids
    per_table: int = 1
    skip: Tensor | None = None  # [n] bool
    offsets: Tensor | None = None  # [F * B + 1]
    mean: bool = False


class Lookup:
    """The factors of the ids of one look-up, made at once and kept for the backward pass."""

    def __init__(self, call: Call, cores: Sequence[Tensor], weights: Tensor | None) -> None:
        self.call = call
        self.n = call.ids.numel()
        self.merged = call.way == "merged"
        self.dim = call.chain.sizes["A"] * call.chain.sizes["C"]
        self.bag_of: Tensor | None = None
        self.scale: Tensor | None = None
        if call.offsets is None:
            left, right = call.ids.new_empty(2, self.n, dtype=torch.int32)
        else:
            # Ids behind the last bag stay at -1: a buffer of static size may be longer than used.
            left, right, self.bag_of = call.ids.new_full((3, self.n), -1, dtype=torch.int32)
            if call.mean or weights is not None:
                self.scale = call.ids.new_zeros(self.n, dtype=torch.float32)
        self.left = Factor(call.chain.left, 0, cores, left)
        self.right = Factor(call.chain.right, len(cores) - 1, cores, right)
        self._index(weights)
        self.left.multiply(cores, call.precision)
        self.right.multiply(cores, call.precision)
        if self.merged:
            self.distinct = self._distinct_rows()

    def _index(self, weights: Tensor | None) -> None:
        call, left, right = self.call, self.left, self.right
        keys = bitmap = None
        if self.merged:
            keys = call.ids.new_full((self.n,), -1, dtype=torch.int64)
            bitmap = call.ids.new_zeros(call.chain.words, dtype=torch.int32)
        arguments = (
            call.p, call.starts, left.base, right.base, left.index, right.index, left.flags,
            right.flags, call.chain.keys, keys, bitmap,
        )  # fmt: skip
        cores = call.p.shape[1]
        if call.offsets is None:
            tt_index.index_ids[(triton.cdiv(self.n, 256),)](
                call.ids, call.skip, call.tables, call.per_table, *arguments, self.n,
                CORES=cores, BLOCK=256,
            )  # fmt: skip
        else:
            tt_index.index_bags[(call.results,)](
                call.ids, call.skip, call.offsets, weights, call.inner, *arguments, self.bag_of,
                self.scale, CORES=cores, MEAN=call.mean, BLOCK=32, num_warps=1,
            )  # fmt: skip
        if bitmap is not None:
            self._number(keys, bitmap)

    def _number(self, keys: Tensor | None, bitmap: Tensor) -> None:
        """Number the distinct ids and note their factors."""
        words = self.call.chain.words
        counts = torch.empty_like(bitmap)
        tt_index.count_ids[(triton.cdiv(words, 1024),)](bitmap, counts, words, BLOCK=1024)
        self.total = torch.cumsum(counts, 0, dtype=torch.int32)
        self.which = torch.empty_like(self.left.index)
        self.factors = torch.empty_like(self.left.index, dtype=torch.int64)
        tt_index.number_ids[(triton.cdiv(self.n, 256),)](
            keys, bitmap, self.total, self.left.index, self.right.index, self.which, self.factors,
            self.n, BLOCK=256,
        )  # fmt: skip

    def _operands(self) -> tuple[Tensor | None, ...]:
        left, right = self.left, self.right
        return left.values, right.values, left.index, right.index, left.scan, right.scan

    def _distinct(self) -> tuple[Any, ...]:
        left, right, words = self.left, self.right, self.call.chain.words
        return left.values, right.values, self.factors, left.scan, right.scan, self.total, words

    def _tiles(self) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and compile-time constants for tiles of distinct ids."""
        sizes = self.call.chain.sizes
        rows = max(64, sizes["A2"])
        tile = {"R2": max(16, sizes["R2"]), "C2": max(16, sizes["C2"]), "BM": rows}
        tile |= {name: sizes[name] for name in "ARC"}
        grid = (triton.cdiv(self.n, rows // sizes["A"]),)
        return grid, {**tile, "PRECISION": self.call.precision}

    def _distinct_rows(self) -> Tensor:
        values = self.left.values.new_empty(self.n, self.dim)
        grid, tile = self._tiles()
        tt_distinct.distinct_rows[grid](*self._distinct(), values, **tile)
        return values

    def _copies(self) -> tuple[int, dict[str, int]]:
        """Rows a program, and compile-time constants, for passes over rows of the result."""
        pad = power(self.dim)
        block = max(1, _TILE // pad)
        return block, {"DIM": self.dim, "BLOCK": block, "BLOCK_D": pad}

    def rows(self, *, pooled: bool) -> Tensor:
        """The results, ``[results, D]`` as they lie, or without pooling the row of every id."""
        call = self.call
        offsets, scale = (call.offsets, self.scale) if pooled else (None, None)
        inner, outer = (call.inner, call.outer) if pooled else (1, 1)
        results = call.results if pooled else self.n
        out = self.left.values.new_empty(results, self.dim)
        if self.merged:
            block, tile = self._copies()
            grid = (triton.cdiv(results, block) if offsets is None else results,)
            tt_distinct.spread_rows[grid](
                self.distinct, self.which, offsets, scale, out, results, inner, outer, **tile
            )
            return out
        sizes = call.chain.sizes
        block = max(1, min(16, _TILE // (sizes["A2"] * sizes["R2"])))
        grid = (triton.cdiv(results, block) if offsets is None else results,)
        tt_rows.rows[grid](
            *self._operands(), offsets, scale, out, results, inner, outer, **sizes, BLOCK=block
        )
        return out

    def backward(self, grad: Tensor, cores: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of all cores from that of the results, ``[results, D]``, in fp32."""
        grads = [torch.empty(0)] * len(cores)
        if self.merged:
            d_left, d_right = self._merged_gradients(grad)
        else:
            d_left = self._gradient(grad, self.left, self.right)
            d_right = self._gradient(grad, self.right, self.left)
        for factor, gradient, core in ((self.left, d_left, 0), (self.right, d_right, -1)):
            if factor.pairs is None:
                grads[core] = gradient
            else:
                factor.backward(gradient, cores, grads, self.call.precision)
        return grads

    def _merged_gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the left and right factors."""
        call, (block, rows) = self.call, self._copies()
        once = grad.new_empty(self.n, self.dim, dtype=torch.float32)
        clear_rows(once, self.total[-1:])
        tt_distinct.merge_gradients[(triton.cdiv(self.n, block),)](
            grad, self.which, self.bag_of, self.scale, once, self.n, call.inner, call.outer,
            **rows,
        )  # fmt: skip
        grid, tile = self._tiles()
        d_left, d_right = self.left.no_gradient(), self.right.no_gradient()
        tt_distinct.distinct_gradient[grid](*self._distinct(), once, d_left, d_right, **tile)
        return d_left, d_right

    def _gradient(self, grad: Tensor, factor: Factor, other: Factor) -> Tensor:
        """Gradient of the products or slices of one factor, ``[slots or slices, length]``."""
        call, sizes = self.call, self.call.chain.sizes
        left, ordered = factor is self.left, call.way == "ordered"
        length = sizes["A" if left else "C"] * sizes["R"]
        block = max(2, min(16, _TILE // 2 // (sizes["A2" if left else "C2"] * sizes["R2"])))
        steps = _STEPS if ordered else 1
        chunks = triton.cdiv(self.n, steps)
        rows = len(factor.values)
        if ordered:
            # Products in use are all written, but slices need not be in use.
            make = grad.new_zeros if factor.pairs is None else grad.new_empty
            out = make(rows + chunks, length, dtype=torch.float32)
        else:
            out = factor.no_gradient()
        order = factor.order() if ordered else None
        tt_rows.factor_gradient[(triton.cdiv(chunks, block),)](
            other.values, grad, factor.index, factor.scan, other.index, other.scan,
            self.bag_of, self.scale, order, out, rows, self.n, call.inner, call.outer,
            **sizes, LEFT=left, STEPS=steps, BLOCK=block, EXCLUSIVE=ordered,
        )  # fmt: skip
        if ordered:
            width = min(128, power(length))
            tt_rows.carry_runs[(chunks, triton.cdiv(length, width))](
                factor.index, factor.scan, order, out, rows, self.n,
                LENGTH=length, STEPS=steps, TILE=16, BLOCK=width,
            )  # fmt: skip
        return out[:rows]
