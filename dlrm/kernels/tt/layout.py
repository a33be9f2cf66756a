"""How the rows of tensor-train tables are split into two factors, and how these are numbered.

See :mod:`dlrm.kernels.tt` for what a factor, a pair and a slot are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dlrm.kernels import triton

_SEGMENT = 2048  # words that one program numbers, at most


@triton.constexpr_function
def padded(n: int, least: int = 1) -> int:
    """The next power of two from ``n`` on: Triton's blocks have no other sizes."""
    return max(least, triton.next_power_of_2(n))


class TTShape(NamedTuple):
    """The shape of a group of tables in tensor-train format."""

    p: Tensor
    """Factors of the rows of each table, the number of slices of each core, int64 ``[F, d]``."""
    q: Sequence[int]
    """Factors of the embedding dim, ``d`` of them."""
    ranks: Sequence[int]
    """``(1, r_1, ..., r_{d-1}, 1)``."""

    def core_offsets(self) -> Tensor:
        """The first slice of each table in each core, ``[F, d]``."""
        return self.p.cumsum(0) - self.p


@dataclass(frozen=True, kw_only=True)
class PairLayout:
    """Two neighboring cores that are multiplied out, and how their pairs of slices are numbered.

    The small (outer) core has slices ``[Q, R]``, the big (inner) one ``[R, N]``, and a product is
    ``[Q, N]``. Pairs are numbered table by table, in a table by big slice, then by small slice.
    """

    small: int  # index of the core
    big: int
    pairs: int  # of all tables
    pairs_per_slice: int  # of one big slice, at most
    sizes: dict[str, int]  # Q, R, N, and LEFT: whether the product is a left factor
    pair_start: Tensor  # [big slices + 1] first pair of a big slice
    small_start: Tensor  # [big slices] first small slice of the table
    first_pair: Tensor  # [small slices] the pairs of a small slice: first, step and number
    step: Tensor
    count: Tensor

    @classmethod
    def build(cls, p: Tensor, small: int, big: int, sizes: dict[str, int]) -> PairLayout:
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
            pairs=base[-1],
            pairs_per_slice=max(smalls),
            sizes=sizes,
            pair_start=tensor([*start, base[-1]]),
            small_start=tensor(first_small),
            first_pair=tensor(first),
            step=tensor(step),
            count=tensor(count),
        )


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The bitmap of all ids, split where a right factor begins, and after ``_SEGMENT`` words."""

    start: Tensor  # [segments + 1] first word of each
    right: Tensor  # [segments] its right factor
    longest: int  # words


@dataclass(frozen=True, kw_only=True)
class FactorLayout:
    """How the rows of a group of tables are split into a left and a right factor.

    Every id has a key, its bit in a bitmap of ``words`` 32-bit words. The keys of one right factor
    are adjacent and begin with a word.
    """

    cores: int
    left: PairLayout | None  # None: the left factor is a slice of the first core
    right: PairLayout | None  # None: the right factor is a slice of the last core
    sizes: dict[str, int]  # A, R and C: a left factor is [A, R], a right one [R, C]
    tables: Tensor  # int64 [F, d + 4] p, first left and right factor, first key, keys a right one
    right_factors: Sequence[tuple[int, int]]  # of each table: their number, and words of each
    wide: bool  # ids beyond 32 bits

    @cached_property
    def words(self) -> int:
        """Words of the bitmap of all ids."""
        return sum(count * words for count, words in self.right_factors)

    @cached_property
    def num_segments(self) -> int:
        """Number of segments; does not build :attr:`segments`."""
        return sum(count * triton.cdiv(words, _SEGMENT) for count, words in self.right_factors)

    @cached_property
    def segments(self) -> Segments:
        """Built on first use: small batches of large tables do not need it."""
        starts: list[Tensor] = []
        rights: list[Tensor] = []
        first = end = 0  # right factor and word
        for count, words in self.right_factors:
            parts = torch.arange(0, words, _SEGMENT)
            starts.append((end + words * torch.arange(count)[:, None] + parts).view(-1))
            rights.append((first + torch.arange(count)).repeat_interleave(len(parts)))
            first, end = first + count, end + words * count
        device = self.tables.device
        return Segments(
            start=torch.cat([*starts, torch.tensor([end])]).to(device, torch.int32),
            right=torch.cat(rights).to(device, torch.int32),
            longest=min(_SEGMENT, max(words for _, words in self.right_factors)),
        )

    @classmethod
    def build(cls, p: Tensor, q: tuple[int, ...], ranks: tuple[int, ...]) -> FactorLayout:
        d = len(q)
        middle = max(1, d - 1) if d < 4 else 2  # cores of the left factor
        left = right = None
        if middle == 2:
            sizes = {"Q": q[0], "R": ranks[1], "N": q[1] * ranks[2], "LEFT": True}
            left = PairLayout.build(p, 0, 1, sizes)
        if d == 4:
            sizes = {"Q": q[3], "R": ranks[3], "N": ranks[2] * q[2], "LEFT": False}
            right = PairLayout.build(p, 3, 2, sizes)
        tables: list[list[int]] = []
        right_factors: list[tuple[int, int]] = []
        first_left = first_right = first_word = 0
        for row in p.tolist():
            lefts, rights = prod(row[:middle]), prod(row[middle:])
            words = triton.cdiv(lefts, 32)
            first_key = 32 * (first_word - first_right * words)
            tables.append([*row, first_left, first_right, first_key, 32 * words])
            right_factors.append((rights, words))
            first_word += rights * words
            first_left, first_right = first_left + lefts, first_right + rights
        return cls(
            cores=d,
            left=left,
            right=right,
            sizes={"A": prod(q[:middle]), "R": ranks[middle], "C": prod(q[middle:])},
            tables=torch.tensor(tables, device=p.device),
            right_factors=right_factors,
            wide=max(prod(row) for row in p.tolist()) >= 2**31,
        )


_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def factor_layout(shape: TTShape) -> FactorLayout:
    """The layout of a group, built once: reading ``p`` waits for the GPU."""
    p, q, ranks = shape
    layouts = _layouts.setdefault(p, {})
    key = (tuple(q), tuple(ranks), p._version)
    if key not in layouts:
        layouts[key] = FactorLayout.build(p, key[0], key[1])
    return layouts[key]
