"""Linear algebra of whole tensor trains: mean squares, the TT-SVD, and the fit of given rows.

The cores of one table are tensors ``[p_k, r_{k-1}, q_k, r_k]`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.kernels.tt import TTShape, tt_vectors

MAX_EXACT_SIDE = 4096  # matrices longer than this on both sides get a randomized SVD
FIT_CHUNK = 8192  # rows that are looked up at a time: each may need its own copy of a slice
FIT_STEPS = 12  # of conjugate gradients; with more, residual and drift are the same
# Weight of the mean squared change of all rows of a table relative to the error of the fitted
# rows. Of 0.1, 1, 4 and no write-back, 4 gave the best test loss on Criteo, with a sixth of the
# cache leaving.
DRIFT_WEIGHT = 4.0


def table_slices(cores: Sequence[Tensor], shape: TTShape, table: int) -> list[Tensor]:
    """The cores of one table of a group: views of ``cores [sum of p_k, r_{k-1} q_k r_k]``."""
    starts, sizes = shape.core_offsets()[table].tolist(), shape.p[table].tolist()
    return [
        core.detach().narrow(0, start, p).view(p, shape.ranks[k], shape.q[k], shape.ranks[k + 1])
        for k, (core, start, p) in enumerate(zip(cores, starts, sizes, strict=True))
    ]


def left_grams(cores: Sequence[Tensor]) -> list[Tensor]:
    """Sums over all products of leading slices: ``out[k] = sum A^T A``, ``[r_k, r_k]``.

    The ``A [q_1 .. q_k, r_k]`` are the ``prod(p[:k])`` products of slices of the first ``k`` cores.
    They are not computed: ``out[k]`` is the sum of ``G^T out[k - 1] G`` over the slices ``G`` of a
    core. In float64.
    """
    gram = torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)
    grams = [gram]
    for core in cores:
        flat = core.double().transpose(0, 1).flatten(1, 2)  # [r, p q, r']
        weighted = (gram @ flat.flatten(1)).view_as(flat)
        gram = flat.flatten(0, 1).T @ weighted.flatten(0, 1)
        grams.append(gram)
    return grams


def right_grams(cores: Sequence[Tensor]) -> list[Tensor]:
    """The same from the right: ``out[k] = sum B B^T``, ``B`` the products of cores ``k`` and on."""
    return left_grams([core.transpose(1, 3) for core in reversed(cores)])[::-1]


def mean_square(cores: Sequence[Tensor]) -> float:
    """The exact mean square of the entries of all ``prod(p)`` rows, without computing them.

    In expectation, for independent entries of variance ``s^2``, it is ``prod(r) s^(2 d)``.
    """
    entries = prod(core.shape[0] * core.shape[2] for core in cores)
    return left_grams(cores)[-1].item() / entries


@torch.no_grad()
def match_dense_steps(others: Sequence[Tensor], shape: TTShape, first: Tensor) -> None:
    """Rescale the cores of a group, ``first`` and the ``others``, for plain SGD: see
    :func:`scale_last`."""
    if not first.is_meta:
        for table in range(len(shape.p)):
            scale_last(table_slices([first, *others], shape, table))


def scale_last(cores: Sequence[Tensor]) -> None:
    """Rescale cores in place: rows stay as they are, and SGD moves them as it moves dense ones.

    Row ``i`` is ``A_i G_d[i_d]``, with ``A_i [D / q_d, r]`` the product of the slices of the other
    cores. If its gradient is ``g``, a step of SGD on the last core moves it by
    ``-lr A_i A_i^T g``, which is about ``-lr g`` if the rows of ``A_i`` have unit norm. Here their
    mean square norm over all ``i`` becomes 1, and the last core has the scale of the rows.

    With cores of equal scale the steps of all ``d`` cores together move a row by only
    ``d prod(r)^(1 / d) s^(2 - 2 / d)`` of that, where ``s`` is the standard deviation of the rows:
    by 0.0003 of it at rank 32 for a table of 10 M rows, which begin near zero.

    Args:
        cores: of one table; all zeros stay what they are.
    """
    others = cores[:-1]
    rows = prod(core.shape[0] * core.shape[2] for core in others)
    norm = (left_grams(others)[-1].trace() / rows).sqrt().item()
    if norm > 0:
        for core in others:
            core.mul_(norm ** (-1 / len(others)))
        cores[-1].mul_(norm)


def tt_svd(
    weight: Tensor, p: Sequence[int], q: Sequence[int], ranks: Sequence[int]
) -> list[Tensor]:
    """Decompose a dense table into tensor-train cores by successive truncated SVDs.

    The table, padded with zero rows to ``prod(p)``, becomes a tensor of the sides ``p_k q_k``;
    each SVD splits off one side. The squared error is at most the sum of those of the ``d - 1``
    SVDs. Cores are scaled to equal standard deviation, so that one learning rate suits all of them.

    Args:
        weight: ``[V, D]``.
        p: factors of the rows, ``prod(p) >= V``.
        q: factors of the dim, ``prod(q) == D``.
        ranks: ``(1, r_1, .., 1)``; a rank larger than the table can use is filled with zeros.

    Returns:
        The cores.

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

    ``left`` is orthonormal, and the rows of ``right`` are scaled by the singular values. A wide
    matrix needs only the eigenvectors of its small Gram matrix, summed in float64. A tall matrix is
    always small here. Where both sides are long, the SVD is randomized.
    """
    m, n = matrix.shape
    usable = min(m, n, rank)
    if min(m, n) > max(MAX_EXACT_SIDE, 4 * rank):
        left, _, _ = torch.svd_lowrank(matrix, usable + 16, niter=4)
    elif m <= n:
        gram = torch.zeros(m, m, dtype=torch.float64, device=matrix.device)
        for columns in matrix.split(1 << 16, dim=1):
            gram.addmm_(columns.double(), columns.double().T)
        left = torch.linalg.eigh(gram).eigenvectors.flip(1).to(matrix.dtype)
    else:
        left, _, _ = torch.linalg.svd(matrix, full_matrices=False)
    left = left[:, :usable]
    right = left.T @ matrix
    pad = rank - usable
    return functional.pad(left, (0, pad)), functional.pad(right, (0, 0, 0, pad))


@torch.no_grad()
def fit_rows(
    cores: Sequence[Tensor], shape: TTShape, tables: Tensor, ids: Tensor, rows: Tensor
) -> float:
    """Change the cores of a group so that some rows become ``rows`` and others change little.

    Only the largest core changes, since its slices are shared the least. Rows are linear in it, so
    this is a least squares problem: the error of the given rows plus the mean squared change of
    all rows of their tables, which is a quadratic form of the Gram matrices to the left and right
    of the core. A few steps of conjugate gradients, starting from no change, are enough.

    Args:
        cores, shape, tables: as of :func:`~dlrm.kernels.tt.tt_vectors`; the cores are changed in
            place.
        ids: ``[n]``, no id twice in a table.
        rows: the target of each, ``[n, D]``.

    Returns:
        Norm of the remaining error relative to the norm of ``rows``.
    """
    k = max(range(len(cores)), key=lambda k: cores[k].numel())
    drift_gradient = _drift_gradient(cores, shape, tables, k)

    def look_up(core: Tensor, part: slice) -> Tensor:
        trial = [*cores[:k], core, *cores[k + 1 :]]
        # Every process fits its own replica, and they must stay equal.
        return tt_vectors(trial, shape, tables[part], ids[part], deterministic=True)

    def fit_gradient(core: Tensor, target: Tensor) -> Tensor:
        """``J^T (target - J core)``, where ``J`` takes core ``k`` to the rows."""
        core = core.detach().requires_grad_()
        total = torch.zeros_like(core)
        for part in parts:
            with torch.enable_grad():
                image = look_up(core, part)
            total += torch.autograd.grad(image, core, target[part] - image.detach())[0]
        return total

    parts = [slice(start, start + FIT_CHUNK) for start in range(0, len(ids), FIT_CHUNK)]
    zero_rows = torch.zeros_like(rows)
    change = torch.zeros_like(cores[k])
    residual = fit_gradient(cores[k], rows)
    direction, square = residual, residual.square().sum()
    tiny, eps = torch.finfo(residual.dtype).tiny, torch.finfo(residual.dtype).eps
    enough = eps**2 * square  # what is left below this is rounding, which no step can reduce
    for _ in range(FIT_STEPS):
        image = drift_gradient(direction) - fit_gradient(direction, zero_rows)
        curvature = (direction * image).sum()
        goes_on = (square > enough) & (curvature > 0)
        step = torch.where(goes_on, square / curvature.clamp(min=tiny), 0.0)
        change += step * direction
        residual = residual - step * image
        before, square = square, torch.where(goes_on, residual.square().sum(), 0.0)
        direction = residual + square / before.clamp(min=tiny) * direction
    cores[k].add_(change)
    missed = torch.cat([rows[part] - look_up(cores[k], part) for part in parts])
    return (missed.norm() / rows.norm().clamp(min=tiny)).item()


def _drift_gradient(
    cores: Sequence[Tensor], shape: TTShape, tables: Tensor, k: int
) -> Callable[[Tensor], Tensor]:
    """The gradient of half the weighted mean squared change of all rows by a change of core ``k``.

    A table weighs as much as the rows that are fitted to it.
    """
    starts = shape.core_offsets()[:, k].tolist()
    forms = []
    for table, fitted in zip(*(t.tolist() for t in tables.unique(return_counts=True)), strict=True):
        slices = table_slices(cores, shape, table)
        left, right = left_grams(slices)[k], right_grams(slices)[k + 1]
        left = left * (DRIFT_WEIGHT * fitted / prod(len(core) for core in slices))
        dtype = cores[k].dtype
        forms.append((starts[table], slices[k].shape, left.to(dtype), right.to(dtype)))

    def gradient(change: Tensor) -> Tensor:
        out = torch.zeros_like(change)
        for start, sizes, left, right in forms:
            own = slice(start, start + sizes[0])
            out[own] = torch.einsum(
                "ab,nbqc,cd->naqd", left, change[own].view(sizes), right
            ).reshape(sizes[0], -1)
        return out

    return gradient
