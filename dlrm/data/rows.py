"""Rows as matrices of columns, and as batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dlrm.data.batch import Batch, fixed_offsets
from dlrm.data.parquet import RowGroupReader, Rows
from dlrm.data.schema import Meta
from dlrm.utils.offsets import offsets_of


def new_columns(reader: RowGroupReader, size: int, *, pinned: bool = False) -> list[Tensor]:
    """Room for ``size`` rows in host memory; copies from ``pinned`` memory to a GPU do not wait.

    Returns:
        A matrix of the dense features, the label and the weight, ``[N + 1 or N + 2, rows]``, and
        one of the ids ``[F, rows]`` unless there are bags. Two are moved in fewer calls than four.
    """
    meta = reader.meta
    numbers = len(meta.dense) + 1 + (meta.weight is not None)
    columns = [torch.empty((numbers, size), dtype=torch.float32, pin_memory=pinned)]
    if not meta.multi_hot:
        kind = torch.int32 if reader.ids_dtype.itemsize == 4 else torch.int64
        shape = len(meta.categorical), size
        columns.append(torch.empty(shape, dtype=kind, pin_memory=pinned))
    return columns


def fill(columns: Sequence[Tensor], rows: Rows) -> None:
    """Copy rows to where :func:`new_columns` has room for them; it has none for bags of ids."""
    weights = [] if rows.weights is None else [rows.weights]
    for matrix, values in zip(
        columns, ([*rows.dense, rows.labels, *weights], rows.ids), strict=False
    ):
        for target, column in zip(matrix.numpy(), values, strict=True):
            target[:] = column


def as_batch(columns: Sequence[Tensor], meta: Meta) -> Batch:
    """Columns as a batch, which shares their memory; it has no ids yet if there are bags."""
    numbers, *ids = columns
    dense = len(meta.dense)
    return Batch(
        dense=numbers[:dense],
        ids=ids[0] if ids else numbers[:0],
        labels=numbers[dense],
        weights=None if meta.weight is None else numbers[dense + 1],
    )


def batch_of(reader: RowGroupReader, rows: Rows) -> Batch:
    """Make a batch in host memory of rows that ``reader`` has read, in their order."""
    columns = new_columns(reader, len(rows.labels))
    fill(columns, rows)
    batch = as_batch(columns, reader.meta)
    if not reader.meta.multi_hot:
        return batch

    # Bags: the ids of all features, one feature after another.
    bag_sizes = reader.meta.bag_sizes
    if bag_sizes is not None:
        offsets = fixed_offsets(bag_sizes, batch.size, torch.device("cpu"))
    else:
        lengths = [
            np.full(batch.size, size) if ends is None else np.diff(ends)
            for ends, size in zip(rows.offsets, reader.meta.lengths, strict=True)
        ]
        offsets = offsets_of(torch.from_numpy(np.stack(lengths)))
    ids = [column.astype(reader.ids_dtype, copy=False).reshape(-1) for column in rows.ids]
    return replace(
        batch,
        ids=torch.from_numpy(np.concatenate(ids)),
        offsets=offsets,
        bounds=(0, *accumulate(map(len, ids))),
        bag_sizes=bag_sizes,
    )


def empty_batch(reader: RowGroupReader) -> Batch:
    """Make a batch of no rows in host memory."""
    meta = reader.meta
    nothing = np.empty(0, np.float32)
    rows = Rows(
        labels=nothing,
        dense=[nothing] * len(meta.dense),
        ids=[np.empty(0, reader.ids_dtype)] * len(meta.categorical),
        offsets=[np.zeros(1, np.int64) if size is None else None for size in meta.lengths],
        weights=None if meta.weight is None else nothing,
    )
    return batch_of(reader, rows)
