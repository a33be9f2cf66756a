"""How the rows of tensor-train tables are split into two factors, and how these are numbered.

See :mod:`dlrm.kernels.tt` for what a factor, a pair and a slot are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dlrm.kernels import triton

_SEGMENT = 2048  # words that one program numbers, at most


@triton.constexpr_function
def padded(n: int, least: int = 1) -> int:
    """The least power of two that is not below ``n``: the sizes of Triton's blocks are powers."""
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
    """The numbers of the pairs of slices of two neighboring cores that are multiplied out.

    The small (outer) core has slices ``[Q, R]``, the big (inner) one ``[R, N]``, and a product is
    ``[Q, N]``. Pairs are numbered by table, then by big slice, then by small slice.
    """

    small: int  # index of the core
    big: int
    pairs: int  # of all tables
    pairs_per_slice: int  # of one big slice, at most
    sizes: dict[str, int]  # Q, R, N, and LEFT: whether the product is a left factor
    pair_start: Tensor  # [big slices + 1] first pair of a big slice
    small_start: Tensor  # [big slices] first small slice of the table

    @classmethod
    def build(cls, p: Tensor, small: int, big: int, sizes: dict[str, int]) -> PairLayout:
        """The pairs of cores ``small`` and ``big`` of tables with factors ``p [F, d]``.

        Raises:
            ValueError: there are too many.
        """
        smalls, bigs = p[:, small].cpu(), p[:, big].cpu()  # slices of each table
        ends = (smalls * bigs).cumsum(0)
        pairs = int(ends[-1])
        if pairs >= 2**31:
            raise ValueError(
                f"cores {small} and {big} form {pairs} pairs of slices, the kernels number at "
                "most 2**31 - 1; choose more balanced factors p, or more cores"
            )

        # Of every big slice: its table, its number there, and its first pair.
        table = torch.repeat_interleave(bigs)
        number = torch.arange(len(table)) - (bigs.cumsum(0) - bigs)[table]
        first_pair = (ends - smalls * bigs)[table] + number * smalls[table]
        return cls(
            small=small,
            big=big,
            pairs=pairs,
            pairs_per_slice=int(smalls.max()),
            sizes=sizes,
            pair_start=torch.cat([first_pair, ends[-1:]]).to(p.device, torch.int32),
            small_start=(smalls.cumsum(0) - smalls)[table].to(p.device, torch.int32),
        )


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The bitmap of all ids, in parts of one right factor and at most ``_SEGMENT`` words."""

    start: Tensor  # [segments + 1] first word of each
    right: Tensor  # [segments] its right factor
    longest: int  # words


@dataclass(frozen=True, kw_only=True)
class FactorLayout:
    """How the rows of a group of tables are split into a left and a right factor.

    Every id has a key, its bit in a bitmap of ``words`` 32-bit words. The keys of one right factor
    are adjacent and start at a word of the bitmap.
    """

    cores: int
    left: PairLayout | None  # None: the left factor is a slice of the first core
    right: PairLayout | None  # None: the right factor is a slice of the last core
    sizes: dict[str, int]  # A, R and C: a left factor is [A, R], a right one [R, C]
    tables: Tensor  # int64 [F, d + 4] p, first left, first right, first key, keys per right factor
    right_factors: Sequence[tuple[int, int]]  # for each table: their number, and words per factor
    wide: bool  # whether ids need 64 bits

    @classmethod
    def build(cls, p: Tensor, q: tuple[int, ...], ranks: tuple[int, ...]) -> FactorLayout:
        """The layout of the tables of a :class:`TTShape`.

        Raises:
            ValueError: there are too many pairs of slices.
        """
        d = len(q)
        middle = max(1, d - 1) if d < 4 else 2  # cores of the left factor
        left = right = None
        if middle == 2:
            sizes = {"Q": q[0], "R": ranks[1], "N": q[1] * ranks[2], "LEFT": True}
            left = PairLayout.build(p, 0, 1, sizes)
        if d == 4:
            sizes = {"Q": q[3], "R": ranks[3], "N": ranks[2] * q[2], "LEFT": False}
            right = PairLayout.build(p, 3, 2, sizes)

        # Number the factors and the keys of all tables.
        tables: list[list[int]] = []
        right_factors: list[tuple[int, int]] = []
        first_left = first_right = first_word = 0
        for factors in p.tolist():
            lefts, rights = prod(factors[:middle]), prod(factors[middle:])
            words = triton.cdiv(lefts, 32)
            # A key is first_key + 32 * words * right + left, where the right factor is numbered
            # over all tables, and the left one within its own.
            first_key = 32 * (first_word - first_right * words)
            tables.append([*factors, first_left, first_right, first_key, 32 * words])
            right_factors.append((rights, words))
            first_left += lefts
            first_right += rights
            first_word += rights * words

        return cls(
            cores=d,
            left=left,
            right=right,
            sizes={"A": prod(q[:middle]), "R": ranks[middle], "C": prod(q[middle:])},
            tables=torch.tensor(tables, device=p.device),
            right_factors=right_factors,
            wide=max(prod(factors) for factors in p.tolist()) >= 2**31,
        )

    @cached_property
    def words(self) -> int:
        """Words of the bitmap of all ids."""
        return sum(count * words for count, words in self.right_factors)

    @cached_property
    def segments(self) -> Segments:
        """Built on first use: small batches of large tables do not need it."""
        starts: list[Tensor] = []
        rights: list[Tensor] = []
        first_right = first_word = 0
        for count, words in self.right_factors:
            parts = torch.arange(0, words, _SEGMENT)
            of_right = first_word + words * torch.arange(count)
            starts.append((of_right[:, None] + parts).view(-1))
            rights.append((first_right + torch.arange(count)).repeat_interleave(len(parts)))
            first_right += count
            first_word += count * words

        device = self.tables.device
        return Segments(
            start=torch.cat([*starts, torch.tensor([first_word])]).to(device, torch.int32),
            right=torch.cat(rights).to(device, torch.int32),
            longest=min(_SEGMENT, max(words for _, words in self.right_factors)),
        )


_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def factor_layout(shape: TTShape) -> FactorLayout:
    """The layout of a group of tables, built only once: reading ``p`` waits for the GPU.

    Raises:
        ValueError: there are too many pairs of slices.
    """
    p, q, ranks = shape
    layouts = _layouts.setdefault(p, {})
    key = (tuple(q), tuple(ranks), p._version)
    if key not in layouts:
        layouts[key] = FactorLayout.build(p, key[0], key[1])
    return layouts[key]
