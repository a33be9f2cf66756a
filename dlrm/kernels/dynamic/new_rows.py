"""The rows of new ids: their first values, and optimizer state of zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm.kernels.dynamic.hashing import GOLDEN, mix, uniform
from dlrm.kernels.update.packed import CHUNK, write_rows


def follow_ids(weight: Tensor) -> None:
    """Have optimizers reset the state of a row that gets another id: see :func:`row_states`."""
    if row_states(weight) is None:
        weight.row_states = []  # type: ignore[attr-defined]


def row_states(weight: Tensor) -> list[Tensor] | None:
    """The states that are reset with the rows of a parameter, for its optimizer to fill in; None
    for a parameter whose rows stay with their ids.
    """
    states: list[Tensor] | None = getattr(weight, "row_states", None)
    return states


def first_values(tables: Tensor, ids: Tensor, bounds: Tensor, seed: Tensor, dim: int) -> Tensor:
    """The rows with which ids start, U(-b, b) by a hash of table, id and seed.

    Args:
        tables, ids: of the rows, ``[n]`` int64.
        bounds: b of each table, ``[F]`` fp32.
        seed: 0-d int64.
        dim: length of a row.

    Returns:
        ``[n, dim]`` fp32.
    """
    key = mix(mix(ids ^ seed) + (tables + 1) * GOLDEN.value)
    return uniform(key, dim) * bounds[tables, None]


@torch.no_grad()
def reset_rows_torch(
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    tables: Tensor,
    ids: Tensor,
    bounds: Tensor,
    seed: Tensor,
) -> None:
    """Give rows ``[n]`` of a weight their first values, and zero their states, in PyTorch.

    Args:
        weight: ``[V, D]``, also packed.
        states: one entry per row or weight each, from :func:`row_states`.
        rows, tables, ids: of the new ids, ``[n]`` int64.
        bounds, seed: see :func:`first_values`.
    """
    for part, table, some in zip(
        rows.split(CHUNK), tables.split(CHUNK), ids.split(CHUNK), strict=True
    ):
        write_rows(weight, part, first_values(table, some, bounds, seed, weight.shape[1]))
    for state in states:
        state.view(len(weight), -1)[rows] = 0
