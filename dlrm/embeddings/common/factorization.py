"""Factors for tensor-train tables: a number of rows rounded up, a dim exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import isqrt, log, prod

MAX_PADDING = 1.25  # rows that rounding up may add: at most a quarter
LARGEST_SEARCHED = 2**32  # larger numbers have too many candidates for a divisor


@cache
def factorize_rows(rows: int, d: int) -> tuple[int, ...]:
    """Balanced factors ``p`` with ``prod(p) >= rows``, ascending: 11,000,000 -> 200, 220, 250.

    ``rows`` is rounded up to one, two, ... trailing zeros (by at most a quarter), and the most
    balanced factorization of any of these numbers is taken. Where none is balanced (mostly of small
    numbers), or ``rows`` is above 2^32, the factors are the ``d``-th root of ``rows``, rounded up
    or down.

    Args:
        rows: number of rows V.
        d: number of factors.

    Raises:
        ValueError: no row, or no factor.

    Reference: Yin, Acun, Liu, Wu, "TT-Rec", arXiv 2101.11714; this rule gives the shapes of the
    paper for Criteo's tables.
    """
    if rows < 1 or d < 1:
        raise ValueError(f"rows and d must be at least 1, got {rows} and {d}")
    if rows > LARGEST_SEARCHED:
        return _nearest_root(rows, d)
    steps = (10**zeros for zeros in range(len(str(rows))))
    rounded = {-(-rows // step) * step for step in steps}
    candidates = [balanced(n, d) for n in sorted(rounded) if n <= MAX_PADDING * rows]
    best = max(candidates, key=balance)
    return best if best[-1] <= 2 * best[0] else _nearest_root(rows, d)


@cache
def factorize_dim(dim: int, d: int) -> tuple[int, ...]:
    """Balanced factors ``q`` with ``prod(q) == dim``, ascending: 16 -> 2, 2, 4; 7 -> 1, 1, 7.

    Raises:
        ValueError: the dim is above 2^32.
    """
    if dim > LARGEST_SEARCHED:
        raise ValueError(f"the dim is {dim}, it can be factorized up to {LARGEST_SEARCHED}")
    return balanced(dim, d)


def balanced(n: int, d: int) -> tuple[int, ...]:
    """The most balanced of all ascending factorizations of ``n`` into ``d`` factors."""
    return max(_factorizations(n, d, _divisors(n)), key=balance)


def balance(factors: Sequence[int]) -> float:
    """Entropy of the factors' shares of their sum: ``log(d)`` when all are equal."""
    total = sum(factors)
    return -sum(factor / total * log(factor / total) for factor in factors)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def _factorizations(
    n: int, d: int, divisors: Sequence[int], least: int = 1
) -> Iterator[tuple[int, ...]]:
    if d == 1:
        yield (n,)
        return
    for first in divisors:
        if first**d > n:
            return
        if first >= least and n % first == 0:
            for rest in _factorizations(n // first, d - 1, divisors, first):
                yield (first, *rest)


def _nearest_root(rows: int, d: int) -> tuple[int, ...]:
    root = round(rows ** (1 / d))
    root -= root**d > rows  # the floor, whatever the rounding of the power
    factors = [root] * d
    for k in reversed(range(d)):
        if prod(factors) < rows:
            factors[k] += 1
    return tuple(factors)
