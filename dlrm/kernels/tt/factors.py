"""The two factors of rows in tensor-train format: products of cores, and their gradients.

See :mod:`dlrm.kernels.tt` for what a factor, a pair and a slot are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels import triton
from dlrm.kernels.tt import _pairs as kernels
from dlrm.kernels.tt._rows import FactorOfLookups, Sums
from dlrm.kernels.tt.layout import PairLayout, padded

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
        side: left or right.
        core: the outer core, whose slices are the factors or a part of their pairs.
        pairs: the factors are products of these pairs; None if they are slices.
        of_lookup: slice or pair of every look-up, int32 ``[n]``, to be filled; None if not needed.
        n: number of look-ups.
        zeros: buffers by name: ``SIDE flags`` for the pairs in use, ``SIDE total`` for their count,
            and ``SIDE gradient`` to add the gradient of the outer core to, if there will be one.
    """

    data: Tensor  # [slices or slots, A * R or R * C]
    slots: Tensor | None = None  # [pairs] the slot of each pair in use
    members: Tensor  # [slots] small slice of each
    segments: Tensor  # [big slices, 2] their slots

    def __init__(
        self,
        side: str,
        core: int,
        pairs: PairLayout | None,
        of_lookup: Tensor | None,
        n: int,
        zeros: Mapping[str, Tensor],
    ) -> None:
        self.core = core
        self.pairs = pairs
        self.of_lookup = of_lookup
        self.n = n
        self.flags = zeros.get(f"{side} flags")
        self._total = zeros.get(f"{side} total")
        gradient = zeros.get(f"{side} gradient")
        self._adds = gradient is not None
        self._core_zeros = ZerosOnce(None if gradient is None else gradient.view(torch.float32))
        self._product_zeros = ZerosOnce(None)

    @property
    def of_lookups(self) -> FactorOfLookups:
        """The arguments of the kernels."""
        return FactorOfLookups(self.data, self.of_lookup, self.slots)

    def assign_slots(self) -> None:
        """Assign slots to the pairs in use, once they are flagged, if the factors are pairs."""
        if self.pairs is None:
            return
        assert self.flags is not None
        self.num_slots = min(self.n, self.pairs.pairs)
        self.slots = torch.empty_like(self.flags)
        self.members = self.flags.new_empty(self.num_slots)
        self.segments = self.flags.new_empty(len(self.pairs.small_start), 2)
        kernels.rank_pairs[(len(self.segments),)](
            self.flags, self.pairs.pair_start, self.pairs.small_start, self._total, self.slots,
            self.members, self.segments, BLOCK=256,
        )  # fmt: skip

    def multiply(self, cores: Sequence[Tensor], precision: str) -> None:
        """Take the slices, or compute the products of the pairs in use.

        Args:
            cores: all cores.
            precision: how matrices are multiplied.
        """
        if self.pairs is None:
            self.data = cores[self.core]
            return
        small, big = cores[self.pairs.small], cores[self.pairs.big]

        tiles = self._tiles("pair_products", precision)
        shape = self.num_slots, tiles["Q"] * tiles["N"]
        kept = torch.bfloat16 if precision == "bf16" else big.dtype
        self.data = big.new_empty(shape, dtype=kept)
        cleared = big.new_empty(shape, dtype=torch.float32) if self._adds else None
        self._product_zeros = ZerosOnce(cleared)

        kernels.pair_products[self._grid(tiles)](
            small, big, self.data, cleared, self.segments, self.members, **tiles
        )

    def zero_gradient(self, limit: Tensor | None) -> Sums:
        """Zeros, to add the gradient of :attr:`data` to; see :meth:`ZerosOnce.take`."""
        zeros = self._core_zeros if self.pairs is None else self._product_zeros
        return zeros.take(self.data, limit)

    def largest(self, cores: Sequence[Tensor]) -> Tensor:
        """At least the largest magnitude of an element of a factor in use, 0-d."""
        pairs = self.pairs
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
        if self.pairs is None:
            return {self.core: grad}
        small, big = cores[self.pairs.small], cores[self.pairs.big]
        tiles = self._tiles("big_gradient", precision)
        limit = self.n * tiles["N"] * largest(grad) * largest(big) if deterministic else None
        d_small = self._core_zeros.take(small, limit)
        d_big = torch.empty_like(big, dtype=torch.float32)

        columns = triton.cdiv(tiles["N"], tiles["BN"])
        kernels.big_gradient[(len(self.segments), columns)](
            small, big, grad, d_big, d_small, self.segments, self.members, **tiles
        )
        return {self.pairs.small: total(d_small), self.pairs.big: d_big}

    def _tiles(self, kernel: str, precision: str) -> dict[str, Any]:
        """Compile-time constants of one of the GEMMs."""
        assert self.pairs is not None
        sizes, slices = self.pairs.sizes, len(self.segments)
        tall, wide = _TILES[kernel]
        wide = min(wide, padded(sizes["N"], 16))
        warps, stages = 4 if sizes["N"] > wide else 2, 2
        if kernel == "big_gradient":
            many = slices * triton.cdiv(sizes["N"], wide) >= _MANY
            few = self.n * sizes["Q"] < _FEW * slices
            tall = 16 if few else 32 if many else tall
            warps = 2 if many else 4
            # From rank 64 on, a second stage of the pipeline costs more in occupancy than it hides.
            stages = 1 if padded(sizes["R"], 16) >= 64 else 2
        tiles = {"BM": tall, "BN": wide, "num_warps": warps, "num_stages": stages}
        return {**sizes, **tiles, "PRECISION": precision}

    def _grid(self, tiles: dict[str, Any]) -> tuple[int, int]:
        assert self.pairs is not None
        slices = len(self.segments)
        most = min(self.pairs.pairs_per_slice, self.num_slots) * tiles["Q"]

        # No more programs than have rows: an empty one costs a microsecond.
        each = triton.cdiv(_PROGRAMS, slices)
        average = triton.cdiv(self.n * tiles["Q"], slices * tiles["BM"])
        return slices, min(each, average, triton.cdiv(most, tiles["BM"]))
