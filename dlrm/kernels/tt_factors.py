"""The two factors of rows in tensor-train format, and the products of cores that make them.

See :mod:`dlrm.kernels.tt` for what a factor is, :mod:`dlrm.kernels.tt_pairs` for pairs and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dlrm.kernels import tt_pairs as kernels

# Rows and columns of the tile that a program multiplies, by kernel; measured on an H100.
_TILES = {"pair_products": (32, 64), "big_gradient": (64, 64), "small_gradient": (64, 32)}


def power(n: int, least: int = 1) -> int:
    """The next power of two from ``n`` on: Triton's blocks have no other sizes."""
    return max(least, triton.next_power_of_2(n))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Where two neighbouring cores are multiplied out: sizes, strides and the numbering of pairs.

    The small core has slices ``[Q, R]``, the big one ``[R, N]`` and their product is ``[Q, N]``.
    """

    small: int  # index of the core
    big: int
    number: int  # pairs of all tables
    most: int  # pairs of one big slice, at most
    sizes: dict[str, int]
    base: Tensor  # [F] first pair of a table
    pair_start: Tensor  # [big slices + 1] first pair of a big slice
    small_start: Tensor  # [big slices] first small slice of the table
    first_pair: Tensor  # [small slices] the pairs of a small slice: first, step and number
    step: Tensor
    count: Tensor

    @classmethod
    def build(cls, p: Tensor, small: int, big: int, sizes: dict[str, int]) -> Pairs:
        device, rows = p.device, p.tolist()
        smalls, bigs = [r[small] for r in rows], [r[big] for r in rows]
        base = [0, *accumulate(s * b for s, b in zip(smalls, bigs, strict=True))]
        if base[-1] >= 2**31:
            raise ValueError(
                f"cores {small} and {big} form {base[-1]} pairs of slices, the kernels number at "
                "most 2**31 - 1; choose more balanced factors p, or more cores"
            )
        small_starts = [0, *accumulate(smalls)]
        start: list[int] = []
        first_small: list[int] = []
        first: list[int] = []
        step: list[int] = []
        count: list[int] = []
        for table, (s, b) in enumerate(zip(smalls, bigs, strict=True)):
            start += range(base[table], base[table + 1], s)
            first_small += [small_starts[table]] * b
            first += range(base[table], base[table] + s)
            step += [s] * s
            count += [b] * s

        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            small=small,
            big=big,
            number=base[-1],
            most=max(smalls),
            sizes=sizes,
            base=tensor(base[:-1]),
            pair_start=tensor([*start, base[-1]]),
            small_start=tensor(first_small),
            first_pair=tensor(first),
            step=tensor(step),
            count=tensor(count),
        )


@dataclass(frozen=True, kw_only=True)
class Chain:
    """How the rows of a group of tables are cut into a left and a right factor."""

    left: Pairs | None  # None: a slice of the first core
    right: Pairs | None  # None: a slice of the last core
    sizes: dict[str, int]  # A, R, C and the same rounded up to powers of 2
    keys: Tensor  # [F, 3] of each table: its first key, left factors, and the first of these
    words: int  # of 32 bits, to flag every id of every table
    wide: bool  # ids beyond 32 bits

    @classmethod
    def build(cls, p: Tensor, q: tuple[int, ...], ranks: tuple[int, ...]) -> Chain:
        d = len(q)
        middle = max(1, d - 1) if d < 4 else 2  # cores of the left factor
        left = right = None
        if middle == 2:
            n = q[1] * ranks[2]
            strides = {"SJ": ranks[1], "SR": 1, "BR": n, "BC": 1, "OJ": n, "OC": 1}
            left = Pairs.build(p, 0, 1, {"Q": q[0], "R": ranks[1], "N": n, **strides})
        if d == 4:
            n, r = ranks[2] * q[2], ranks[3]
            strides = {"SJ": 1, "SR": q[3], "BR": 1, "BC": r, "OJ": 1, "OC": q[3]}
            right = Pairs.build(p, 3, 2, {"Q": q[3], "R": r, "N": n, **strides})
        a, r, c = prod(q[:middle]), ranks[middle], prod(q[middle:])
        pads = {"A2": power(a, 2), "R2": power(r, 2), "C2": power(c, 2)}
        keys, first, lefts, rights = [], 0, 0, 0
        for row in p.tolist():
            many, others = prod(row[:middle]), prod(row[middle:])
            keys.append([first - rights * many, many, lefts])
            first, lefts, rights = first + many * others, lefts + many, rights + others
        return cls(
            left=left,
            right=right,
            sizes={"A": a, "R": r, "C": c, **pads},
            keys=torch.tensor(keys, device=p.device),
            words=triton.cdiv(first, 32),
            wide=max(prod(row) for row in p.tolist()) >= 2**31,
        )


_chains: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def chain_of(p: Tensor, q: Sequence[int], ranks: Sequence[int]) -> Chain:
    """The chain of a group, made once: reading ``p`` waits for the GPU."""
    known = _chains.setdefault(p, {})
    key = (tuple(q), tuple(ranks), p._version)
    if key not in known:
        known[key] = Chain.build(p, key[0], key[1])
    return known[key]


class Zeros:
    """Buffers of zeros, all filled by one launch."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, int, torch.dtype]] = []

    def ask(self, owner: Any, name: str, size: int, dtype: torch.dtype = torch.int32) -> None:
        """Have attribute ``name`` of ``owner`` be ``size`` numbers of 32 bits."""
        self._wanted.append((owner, name, size, dtype))

    def make(self, device: torch.device) -> None:
        """Allocate and fill all that was asked for; each begins on 16 bytes."""
        sizes = [-(-size // 4) * 4 for _, _, size, _ in self._wanted]
        filled = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        for (owner, name, size, dtype), part in zip(self._wanted, filled.split(sizes), strict=True):
            setattr(owner, name, part[:size].view(dtype))


class Factor:
    """One factor of all look-ups: which one each has, and the products in use."""

    flags: Tensor | None = None  # [pairs] those in use
    total: Tensor  # [1] how many they are
    gradient: Tensor | None = None  # zeros to add the gradient of the values in use to
    d_small: Tensor | None = None  # and that of the small core

    def __init__(
        self,
        pairs: Pairs | None,
        core: int,
        cores: Sequence[Tensor],
        index: Tensor,
        zeros: Zeros,
        *,
        trains: bool,
        ordered: bool,
    ) -> None:
        self.pairs, self.ordered = pairs, ordered
        self.number = len(cores[core]) if pairs is None else pairs.number
        self.values = cores[core]  # [slots, Q * N] once multiplied out
        self.index = index  # [n] slice or pair of every look-up, filled in by others
        self.slots: Tensor | None = None  # [pairs] where the product of a pair in use is
        adds = trains and not ordered
        if pairs is None:
            if adds:
                zeros.ask(self, "gradient", self.values.numel(), torch.float32)
            return
        self.many = min(len(index), pairs.number)
        zeros.ask(self, "flags", pairs.number)
        zeros.ask(self, "total", 1)
        if adds:
            self.gradient = self.values.new_empty(
                self.many, pairs.sizes["Q"] * pairs.sizes["N"], dtype=torch.float32
            )
            zeros.ask(self, "d_small", cores[pairs.small].numel(), torch.float32)

    @property
    def base(self) -> Tensor | None:
        return None if self.pairs is None else self.pairs.base

    def _tiles(self, kernel: str, precision: str) -> dict[str, Any]:
        """Compile-time constants of one of the GEMMs."""
        assert self.pairs is not None
        sizes = self.pairs.sizes
        tall, wide = _TILES[kernel]
        rank = power(sizes["R"], 16)
        # From rank 64 on, a second stage of the pipeline costs more in occupancy than it hides.
        stages = 1 if kernel == "big_gradient" and rank >= 64 else 2
        tiles = {"R2": rank, "BM": tall, "BN": min(wide, power(sizes["N"], 16))}
        return {**sizes, **tiles, "PRECISION": precision, "num_stages": stages}

    def _grid(self, tiles: dict[str, Any]) -> tuple[int, int]:
        assert self.pairs is not None
        most = min(self.pairs.most, self.many) * tiles["Q"]
        return len(self.pairs.small_start), triton.cdiv(most, tiles["BM"])

    def multiply(self, cores: Sequence[Tensor], precision: str) -> None:
        """Rank the pairs in use and multiply them out; without pairs there is nothing to do."""
        if self.pairs is None:
            return
        pairs, small, big = self.pairs, cores[self.pairs.small], cores[self.pairs.big]
        bigs = len(pairs.small_start)
        self.slots = self.index.new_empty(pairs.number)
        self.members = self.index.new_empty(self.many)
        self.spans = self.index.new_empty(bigs, 2)
        kernels.rank_pairs[(bigs,)](
            self.flags, pairs.pair_start, pairs.small_start, self.total, self.slots, self.members,
            self.spans, BLOCK=256,
        )  # fmt: skip
        tiles = self._tiles("pair_products", precision)
        self.values = big.new_empty(self.many, tiles["Q"] * tiles["N"])
        kernels.pair_products[self._grid(tiles)](
            small, big, self.values, self.gradient, self.spans, self.members, **tiles
        )

    def backward(
        self, grad: Tensor, cores: Sequence[Tensor], grads: list[Tensor], precision: str
    ) -> None:
        """From the gradient of the products to those of the two cores."""
        pairs = self.pairs
        assert pairs is not None
        small, big = cores[pairs.small], cores[pairs.big]
        tiles = self._tiles("big_gradient", precision)
        d_big = torch.empty_like(big, dtype=torch.float32)
        d_small = None if self.ordered else self._once("d_small", small)
        kernels.big_gradient[(len(self.spans), triton.cdiv(tiles["N"], tiles["BN"]))](
            small, big, grad, d_big, d_small, self.spans, self.members, **tiles
        )
        if d_small is None:
            d_small = self._ordered_sum(grad, small, big, precision)
        grads[pairs.small], grads[pairs.big] = d_small, d_big

    def _ordered_sum(self, grad: Tensor, small: Tensor, big: Tensor, precision: str) -> Tensor:
        """Gradient of the small core, what each pair adds to it summed in their order."""
        pairs = self.pairs
        assert pairs is not None
        length = small.shape[1]
        tiles = self._tiles("small_gradient", precision)
        parts = grad.new_empty(self.many, length)
        kernels.small_gradient[self._grid(tiles)](big, grad, parts, self.spans, **tiles)
        d_small = torch.empty_like(small, dtype=torch.float32)
        block = min(32, power(length))
        kernels.sum_small[(len(small), triton.cdiv(length, block))](
            parts, self.flags, self.slots, pairs.first_pair, pairs.step, pairs.count, d_small,
            LENGTH=length, TILE=256, BLOCK=block,
        )  # fmt: skip
        return d_small

    def zero_gradient(self) -> Tensor:
        """Zeros to add the gradient of the values in use to, fp32."""
        return self._once("gradient", self.values)

    def _once(self, name: str, like: Tensor) -> Tensor:
        """A buffer that was zeroed in the forward pass; for a second backward pass a new one."""
        buffer = getattr(self, name)
        setattr(self, name, None)
        if buffer is None:
            return torch.zeros_like(like, dtype=torch.float32)
        return buffer.view_as(like)

    def order(self) -> Tensor:
        """Look-ups in an order in which those with an equal factor lie together."""
        index = self.index
        if self.number < 1 << 16:  # half the passes of a radix sort; wrapping keeps them apart
            index = index.to(torch.int16)
        return index.sort(stable=True).indices
