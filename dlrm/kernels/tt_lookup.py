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
from dlrm.kernels.tt_factors import Chain, Factor, Zeros, power

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
    trains: bool  # there may be a backward pass
    tables: Tensor | None = None  # without offsets: table of every run of per_table ids
    per_table: int = 1
    skip: Tensor | None = None  # [n] bool
    offsets: Tensor | None = None  # [F * B + 1]
    mean: bool = False


class Lookup:
    """The factors of the ids of one look-up, made at once and kept for the backward pass."""

    bitmap: Tensor  # [words] of the merged way: the ids in use
    total: Tensor  # [1] how many they are

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
        zeros = Zeros()
        rest: dict[str, Any] = {"trains": call.trains, "ordered": call.way == "ordered"}
        self.left = Factor(call.chain.left, 0, cores, left, zeros, **rest)
        self.right = Factor(call.chain.right, len(cores) - 1, cores, right, zeros, **rest)
        if self.merged:
            zeros.ask(self, "bitmap", call.chain.words)
            zeros.ask(self, "total", 1)
        zeros.make(call.ids.device)
        self._index(weights)
        self.left.multiply(cores, call.precision)
        self.right.multiply(cores, call.precision)
        self.once: Tensor | None = None  # zeros to add the gradients of equal ids to
        if self.merged:
            self._number()
            self.distinct = self._distinct_rows()

    def _index(self, weights: Tensor | None) -> None:
        call, left, right = self.call, self.left, self.right
        bitmap = None
        if self.merged:
            bitmap = self.bitmap
            self.keys = self._new_keys()
        arguments = (
            call.p, call.starts, left.base, right.base, left.index, right.index, left.flags,
            right.flags, call.chain.keys, self.keys if self.merged else None, bitmap,
        )  # fmt: skip
        cores = call.p.shape[1]
        if call.offsets is None:
            tt_index.index_ids[(triton.cdiv(self.n, 256),)](
                call.ids, call.skip, call.tables, call.per_table, *arguments, self.n,
                CORES=cores, WIDE=call.chain.wide, BLOCK=256,
            )  # fmt: skip
        else:
            tt_index.index_bags[(call.results,)](
                call.ids, call.skip, call.offsets, weights, call.inner, *arguments, self.bag_of,
                self.scale, CORES=cores, WIDE=call.chain.wide, MEAN=call.mean, BLOCK=32,
                num_warps=1,
            )  # fmt: skip

    def _new_keys(self) -> Tensor:
        """For the keys of all ids; those behind the last bag are -1."""
        wide = self.call.chain.words >= 1 << 26
        keys = torch.empty_like(self.left.index, dtype=torch.int64 if wide else torch.int32)
        return keys if self.call.offsets is None else keys.fill_(-1)

    def _number(self) -> None:
        """Number the distinct ids and note their factors."""
        words, left = self.call.chain.words, self.left.index
        scan = torch.empty_like(self.bitmap)
        tt_index.count_ids[(triton.cdiv(words, 1024),)](
            self.bitmap, scan, self.total, words, BLOCK=1024
        )
        self.which = torch.empty_like(left)
        self.factors = torch.empty_like(left, dtype=torch.int64)
        tt_index.number_ids[(triton.cdiv(self.n, 256),)](
            self.keys, self.bitmap, scan, left, self.right.index, self.which, self.factors,
            self.n, BLOCK=256,
        )  # fmt: skip

    def _operands(self) -> tuple[Tensor | None, ...]:
        left, right = self.left, self.right
        return left.values, right.values, left.index, right.index, left.slots, right.slots

    def _distinct(self) -> tuple[Any, ...]:
        left, right = self.left, self.right
        return left.values, right.values, self.factors, left.slots, right.slots, self.total

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
        if self.call.trains:
            self.once = torch.empty_like(values, dtype=torch.float32)
        grid, tile = self._tiles()
        tt_distinct.distinct_rows[grid](*self._distinct(), values, self.once, **tile)
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
        elif self.call.way == "ordered":
            d_left = self._ordered_gradient(grad, self.left, self.right)
            d_right = self._ordered_gradient(grad, self.right, self.left)
        else:
            d_left, d_right = self._gradients(grad)
        for factor, gradient, core in ((self.left, d_left, 0), (self.right, d_right, -1)):
            if factor.pairs is None:
                grads[core] = gradient
            else:
                factor.backward(gradient, cores, grads, self.call.precision)
        return grads

    def _merged_gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the left and right factors."""
        call, (block, rows) = self.call, self._copies()
        once, self.once = self.once, None
        if once is None:  # a second backward pass
            once = grad.new_zeros(self.n, self.dim, dtype=torch.float32)
        tt_distinct.merge_gradients[(triton.cdiv(self.n, block),)](
            grad, self.which, self.bag_of, self.scale, once, self.n, call.inner, call.outer,
            **rows,
        )  # fmt: skip
        grid, tile = self._tiles()
        d_left, d_right = self.left.zero_gradient(), self.right.zero_gradient()
        warps = 1 if tile["BM"] * tile["R2"] <= _TILE else 4
        tt_distinct.distinct_gradient[grid](
            *self._distinct(), once, d_left, d_right, **tile, num_warps=warps
        )
        return d_left, d_right

    def _gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same, each look-up adding its part."""
        call, sizes = self.call, self.call.chain.sizes
        d_left, d_right = self.left.zero_gradient(), self.right.zero_gradient()
        block = max(1, min(16, _TILE // 2 // (max(sizes["A2"], sizes["C2"]) * sizes["R2"])))
        tt_rows.factor_gradients[(triton.cdiv(self.n, block),)](
            *self._operands(), grad, self.bag_of, self.scale, d_left, d_right,
            self.n, call.inner, call.outer, **sizes, BLOCK=block, num_warps=1,
        )  # fmt: skip
        return d_left, d_right

    def _ordered_gradient(self, grad: Tensor, factor: Factor, other: Factor) -> Tensor:
        """Gradient of the products or slices of one factor, summed in an order of the look-ups."""
        call, sizes = self.call, self.call.chain.sizes
        left = factor is self.left
        length = sizes["A" if left else "C"] * sizes["R"]
        block = max(2, min(16, _TILE // 2 // (sizes["A2" if left else "C2"] * sizes["R2"])))
        chunks = triton.cdiv(self.n, _STEPS)
        rows = len(factor.values)
        # Products in use are all written, but slices need not be in use.
        make = grad.new_zeros if factor.pairs is None else grad.new_empty
        out = make(rows + chunks, length, dtype=torch.float32)
        order = factor.order()
        tt_rows.ordered_gradient[(triton.cdiv(chunks, block),)](
            other.values, grad, factor.index, factor.slots, other.index, other.slots,
            self.bag_of, self.scale, order, out, rows, self.n, call.inner, call.outer,
            **sizes, LEFT=left, STEPS=_STEPS, BLOCK=block,
        )  # fmt: skip
        width = min(128, power(length))
        tt_rows.carry_runs[(chunks, triton.cdiv(length, width))](
            factor.index, factor.slots, order, out, rows, self.n,
            LENGTH=length, STEPS=_STEPS, TILE=16, BLOCK=width,
        )  # fmt: skip
        return out[:rows]
