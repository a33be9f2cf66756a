"""Rows of tables in tensor-train format: the look-up and its gradient.

Row ``i`` of a table is the chain product ``G_1[i_1] G_2[i_2] ... G_d[i_d]`` of one slice of each
core, where ``i_1`` (the most significant) to ``i_d`` are the digits of ``i`` in the mixed base
``p_1 ... p_d`` and a slice of core ``k`` is a block ``[r_{k-1}, q_k, r_k]``.

Reference:
    Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models",
    MLSys 2021, arXiv 2101.11714.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def tt_vectors(
    cores: Sequence[Tensor],
    p: Tensor,
    core_offsets: Tensor,
    q: Sequence[int],
    ranks: Sequence[int],
    tables: Tensor,
    ids: Tensor,
) -> Tensor:
    """Look up rows of a group of tables in tensor-train format.

    Args:
        cores: core ``k`` as ``[sum over tables of p_k, r_{k-1} * q_k * r_k]``: the slices, each
            row-major in ``(r_{k-1}, q_k, r_k)``, table after table.
        p: number of slices of each core of each table, int64 ``[F, d]``.
        core_offsets: first slice of each table in each core, int64 ``[F, d]``.
        q: the factors of the embedding dim, ``d`` of them.
        ranks: ``(1, r_1, ..., r_{d-1}, 1)``.
        tables: table of each id, an integer tensor that broadcasts against ``ids``.
        ids: any integer tensor ``[...]``; every id lies inside its table.

    Returns:
        The rows, ``[..., D]`` with ``D = prod(q)``.
    """
    return tt_vectors_torch(cores, p, core_offsets, q, ranks, tables, ids)


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
    rest = ids.to(torch.int64).reshape(-1)
    sizes, offsets = p[tables], core_offsets[tables]  # [n, d]
    slices = []
    for k in reversed(range(len(cores))):
        slices.append(offsets[:, k] + rest % sizes[:, k])
        rest = rest // sizes[:, k]
    slices.reverse()

    # One number per id whose leading part, after division by the cores behind, names a prefix.
    key = slices[0]
    for core, digit in zip(cores[1:], slices[1:], strict=True):
        key = key * core.shape[0] + digit
    prefix, children = key.unique(return_inverse=True)
    steps = [(prefix, children)]
    for core in reversed(cores[1:]):
        prefix, children = (prefix // core.shape[0]).unique_consecutive(return_inverse=True)
        steps.append((prefix, children))
    steps.reverse()  # steps[k]: distinct prefixes of k + 1 digits, and where the next step has them

    rows = cores[0].new_ones(1, 1, 1)  # [prefixes, q_1 .. q_k, r_k]
    parent = torch.zeros_like(steps[0][0])
    for k, (core, (prefix, children)) in enumerate(zip(cores, steps, strict=True)):
        factor = core.index_select(0, prefix % core.shape[0])
        factor = factor.view(len(prefix), ranks[k], q[k] * ranks[k + 1])
        rows = torch.bmm(rows.index_select(0, parent), factor)
        rows = rows.view(len(prefix), prod(q[: k + 1]), ranks[k + 1])
        parent = children
    return rows.view(-1, prod(q)).index_select(0, parent).view(*ids.shape, prod(q))
