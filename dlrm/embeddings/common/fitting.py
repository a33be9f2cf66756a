"""Fit memory that many rows share to the rows of dense tables.

To the same bits every time: every process fits its replica by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18  # rows at a time


def add_rows(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """``to.index_add_(0, rows, values)``, which on a GPU adds in no order, in one."""
    if to.is_cuda:
        to.index_put_((rows,), values, accumulate=True)  # sorts them
    else:
        to.index_add_(0, rows, values)


@torch.no_grad()
def fit_shared(
    shared: Tensor,
    weights: Sequence[Tensor],
    places: Callable[[int, Tensor], Tensor],
    without: Sequence[Tensor] | None = None,
) -> None:
    """Set each shared weight to the mean of those of ``weights`` that share it.

    Rows count by their squared length: those of rare ids, which training hardly touched, are near
    zero and would draw the others there: on real rows a fit of ``robe`` at 10x costs 0.018 AUC,
    and 0.029 if all count alike.

    Args:
        shared: ``[S, P]``, in place; rows that no id has stay as they are.
        weights: of the dense tables, each ``[V, D]``.
        places: from a table's index and ids of it, ``[N]``, the rows of ``shared`` that, one behind
            the other, make up theirs, ``[N, D / P]``.
        without: for each table the ids that do not count.
    """
    wide = torch.promote_types(shared.dtype, torch.float32)
    total = torch.zeros_like(shared, dtype=wide)
    count = total.new_zeros(len(total), 1)
    for table, weight in enumerate(weights):
        for start in range(0, len(weight), CHUNK):
            part = weight[start : start + CHUNK].to(wide)
            ids = torch.arange(start, start + len(part), device=part.device)
            rows = places(table, ids)
            mass = part.square().sum(1, keepdim=True).clamp_min_(torch.finfo(wide).tiny)
            if without is not None:
                out = without[table] - start
                mass[out[(out >= 0) & (out < len(part))]] = 0
            add_rows(total, rows.flatten(), (part * mass).reshape(rows.numel(), -1))
            add_rows(count, rows.flatten(), mass.repeat_interleave(rows.shape[1], 0))
    shared.copy_(torch.where(count > 0, total / count, shared))


ITERATIONS = 12
SAMPLE = 100  # rows per cluster that it learns from
CHUNK = 1 << 22  # distances computed at a time


def kmeans(points: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Find centroids and the nearest of them for each point.

    Learns from a random sample of 100 points per cluster, seeded by k-means++; then every point
    is assigned, and each centroid becomes the mean of its points. Exact if there are no more
    distinct points than clusters.

    Args:
        points: ``[n, d]``.
        clusters: at most ``n``.

    Returns:
        The centroids ``[clusters, d]``, fp32 at least, and the code of each point, int64 ``[n]``.

    Reference:
        Arthur and Vassilvitskii, "k-means++: The Advantages of Careful Seeding", SODA 2007.
    """
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    if clusters == len(points):
        return points.clone(), torch.arange(clusters, device=points.device)
    sample = points
    if len(points) > SAMPLE * clusters:
        sample = points[torch.randint(len(points), (SAMPLE * clusters,), device=points.device)]
    centroids = _seeds(sample, clusters)
    for _ in range(ITERATIONS):
        centroids = _means(sample, _nearest(sample, centroids), centroids)
    codes = _nearest(points, centroids)
    return _means(points, codes, centroids), codes


def _seeds(points: Tensor, clusters: int) -> Tensor:
    """Points far apart: each is drawn in proportion to its squared distance to those before."""
    chosen = torch.randint(len(points), (1,), device=points.device)
    seeds = points[chosen].repeat(clusters, 1)
    distance = (points - seeds[0]).square().sum(1)
    for index in range(1, clusters):
        # The largest of d / e, e exponential, is any d with a probability in proportion to it.
        # With as many seeds as distinct points all are 0, and the first point is taken again.
        drawn = (distance / torch.empty_like(distance).exponential_()).argmax()
        seeds[index] = points[drawn]
        distance = torch.minimum(distance, (points - seeds[index]).square().sum(1))
    return seeds


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each point, ``[n]``."""
    norms = centroids.square().sum(1)
    parts = points.split(max(1, CHUNK // len(centroids)))
    return torch.cat([torch.addmm(norms, p, centroids.t(), alpha=-2).argmin(1) for p in parts])


def _means(points: Tensor, codes: Tensor, centroids: Tensor) -> Tensor:
    """The mean of the points of each code; a centroid without points stays."""
    total = torch.zeros_like(centroids)
    add_rows(total, codes, points)
    count = codes.bincount(minlength=len(centroids))[:, None]
    return torch.where(count > 0, total / count, centroids)
