"""Distributions of the synthetic columns, drawn with integer arithmetic.

A column follows a ``Distribution``: the CDF at some knots, fitted to a real sample. A fixed-point
table of quantiles inverts the CDF at uniform numbers that are permutations of the rows. All
arithmetic uses integers, so the values of a row depend only on the seed and the row, not on chunks,
threads or the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.utils.documents import read_json

PROFILE_FILE = Path(__file__).with_name("profile.json")

UNIFORM_BITS = 56  # a uniform number is an integer below 2^56
SLOT_BITS = 14  # its high bits select a slot of the quantile table,
STEP_BITS = 24  # the next ones interpolate within the slot
FRACTION_BITS = 12  # of a quantile; 2^27 ids * 2^12 * 2^24 just fit into 63 bits
JITTER_BITS = 14


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Distribution of one column over the integers ``0 .. knots[-1] - 1``, without missing."""

    name: str
    knots: tuple[int, ...]
    """Ascending integers from 0 to the number of values."""
    cdf: tuple[float, ...]
    """Share of the present values below each knot, from 0 to 1; linear between two knots."""
    lowest: int = 0
    """For dense columns, the value of the integer 0."""
    missing: float = 0.0
    """Share of rows without a value."""
    missing_group: str = ""
    """Columns of one group are missing in the same rows."""

    @property
    def values(self) -> int:
        """Number of values, without missing."""
        return self.knots[-1]

    @property
    def cardinality(self) -> int:
        """Number of values; missing counts as one if it occurs."""
        return self.values + (self.missing > 0)

    @property
    def missing_rank(self) -> int:
        """Rank of "missing" among the values in order of falling frequency."""
        width = np.diff(self.knots)
        share = np.diff(self.cdf) / width * (1 - self.missing)
        return int(width[share > self.missing].sum())

    @property
    def smallest_share(self) -> float:
        """Share of the rarest value among the present values."""
        return float((np.diff(self.cdf) / np.diff(self.knots)).min())

    def resized(self, cardinality: int, *, name: str) -> Distribution:
        """The distribution over another number of values, including missing, as column ``name``.

        A smaller one keeps the most frequent values. A larger one stretches the last segment of the
        tail and does not change the head.
        """
        values = cardinality - (self.missing > 0)
        if values < 1:
            return Distribution(name=name, knots=(0, 1), cdf=(0.0, 1.0))
        knots, cdf = np.array(self.knots), np.array(self.cdf)
        kept = knots < min(values, self.values)
        end = np.interp(values, knots, cdf)
        return replace(
            self,
            name=name,
            knots=(*knots[kept].tolist(), values),
            cdf=(*(cdf[kept] / end).tolist(), 1.0),
        )

    def quantiles(self) -> Tensor:
        """Table ``[2^SLOT_BITS + 1]`` of quantiles in fixed point, int64."""
        at = np.linspace(0, 1, (1 << SLOT_BITS) + 1)
        table = np.rint(np.interp(at, self.cdf, self.knots) * (1 << FRACTION_BITS))
        # A slot may be narrower than the resolution, but none may start at the end of the range.
        table[:-1] = np.minimum(table[:-1], (self.values << FRACTION_BITS) - 1)
        return torch.from_numpy(table.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The columns of a data set."""

    name: str
    rows: int
    """Number of rows of the complete real files."""
    dense: tuple[Distribution, ...]
    categorical: tuple[Distribution, ...]


@cache
def profiles(path: Path = PROFILE_FILE) -> dict[str, Profile]:
    """The calibrated profiles by name."""
    raw = read_json(path)
    return {
        name: Profile(
            name=name,
            rows=profile["rows"],
            dense=tuple(_distribution(column) for column in profile["dense"]),
            categorical=tuple(_distribution(column) for column in profile["categorical"]),
        )
        for name, profile in raw.items()
    }


def _distribution(raw: dict[str, Any]) -> Distribution:
    return Distribution(**{**raw, "knots": tuple(raw["knots"]), "cdf": tuple(raw["cdf"])})


def mix(x: Tensor) -> Tensor:
    """A well-mixed non-negative 63-bit integer for each integer (the finalizer of SplitMix64)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF


def hashed(seed: int, stream: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Independent 63-bit integers ``[size]`` for this seed and stream, int64."""
    key = mix(mix(torch.tensor(seed)) + stream)
    golden = -0x61C8864680B583EB
    return mix(torch.arange(1, size + 1, device=device) * golden + key.to(device))


class PermutedUniforms:
    """Uniform numbers for each stream and row; each stream is a permutation of the rows.

    The rows of a stream get ``rows`` evenly spaced numbers in pseudo-random order, so a value with
    share ``k / rows`` occurs ``k`` times. In 45.8 M rows, nearly all of the 33.8 M values of Criteo
    Kaggle occur, most of them once, as in the real file. Independent draws would miss a third.

    The permutation is a Feistel network on pairs of digits to the base ``ceil(sqrt(rows))``, with
    four rounds of random tables. It is applied again to results beyond the last row until they are
    in range (cycle walking). With ``jitter``, the numbers of a stream are shifted off the even grid
    at random, so values rarer than one row do not form a regular pattern.

    Reference: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    ROUNDS = 4

    def __init__(
        self, rows: int, *, jitter: Sequence[bool], seed: int, device: torch.device | str
    ) -> None:
        self.rows = rows
        self.base = max(1, math.isqrt(rows - 1) + 1)
        streams = len(jitter)
        tables = hashed(seed, 1, streams * self.ROUNDS * self.base, device) >> 32
        tables = (tables * self.base >> 31).to(torch.int32)  # from 31 bits
        self.tables = tables.view(streams, self.ROUNDS, -1).transpose(0, 1).flatten(1)  # [4, S * b]
        self.offsets = torch.arange(streams, dtype=torch.int32, device=device)[:, None] * self.base
        self.step = (1 << UNIFORM_BITS) // rows
        jittered = torch.tensor(list(jitter), device=device)[:, None]  # [S, 1]
        self.jitter_step = jittered * (self.step >> JITTER_BITS)

    def order(self, rows: Tensor) -> Tensor:
        """Position of the rows ``[B]`` in the permutation of each stream, int64 ``[S, B]``."""
        position = self._permute(rows, self.offsets)
        beyond = (position >= self.rows).nonzero(as_tuple=True)
        while len(beyond[0]):
            position[beyond] = self._permute(position[beyond], self.offsets[beyond[0], 0])
            beyond = tuple(index[position[beyond] >= self.rows] for index in beyond)
        return position

    def _permute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        high = torch.div(rows, self.base, rounding_mode="floor")
        left, right = high.to(torch.int32), (rows - high * self.base).to(torch.int32)
        for table in self.tables:
            index = right + offsets
            # On a CPU this is 15 times as fast as indexing and torch.where.
            total = table.index_select(0, index.view(-1)).view_as(index).add_(left).sub_(self.base)
            left, right = right, total.add_((total >> 31).bitwise_and_(self.base))
        return left.long() * self.base + right

    def draw(self, rows: Tensor) -> Tensor:
        """Numbers below ``2^UNIFORM_BITS`` for rows ``[B]`` in each stream, int64 ``[S, B]``."""
        position = self.order(rows)
        jitter = (position * 0x9E3779B1 >> 16).bitwise_and_((1 << JITTER_BITS) - 1)
        return position.mul_(self.step).add_(jitter.mul_(self.jitter_step))


def invert(quantiles: Tensor, uniform: Tensor) -> Tensor:
    """Values of the distributions with tables ``quantiles [S, Q]`` at ``uniform [S, B]``."""
    size = quantiles.shape[1]
    starts = torch.arange(len(quantiles), device=quantiles.device)[:, None] * size
    slot = (uniform >> (UNIFORM_BITS - SLOT_BITS)).add_(starts).view(-1)
    low = quantiles.view(-1).index_select(0, slot).view_as(uniform)
    width = quantiles.view(-1).index_select(0, slot.add_(1)).view_as(uniform).sub_(low)
    step = uniform >> (UNIFORM_BITS - SLOT_BITS - STEP_BITS)
    step.bitwise_and_((1 << STEP_BITS) - 1)
    return width.mul_(step).__irshift__(STEP_BITS).add_(low).__irshift__(FRACTION_BITS)
