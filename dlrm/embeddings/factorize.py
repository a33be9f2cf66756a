"""What makes tensor-train tables: factors of rows and dim, and the TT-SVD of a dense table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import isqrt, log, prod

import torch
from torch import Tensor
from torch.nn import functional

MAX_EXACT_SIDE = 4096  # matrices longer than this on both sides get a randomized SVD
MAX_PADDING = 1.25  # rows that rounding up may add: at most a quarter


@cache
def factorize_rows(rows: int, d: int) -> tuple[int, ...]:
    """Balanced factors ``p`` with ``prod(p) >= rows``, ascending: 11,000,000 -> 200, 220, 250.

    ``rows`` is rounded up to one, two, ... trailing zeros (by at most a quarter); of the best
    factorisations of these numbers the most balanced one is taken. Where none is balanced (small
    numbers, mostly) the factors are the root of ``rows``, rounded up or down.

    Args:
        rows: number of rows V.
        d: number of factors.

    Reference: Yin, Acun, Liu, Wu, "TT-Rec", arXiv 2101.11714; the rule gives its shapes for
    Criteo's tables.
    """
    if rows < 1 or d < 1:
        raise ValueError(f"rows and d must be at least 1, got {rows} and {d}")
    steps = (10**zeros for zeros in range(len(str(rows))))
    rounded = {-(-rows // step) * step for step in steps}
    candidates = [balanced(n, d) for n in sorted(rounded) if n <= MAX_PADDING * rows]
    best = max(candidates, key=balance)
    return best if best[-1] <= 2 * best[0] else _nearest_root(rows, d)


@cache
def factorize_dim(dim: int, d: int) -> tuple[int, ...]:
    """Balanced factors ``q`` with ``prod(q) == dim``, ascending: 16 -> 2, 2, 4; 7 -> 1, 1, 7."""
    return balanced(dim, d)


def balanced(n: int, d: int) -> tuple[int, ...]:
    """The most balanced of all ascending factorisations of ``n`` into ``d`` factors."""
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


def tt_svd(
    weight: Tensor, p: Sequence[int], q: Sequence[int], ranks: Sequence[int]
) -> list[Tensor]:
    """Decompose a dense table into tensor-train cores by successive truncated SVDs.

    The table, padded with zero rows to ``prod(p)``, becomes a tensor of the sides ``p_k q_k``;
    each SVD splits off one side. The squared error is at most the sum of what the ``d - 1`` SVDs
    leave out. Cores are scaled to equal deviation, so that one learning rate suits all of them.

    Args:
        weight: ``[V, D]``.
        p: factors of the rows, ``prod(p) >= V``.
        q: factors of the dim, ``prod(q) == D``.
        ranks: ``(1, r_1, .., 1)``; what a bond cannot use is filled with zeros.

    Returns:
        Cores ``[p_k, r_{k-1}, q_k, r_k]``.

    Reference: Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33(5), 2011.
    """
    d = len(p)
    padded = weight.new_zeros(prod(p), weight.shape[1])
    padded[: len(weight)] = weight
    sides = [side for k in range(d) for side in (k, d + k)]  # p_1, q_1, p_2, q_2, ...
    rest = padded.view(*p, *q).permute(sides)
    cores = []
    for k in range(d - 1):
        rows = ranks[k] * p[k] * q[k]
        left, rest = _truncated_svd(rest.reshape(rows, -1), ranks[k + 1])
        cores.append(left.view(ranks[k], p[k], q[k], -1).transpose(0, 1))
    cores.append(rest.view(ranks[d - 1], p[-1], q[-1], 1).transpose(0, 1))
    deviations = [core.square().mean().sqrt().clamp(min=1e-30) for core in cores]
    common = torch.stack(deviations).log().mean().exp()
    return [core * (common / own) for core, own in zip(cores, deviations, strict=True)]


def _truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best ``left [m, rank] @ right [rank, n]``, padded with zeros beyond ``min(m, n)``.

    The rows of ``right`` carry the singular values and ``left`` is orthonormal. A wide matrix
    needs only the eigenvectors of its small Gram matrix, summed in float64; a tall one is small
    by then; where both sides are long the SVD is randomized.
    """
    m, n = matrix.shape
    usable = min(m, n, rank)
    if min(m, n) > max(MAX_EXACT_SIDE, 4 * rank):
        left, _, _ = torch.svd_lowrank(matrix, min(usable + 16, m, n), niter=4)
    elif m <= n:
        gram = sum(c.double() @ c.double().T for c in matrix.split(1 << 16, dim=1))
        left = torch.linalg.eigh(gram).eigenvectors.flip(1).to(matrix.dtype)
    else:
        left, _, _ = torch.linalg.svd(matrix, full_matrices=False)
    left = left[:, :usable]
    right = left.T @ matrix
    pad = rank - usable
    return functional.pad(left, (0, pad)), functional.pad(right, (0, 0, 0, pad))
