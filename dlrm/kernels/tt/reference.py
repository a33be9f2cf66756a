"""Tensor-train look-ups in plain PyTorch: the reference of the kernels, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_SHARE = 8  # rows for which plain PyTorch reads a large slice once


def tt_vectors_torch(
    cores: Sequence[Tensor],
    p: Tensor,
    core_offsets: Tensor,
    q: Sequence[int],
    ranks: Sequence[int],
    tables: Tensor,
    ids: Tensor,
) -> Tensor:
    """The same in plain PyTorch; see :func:`tt_vectors` for arguments and result.

    Equal ids are looked up once, and ids that agree in their first digits share the product of the
    first cores. The number of distinct ids has to reach the host, so this does not run in a CUDA
    graph.
    """
    tables = tables.to(torch.int64).expand(ids.shape).reshape(-1)
    heights = p.prod(1)
    ends = heights.cumsum(0)
    starts = ends - heights
    # Ids and their prefixes count from the start of their table, so that a number names both.
    key = ids.to(torch.int64).reshape(-1) + starts[tables]
    key, children = key.unique(return_inverse=True)
    steps = []
    for k in reversed(range(len(cores))):
        table = torch.searchsorted(ends, key, right=True)
        prefix, size = key - starts[table], p[table, k]
        steps.append((core_offsets[table, k] + prefix % size, children))
        key = starts[table] + prefix // size
        key, children = key.unique_consecutive(return_inverse=True)
    # steps[k]: slices of the distinct prefixes of k + 1 digits, and where the next step has them
    steps.reverse()

    rows = cores[0].new_ones(1, 1, 1)  # [prefixes, q_1 .. q_k, r_k]
    parent = torch.zeros_like(steps[0][0])
    for k, (core, (which, children)) in enumerate(zip(cores, steps, strict=True)):
        matrices = core.view(-1, ranks[k], q[k] * ranks[k + 1])
        rows = _times_slices(rows.index_select(0, parent), matrices, which)
        rows = rows.view(len(which), prod(q[: k + 1]), ranks[k + 1])
        parent = children
    return rows.view(-1, prod(q)).index_select(0, parent).view(*ids.shape, prod(q))


def _times_slices(rows: Tensor, slices: Tensor, which: Tensor) -> Tensor:
    """``rows[i] @ slices[which[i]]``, ``[n, Q, r] @ [S, r, c]`` to ``[n, Q, c]``.

    Many rows with large slices are laid out slice by slice, the number of each rounded up, so
    that a slice is read once for every ``_SHARE`` rows: 2 to 3 times as fast on a CPU.
    """
    if min(len(which), slices[0].numel()) < 1024:
        return torch.bmm(rows, slices.index_select(0, which))
    counts = torch.bincount(which, minlength=len(slices))
    groups = (counts + _SHARE - 1) // _SHARE  # of each slice
    order = which.argsort()
    rank = torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[which[order]]
    place = torch.empty_like(which)
    place[order] = (groups.cumsum(0) - groups)[which[order]] * _SHARE + rank
    of_group = torch.repeat_interleave(groups)
    laid = rows.new_zeros(len(of_group) * _SHARE, *rows.shape[1:]).index_copy(0, place, rows)
    laid = laid.view(len(of_group), -1, rows.shape[2])
    out = torch.bmm(laid, slices.index_select(0, of_group))
    return out.view(-1, rows.shape[1], slices.shape[2]).index_select(0, place)


def _tt_bags_torch(
    cores: Sequence[Tensor],
    p: Tensor,
    core_offsets: Tensor,
    q: Sequence[int],
    ranks: Sequence[int],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mode: str,
) -> Tensor:
    """:func:`tt_bags` in plain PyTorch."""
    tables, batch = p.shape[0], (offsets.numel() - 1) // p.shape[0]
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
    ids = ids[: len(bag)]
    vectors = tt_vectors_torch(cores, p, core_offsets, q, ranks, bag // max(batch, 1), ids)
    if weights is not None:
        vectors = vectors * weights[: len(bag), None]
    out = vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, bag, vectors)
    if mode == "mean":
        out = out / lengths.clamp(min=1)[:, None]
    return out.view(tables, batch, vectors.shape[1])
