"""How rows in tensor-train format are cut into two factors, and which products of cores these are.

See :mod:`dlrm.kernels.tt` for what a factor is, :mod:`dlrm.kernels.tt._pairs` for pairs and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SPAN = 2048  # words at most, which a program numbers at once


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
class Segments:
    """The keys of all ids, cut where a right factor begins, and into parts of ``_SPAN`` words."""

    start: Tensor  # [spans + 1] first word of each
    right: Tensor  # [spans] its right factor
    words: int  # of the longest


@dataclass(frozen=True, kw_only=True)
class FactorLayout:
    """How the rows of a group of tables are cut into a left and a right factor.

    Every id has a key, a bit among ``words`` of 32, where those of one right factor lie together
    and begin with a word.
    """

    left: Pairs | None  # None: a slice of the first core
    right: Pairs | None  # None: a slice of the last core
    sizes: dict[str, int]  # A, R, C and the same rounded up to powers of 2
    keys: Tensor  # [F, 3] of each table: its first key, keys a right factor, and first left factor
    rights: Sequence[tuple[int, int]]  # of each table: right factors, and words of each
    wide: bool  # ids beyond 32 bits

    @cached_property
    def number_of_rights(self) -> int:
        """Right factors of all tables."""
        return sum(many for many, _ in self.rights)

    @cached_property
    def words(self) -> int:
        """Words for the keys of all tables."""
        return sum(many * words for many, words in self.rights)

    @cached_property
    def number_of_spans(self) -> int:
        """As many as :attr:`spans` has."""
        return sum(many * triton.cdiv(words, _SPAN) for many, words in self.rights)

    @cached_property
    def spans(self) -> Segments:
        """Made when first asked for: few rows of large tables are looked up without."""
        starts: list[Tensor] = []
        rights: list[Tensor] = []
        first = end = 0  # right factor and word
        for many, words in self.rights:
            parts = torch.arange(0, words, _SPAN)
            starts.append((end + words * torch.arange(many)[:, None] + parts).view(-1))
            rights.append((first + torch.arange(many)).repeat_interleave(len(parts)))
            first, end = first + many, end + words * many
        return Segments(
            start=torch.cat([*starts, torch.tensor([end])]).to(self.keys.device, torch.int32),
            right=torch.cat(rights).to(self.keys.device, torch.int32),
            words=min(_SPAN, max(words for _, words in self.rights)),
        )

    @classmethod
    def build(cls, p: Tensor, q: tuple[int, ...], ranks: tuple[int, ...]) -> FactorLayout:
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
        keys: list[list[int]] = []
        rights: list[tuple[int, int]] = []
        end = first_left = first_right = 0  # end of the words
        for row in p.tolist():
            lefts, many = prod(row[:middle]), prod(row[middle:])
            words = triton.cdiv(lefts, 32)
            keys.append([32 * (end - first_right * words), 32 * words, first_left])
            rights.append((many, words))
            end += many * words
            first_left, first_right = first_left + lefts, first_right + many
        return cls(
            left=left,
            right=right,
            sizes={"A": a, "R": r, "C": c, **pads},
            keys=torch.tensor(keys, device=p.device),
            rights=rights,
            wide=max(prod(row) for row in p.tolist()) >= 2**31,
        )


_chains: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def factor_layout(p: Tensor, q: Sequence[int], ranks: Sequence[int]) -> FactorLayout:
    """The chain of a group, made once: reading ``p`` waits for the GPU."""
    known = _chains.setdefault(p, {})
    key = (tuple(q), tuple(ranks), p._version)
    if key not in known:
        known[key] = FactorLayout.build(p, key[0], key[1])
    return known[key]
