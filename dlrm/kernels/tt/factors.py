"""The two factors of rows in tensor-train format: products of cores, and their gradients.

See :mod:`dlrm.kernels.tt` for what a factor, a pair and a slot are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels import triton
from dlrm.kernels.tt import _pairs as kernels
from dlrm.kernels.tt._rows import FactorOfLookups, Sums
from dlrm.kernels.tt.indexing import FactorIndex
from dlrm.kernels.tt.layout import padded

# Rows and columns of the tile that a program multiplies, by kernel; measured on an H100.
_TILES = {"pair_products": (16, 64), "big_gradient": (64, 64)}
_FEW = 64  # average rows of a slice below which a tall tile would be mostly padding
_MANY = 800  # number of programs from which small ones are faster
_PROGRAMS = 4096  # enough to keep a GPU busy


class ZerosOnce:
    """Zeros that the forward pass allocated for one backward pass; a second one gets new ones."""

    def __init__(self, zeros: Tensor | None) -> None:
        self._zeros = zeros

    def take(self, like: Tensor, limit: Tensor | None) -> Sums:
        """The zeros, of the shape of ``like``.

        Args:
            like: a tensor of that shape.
            limit: 0-d; no sum, whatever its order, will be above. With it sums are deterministic.
        """
        if limit is not None:
            # A NaN or infinite limit makes all sums NaN. The bits left are for rounding to bf16.
            scale = (61 - limit.double().log2().ceil()).clamp(max=126).exp2().float()
            return Sums(torch.zeros_like(like, dtype=torch.int64), scale)
        zeros, self._zeros = self._zeros, None
        if zeros is None:
            return Sums(torch.zeros_like(like, dtype=torch.float32))
        return Sums(zeros.view_as(like))


def total(sums: Sums) -> Tensor:
    """The sums in fp32."""
    return sums.data if sums.scale is None else (sums.data / sums.scale.double()).float()


def largest(values: Tensor) -> Tensor:
    """The largest magnitude, 0-d fp64."""
    return values.abs().amax().double()


class Factor:
    """The left or the right factor of all look-ups: slices, or the products of pairs in use.

    Args:
        index: the factor of each look-up.
        cores: all cores.
        core: the outer core, whose slices are the factors or a part of their pairs.
        zeros: fp32 zeros, to add the gradient of that core to; None if nothing is added.
    """

    def __init__(
        self, index: FactorIndex, cores: Sequence[Tensor], core: int, zeros: Tensor | None
    ) -> None:
        self.index = index
        self.core = core
        self.data = cores[core]  # [slices or slots, A * R or R * C]; products once computed
        self._core_zeros = ZerosOnce(zeros)
        self._product_zeros = ZerosOnce(None)
        self._adds = zeros is not None

    @property
    def of_lookups(self) -> FactorOfLookups:
        """The arguments of the kernels."""
        return FactorOfLookups(self.data, self.index.of_lookup, self.index.slots)

    def multiply(self, cores: Sequence[Tensor], precision: str) -> None:
        """Compute the products of the pairs in use, if the factors are pairs.

        Args:
            cores: all cores.
            precision: how matrices are multiplied.
        """
        index = self.index
        if index.pairs is None:
            return
        small, big = cores[index.pairs.small], cores[index.pairs.big]

        tiles = self._tiles("pair_products", precision)
        shape = index.num_slots, tiles["Q"] * tiles["N"]
        kept = torch.bfloat16 if precision == "bf16" else big.dtype
        self.data = big.new_empty(shape, dtype=kept)
        cleared = big.new_empty(shape, dtype=torch.float32) if self._adds else None
        self._product_zeros = ZerosOnce(cleared)

        kernels.pair_products[self._grid(tiles)](
            small, big, self.data, cleared, index.segments, index.members, **tiles
        )

    def zero_gradient(self, limit: Tensor | None) -> Sums:
        """Zeros, to add the gradient of :attr:`data` to; see :meth:`ZerosOnce.take`."""
        zeros = self._core_zeros if self.index.pairs is None else self._product_zeros
        return zeros.take(self.data, limit)

    def largest(self, cores: Sequence[Tensor]) -> Tensor:
        """At least the largest magnitude of an element of a factor in use, 0-d."""
        pairs = self.index.pairs
        if pairs is None:
            return largest(self.data)
        return pairs.sizes["R"] * largest(cores[pairs.small]) * largest(cores[pairs.big])

    def backward(
        self, grad: Tensor, cores: Sequence[Tensor], precision: str, *, deterministic: bool
    ) -> dict[int, Tensor]:
        """Gradients of the cores in fp32, by their index.

        Args:
            grad: gradient of :attr:`data`.
            cores: all cores.
            precision: how matrices are multiplied.
            deterministic: sum deterministically.
        """
        index = self.index
        if index.pairs is None:
            return {self.core: grad}
        small, big = cores[index.pairs.small], cores[index.pairs.big]
        tiles = self._tiles("big_gradient", precision)
        limit = index.n * tiles["N"] * largest(grad) * largest(big) if deterministic else None
        d_small = self._core_zeros.take(small, limit)
        d_big = torch.empty_like(big, dtype=torch.float32)

        columns = triton.cdiv(tiles["N"], tiles["BN"])
        kernels.big_gradient[(len(index.segments), columns)](
            small, big, grad, d_big, d_small, index.segments, index.members, **tiles
        )
        return {index.pairs.small: total(d_small), index.pairs.big: d_big}

    def _tiles(self, kernel: str, precision: str) -> dict[str, Any]:
        """Compile-time constants of one of the GEMMs."""
        assert self.index.pairs is not None
        sizes, slices = self.index.pairs.sizes, len(self.index.segments)
        tall, wide = _TILES[kernel]
        wide = min(wide, padded(sizes["N"], 16))
        warps, stages = 4 if sizes["N"] > wide else 2, 2
        if kernel == "big_gradient":
            many = slices * triton.cdiv(sizes["N"], wide) >= _MANY
            few = self.index.n * sizes["Q"] < _FEW * slices
            tall = 16 if few else 32 if many else tall
            warps = 2 if many else 4
            # From rank 64 on, a second stage of the pipeline costs more in occupancy than it hides.
            stages = 1 if padded(sizes["R"], 16) >= 64 else 2
        tiles = {"BM": tall, "BN": wide, "num_warps": warps, "num_stages": stages}
        return {**sizes, **tiles, "PRECISION": precision}

    def _grid(self, tiles: dict[str, Any]) -> tuple[int, int]:
        index = self.index
        assert index.pairs is not None
        slices = len(index.segments)
        most = min(index.pairs.pairs_per_slice, index.num_slots) * tiles["Q"]

        # No more programs than have rows: an empty one costs a microsecond.
        each = triton.cdiv(_PROGRAMS, slices)
        average = triton.cdiv(index.n * tiles["Q"], slices * tiles["BM"])
        return slices, min(each, average, triton.cdiv(most, tiles["BM"]))
