"""K-means for tables of millions of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm.embeddings.fit import add_rows

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
