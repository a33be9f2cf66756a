"""The two factors of rows in tensor-train format: products of cores, and the way back to these.

See :mod:`dlrm.kernels.tt` for what a factor is, :mod:`dlrm.kernels.tt._pairs` for pairs and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm.kernels.tt import _pairs as kernels
from dlrm.kernels.tt.indexing import FactorIndex
from dlrm.kernels.tt.layout import power
from dlrm.kernels.update.in_backward import FusedUpdate, FusedUpdates
from dlrm.kernels.update.rules import hyper

# Rows and columns of the tile that a program multiplies, by kernel; measured on an H100.
_TILES = {"pair_products": (16, 64), "big_gradient": (64, 64), "small_gradient": (64, 32)}
_FEW = 64  # rows of a slice on average, of which a tall tile would be padding for the most part
_MANY = 800  # programs, which had better be light ones then
_PROGRAMS = 4096  # that keep a GPU busy
_FUSED = ("sgd", "adagrad", "rowwise_adagrad")  # rules that leave alone what has no gradient


class Factor:
    """One factor of all look-ups: the slices, or the products of the pairs in use."""

    def __init__(
        self, used: FactorIndex, values: Tensor, zeros: Tensor | None, *, ordered: bool
    ) -> None:
        self.used, self.ordered = used, ordered
        self.values = values  # [slots, Q * N] once multiplied out
        self.zeros = zeros  # to add the gradient of the slices to, or that of the small core
        self.gradient: Tensor | None = None  # zeros to add that of the products to
        self.update: FusedUpdate | None = None  # of the big core, for the backward pass to apply
        if used.pairs is not None and zeros is not None:
            width = used.pairs.sizes["Q"] * used.pairs.sizes["N"]
            self.gradient = values.new_empty(used.many, width, dtype=torch.float32)

    def _tiles(self, kernel: str, precision: str) -> dict[str, Any]:
        """Compile-time constants of one of the GEMMs."""
        assert self.used.pairs is not None
        sizes, slices = self.used.pairs.sizes, len(self.used.spans)
        tall, wide = _TILES[kernel]
        rank, wide = power(sizes["R"], 16), min(wide, power(sizes["N"], 16))
        warps, stages = 4 if sizes["N"] > wide else 2, 2
        if kernel == "big_gradient":
            many = slices * triton.cdiv(sizes["N"], wide) >= _MANY
            few = len(self.used.index) * sizes["Q"] < _FEW * slices
            tall, warps = 16 if few else 32 if many else tall, 2 if many else 4
            # From rank 64 on, a second stage of the pipeline costs more in occupancy than it hides.
            stages = 1 if rank >= 64 else 2
        tiles = {"R2": rank, "BM": tall, "BN": wide, "num_warps": warps, "num_stages": stages}
        return {**sizes, **tiles, "PRECISION": precision}

    def _grid(self, tiles: dict[str, Any]) -> tuple[int, int]:
        assert self.used.pairs is not None
        most = min(self.used.pairs.most, self.used.many) * tiles["Q"]
        slices = len(self.used.spans)
        # A program without any costs a microsecond.
        each = triton.cdiv(_PROGRAMS, slices)
        average = triton.cdiv(len(self.used.index) * tiles["Q"], slices * tiles["BM"])
        return slices, min(each, average, triton.cdiv(most, tiles["BM"]))

    def multiply(
        self, cores: Sequence[Tensor], precision: str, updates: FusedUpdates | None
    ) -> None:
        """Multiply the pairs in use out; without pairs there is nothing to do."""
        used = self.used
        if used.pairs is None:
            return
        small, big = cores[used.pairs.small], cores[used.pairs.big]
        self.update = updates.take(big) if updates else None
        tiles = self._tiles("pair_products", precision)
        kept = torch.bfloat16 if precision == "bf16" else big.dtype
        self.values = big.new_empty(used.many, tiles["Q"] * tiles["N"], dtype=kept)
        kernels.pair_products[self._grid(tiles)](
            small, big, self.values, self.gradient, used.spans, used.members, **tiles
        )

    def backward(
        self,
        grad: Tensor,
        cores: Sequence[Tensor],
        grads: list[Tensor | None],
        precision: str,
    ) -> None:
        """From the gradient of the products to those of the two cores.

        The big core has none if it is updated instead.
        """
        used = self.used
        assert used.pairs is not None
        small, big = cores[used.pairs.small], cores[used.pairs.big]
        if self.ordered:  # first, since it reads the big core
            d_small, added = self._ordered_sum(grad, small, big, precision), None
        else:
            d_small = added = self._once("zeros", small)
        tiles = self._tiles("big_gradient", precision)
        columns = triton.cdiv(tiles["N"], tiles["BN"])
        d_big, update = None, self._applicable(big, columns)
        if update is None:
            d_big = torch.empty_like(big, dtype=torch.float32)
        else:
            state = update.states[0] if update.states else None
            tiles |= {"state": state, "lr": update.lr, "hyper": hyper(update.rule)}
            tiles["RULE"] = update.rule.kind
        kernels.big_gradient[(len(used.spans), columns)](
            small, big, grad, d_big, added, used.spans, used.members, **tiles
        )
        if update is not None:
            update.done(big)
        grads[used.pairs.small], grads[used.pairs.big] = d_small, d_big

    def _applicable(self, big: Tensor, columns: int) -> FusedUpdate | None:
        """The update of the big core, if the kernel can apply it to its ``columns`` of tiles."""
        update = self.update
        if update is None or not update.due or big.dtype != torch.float32:
            return None
        rule = update.rule
        able = rule.name in _FUSED and rule.momentum == rule.weight_decay == 0
        # The mean over a slice is known where one program has all of it.
        return update if able and (columns == 1 or rule.name != "rowwise_adagrad") else None

    def _ordered_sum(self, grad: Tensor, small: Tensor, big: Tensor, precision: str) -> Tensor:
        """Gradient of the small core, what each pair adds to it summed in their order."""
        used, pairs = self.used, self.used.pairs
        assert pairs is not None
        length = small.shape[1]
        tiles = self._tiles("small_gradient", precision)
        parts = grad.new_empty(used.many, length)
        kernels.small_gradient[self._grid(tiles)](big, grad, parts, used.spans, **tiles)
        d_small = torch.empty_like(small, dtype=torch.float32)
        block = min(32, power(length))
        kernels.sum_small[(len(small), triton.cdiv(length, block))](
            parts, used.flags, used.slots, pairs.first_pair, pairs.step, pairs.count, d_small,
            LENGTH=length, TILE=256, BLOCK=block,
        )  # fmt: skip
        return d_small

    def zero_gradient(self) -> Tensor:
        """Zeros to add the gradient of the values to, fp32."""
        return self._once("zeros" if self.used.pairs is None else "gradient", self.values)

    def _once(self, name: str, like: Tensor) -> Tensor:
        """A buffer of zeros from the forward pass; for a second backward pass a new one."""
        buffer = getattr(self, name)
        setattr(self, name, None)
        if buffer is None:
            return torch.zeros_like(like, dtype=torch.float32)
        return buffer.view_as(like)

    def order(self) -> Tensor:
        """Look-ups in an order in which those with an equal factor lie together."""
        index, pairs = self.used.index, self.used.pairs
        number = len(self.values) if pairs is None else pairs.number
        if number < 1 << 16:  # half the passes of a radix sort; wrapping keeps them apart
            index = index.to(torch.int16)
        return index.sort(stable=True).indices
