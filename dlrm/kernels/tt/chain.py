"""How rows in tensor-train format are cut into two factors, and which products of cores these are.

See :mod:`dlrm.kernels.tt` for what a factor is, :mod:`dlrm.kernels.tt.pairs` for pairs and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
class Chain:
    """How the rows of a group of tables are cut into a left and a right factor.

    Every id has a key, a bit among ``words`` of 32, where those of one right factor lie together
    from the beginning of a word on; a *span* is that many words of one right factor, or a part.
    """

    left: Pairs | None  # None: a slice of the first core
    right: Pairs | None  # None: a slice of the last core
    sizes: dict[str, int]  # A, R, C and the same rounded up to powers of 2
    keys: Tensor  # [F, 3] of each table: its first key, keys a right factor, and first left factor
    words: int  # for the keys of all tables
    span_start: Tensor  # [spans + 1] first word of each
    span_right: Tensor  # [spans] its right factor
    rights: int  # right factors of all tables
    span_words: int  # of the longest
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
        keys: list[list[int]] = []
        starts: list[Tensor] = []
        span_rights: list[Tensor] = []
        lefts = rights = end = 0  # end of the words
        longest = 1
        for row in p.tolist():
            many, others = prod(row[:middle]), prod(row[middle:])
            words = triton.cdiv(many, 32)  # of a right factor
            keys.append([32 * (end - rights * words), 32 * words, lefts])
            parts = torch.arange(0, words, _SPAN)
            starts.append((end + words * torch.arange(others)[:, None] + parts).view(-1))
            span_rights.append((rights + torch.arange(others)).repeat_interleave(len(parts)))
            end, lefts, rights = end + words * others, lefts + many, rights + others
            longest = max(longest, min(words, _SPAN))
        return cls(
            left=left,
            right=right,
            sizes={"A": a, "R": r, "C": c, **pads},
            keys=torch.tensor(keys, device=p.device),
            words=end,
            span_start=torch.cat([*starts, torch.tensor([end])]).to(p.device, torch.int32),
            span_right=torch.cat(span_rights).to(p.device, torch.int32),
            rights=rights,
            span_words=longest,
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
