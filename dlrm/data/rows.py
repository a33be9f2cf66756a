"""Rows in host memory as batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from dlrm.data.batch import Batch, fixed_offsets
from dlrm.data.parquet import RowGroupReader, Rows
from dlrm.utils.offsets import offsets_of


def new_rows(reader: RowGroupReader, size: int, *, pinned: bool = False) -> Batch:
    """Room for ``size`` rows: dense features, labels, weights, and one-hot ids. Copies from
    ``pinned`` memory to a GPU are asynchronous."""
    meta = reader.meta
    one_hot = 0 if meta.multi_hot else len(meta.categorical)
    kind = torch.int32 if reader.ids_dtype.itemsize == 4 else torch.int64
    empty = partial(torch.empty, dtype=torch.float32, pin_memory=pinned)
    return Batch(
        dense=empty((len(meta.dense), size)),
        ids=empty((one_hot, size), dtype=kind),
        labels=empty(size),
        weights=None if meta.weight is None else empty(size),
    )


def fill(batch: Batch, rows: Rows) -> None:
    """Copy rows to where :func:`new_rows` has room for them; it has none for bags of ids."""
    targets = (*batch.dense.numpy(), *batch.ids.numpy())
    for target, values in zip(targets, (*rows.dense, *rows.ids), strict=False):
        target[:] = values
    batch.labels.numpy()[:] = rows.labels
    if batch.weights is not None:
        batch.weights.numpy()[:] = rows.weights


def batch_of(reader: RowGroupReader, rows: Rows) -> Batch:
    """Make a batch in host memory of rows that ``reader`` has read, in their order."""
    batch = new_rows(reader, len(rows.labels))
    fill(batch, rows)
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
        weights=nothing,
    )
    return batch_of(reader, rows)
