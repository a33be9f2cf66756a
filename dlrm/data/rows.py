"""Rows in host memory as batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from dlrm.data.batch import Batch, RowBuffer, fixed_offsets
from dlrm.data.parquet import RowGroupReader, Rows
from dlrm.utils.offsets import offsets_of


def row_buffer(reader: RowGroupReader, size: int, *, pinned: bool = False) -> RowBuffer:
    """Allocate room for ``size`` rows: dense features, labels, weights, and one-hot ids."""
    return RowBuffer(
        size,
        dense=len(reader.meta.dense),
        one_hot=0 if reader.meta.multi_hot else len(reader.meta.categorical),
        ids=reader.ids_dtype,
        pinned=pinned,
        weighted=reader.meta.weight is not None,
    )


def fill(out: RowBuffer, rows: Rows) -> None:
    """Copy rows into a buffer; multi-hot ids have no room there."""
    for target, values in zip((*out.dense, *out.ids), (*rows.dense, *rows.ids), strict=False):
        target[:] = values
    out.labels[:] = rows.labels
    if out.weights is not None:
        out.weights[:] = rows.weights


def batch_of(reader: RowGroupReader, rows: Rows) -> Batch:
    """Make a batch in host memory of rows, in their order.

    Args:
        reader: the reader of the rows.
        rows: what :meth:`RowGroupReader.read` returned.
    """
    out = row_buffer(reader, len(rows.labels))
    fill(out, rows)
    batch = out.to(torch.device("cpu"))
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
