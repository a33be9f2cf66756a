"""Distributions of the synthetic columns, as integer tables that every device reads alike.

A column follows a ``Distribution``: the share of rows below each of some knots, fitted to a real
sample by ``scripts/maintenance/calibrate_synthetic.py``. Drawing inverts it through a table of
quantiles in fixed point, and the uniform numbers come from permutations of the rows, so that all
arithmetic is on integers and a row's values depend on the seed and the row alone: not on chunks,
threads or the device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PROFILE_FILE = Path(__file__).with_name("profile.json")

UNIFORM_BITS = 56  # a uniform number is an integer below 2^56
SLOT_BITS = 14  # its high bits choose a slot of the quantile table,
STEP_BITS = 24  # the next ones interpolate within it
FRACTION_BITS = 12  # of a quantile; 2^27 ids * 2^12 * 2^24 is all that 63 bits hold
JITTER_BITS = 14


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Distribution of one column over the integers ``0 .. knots[-1] - 1``, missing left out."""

    name: str
    knots: tuple[int, ...]
    """Rising integers, the first 0, the last the number of values."""
    below: tuple[float, ...]
    """Share of the present values below each knot, from 0 to 1; even between two knots."""
    lowest: int = 0
    """Dense columns: the value that the integer 0 stands for."""
    missing: float = 0.0
    """Share of rows without a value."""
    together: str = ""
    """Columns with the same word here are missing in the same rows."""

    @property
    def values(self) -> int:
        """Number of values, missing left out."""
        return self.knots[-1]

    @property
    def cardinality(self) -> int:
        """Number of values, missing counted as one if it occurs."""
        return self.values + (self.missing > 0)

    @property
    def missing_rank(self) -> int:
        """Where "missing" stands among the values by falling frequency."""
        width = np.diff(self.knots)
        share = np.diff(self.below) / width * (1 - self.missing)
        return int(width[share > self.missing].sum())

    @property
    def smallest_share(self) -> float:
        """Share of the present values that the rarest value takes."""
        return float((np.diff(self.below) / np.diff(self.knots)).min())

    def resized(self, cardinality: int, *, name: str) -> Distribution:
        """The law over another number of values, missing counted, as column ``name``.

        A smaller one keeps the most frequent values; a larger one stretches the last piece of the
        tail, so that the head stays as measured.
        """
        values = cardinality - (self.missing > 0)
        if values < 1:
            return Distribution(name=name, knots=(0, 1), below=(0.0, 1.0))
        knots, below = np.array(self.knots), np.array(self.below)
        kept = knots < min(values, self.values)
        end = np.interp(values, knots, below)
        return replace(
            self,
            name=name,
            knots=(*knots[kept].tolist(), values),
            below=(*(below[kept] / end).tolist(), 1.0),
        )

    def quantiles(self) -> Tensor:
        """Table ``[2^SLOT_BITS + 1]`` of quantiles in fixed point, int64."""
        at = np.linspace(0, 1, (1 << SLOT_BITS) + 1)
        table = np.rint(np.interp(at, self.below, self.knots) * (1 << FRACTION_BITS))
        # A slot may be narrower than the resolution; none may begin at the end of the range.
        table[:-1] = np.minimum(table[:-1], (self.values << FRACTION_BITS) - 1)
        return torch.from_numpy(table.astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The columns of a data set."""

    name: str
    rows: int
    """Rows of the full real files."""
    dense: tuple[Distribution, ...]
    categorical: tuple[Distribution, ...]


@cache
def profiles(path: Path = PROFILE_FILE) -> dict[str, Profile]:
    """The calibrated profiles by name."""
    raw = json.loads(path.read_text())
    return {
        name: Profile(
            name=name,
            rows=profile["rows"],
            dense=tuple(_law(column) for column in profile["dense"]),
            categorical=tuple(_law(column) for column in profile["categorical"]),
        )
        for name, profile in raw.items()
    }


def _law(raw: dict[str, Any]) -> Distribution:
    return Distribution(**{**raw, "knots": tuple(raw["knots"]), "below": tuple(raw["below"])})


def mix(x: Tensor) -> Tensor:
    """A well mixed non-negative 63-bit integer for each integer (the finaliser of SplitMix64)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF


def hashed(seed: int, stream: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """``size`` independent 63-bit integers for this seed and stream ``[size]``, int64."""
    key = mix(mix(torch.tensor(seed)) + stream)
    golden = -0x61C8864680B583EB
    return mix(torch.arange(1, size + 1, device=device) * golden + key.to(device))


class PermutedUniforms:
    """Uniform numbers per stream and row: each stream is a permutation of the rows.

    ``rows`` rows draw ``rows`` evenly spaced numbers in pseudo-random order, so a value whose share
    is ``k / rows`` occurs ``k`` times: of the 33.8 M values of Criteo Kaggle nearly all occur in
    45.8 M rows, most of them once, as in the real file. Independent draws would miss a third.

    The permutation is a Feistel network over pairs of digits to the base ``ceil(sqrt(rows))`` with
    four rounds of random tables; results beyond the last row walk on until they fall inside.

    Args:
        rows: rows of the whole data set.
        jitter: per stream ``[S]``, whether its numbers lie anywhere between two of the even grid,
            so that values rarer than a row do not come in regular steps.
        seed: what the tables are drawn from.
        device: where the numbers are made.

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
        tables = (tables * self.base >> 31).to(torch.int32)  # 31 bits to a digit
        self.tables = tables.view(streams, self.ROUNDS, -1).transpose(0, 1).flatten(1)  # [4, S * b]
        self.offsets = torch.arange(streams, dtype=torch.int32, device=device)[:, None] * self.base
        self.step = (1 << UNIFORM_BITS) // rows
        spread = torch.tensor(list(jitter), device=device)[:, None]  # [S, 1]
        self.spread = spread * (self.step >> JITTER_BITS)

    def order(self, rows: Tensor) -> Tensor:
        """Place of each of the rows ``[B]`` in the permutation of each stream, int64 ``[S, B]``."""
        place = self._permute(rows, self.offsets)
        beyond = (place >= self.rows).nonzero(as_tuple=True)
        while len(beyond[0]):
            place[beyond] = self._permute(place[beyond], self.offsets[beyond[0], 0])
            beyond = tuple(index[place[beyond] >= self.rows] for index in beyond)
        return place

    def _permute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        high = torch.div(rows, self.base, rounding_mode="floor")
        left, right = high.to(torch.int32), (rows - high * self.base).to(torch.int32)
        for table in self.tables:
            index = right + offsets
            # On a CPU fifteen times as fast as indexing and torch.where.
            total = table.index_select(0, index.view(-1)).view_as(index).add_(left).sub_(self.base)
            left, right = right, total.add_((total >> 31).bitwise_and_(self.base))
        return left.long() * self.base + right

    def draw(self, rows: Tensor) -> Tensor:
        """A number below ``2^UNIFORM_BITS`` per stream for each of the rows, int64 ``[S, B]``."""
        place = self.order(rows)
        jitter = (place * 0x9E3779B1 >> 16).bitwise_and_((1 << JITTER_BITS) - 1)
        return place.mul_(self.step).add_(jitter.mul_(self.spread))


def invert(quantiles: Tensor, uniform: Tensor) -> Tensor:
    """Values at ``uniform [S, B]`` of the distributions with the tables ``quantiles [S, Q]``."""
    size = quantiles.shape[1]
    starts = torch.arange(len(quantiles), device=quantiles.device)[:, None] * size
    slot = (uniform >> (UNIFORM_BITS - SLOT_BITS)).add_(starts).view(-1)
    low = quantiles.view(-1).index_select(0, slot).view_as(uniform)
    width = quantiles.view(-1).index_select(0, slot.add_(1)).view_as(uniform).sub_(low)
    step = uniform >> (UNIFORM_BITS - SLOT_BITS - STEP_BITS)
    step.bitwise_and_((1 << STEP_BITS) - 1)
    return width.mul_(step).__irshift__(STEP_BITS).add_(low).__irshift__(FRACTION_BITS)
