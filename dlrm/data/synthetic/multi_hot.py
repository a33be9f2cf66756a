"""Multi-hot ids from one-hot ones, by the rule of MLPerf's DLRM-DCNv2 benchmark.

Criteo's features have one id in a row. For bags of ``L`` ids, MLPerf draws ``L - 1`` other ids for
each id of a feature, uniformly from the whole table. The bag of a row is its id and these, so an id
always has the same bag, and the companions of frequent ids are frequent too.

MLPerf stores the draws of all ids in tables (23 GB for its 26 features). Here a draw is a hash of
the id, its position in the bag, the feature and the seed: there is no table, and any row can be
generated independently.

Reference: multi_hot.py of MLPerf Training's recommendation_v2 (TorchRec DLRM).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dlrm.data.schema import Categorical
from dlrm.data.synthetic.distributions import mix

STREAM = 6  # of the hash; the generator and the writers have others
DICTIONARY = 1 << 16  # for larger tables, a dictionary of the ids would save nothing
GROUP_ROWS = 1 << 17  # rows of a row group of one-hot rows


def draw_bags(ids: Tensor, cardinality: int, bag_size: int, *, feature: int, seed: int) -> Tensor:
    """The bags of ``ids [B]``, int64: each id and ``bag_size - 1`` others below ``cardinality``, at
    most 2^31; int32 ``[B, bag_size]``. Each ``feature`` has draws of its own."""
    key = mix(mix(mix(torch.tensor(seed)) + STREAM) + feature).to(ids.device)
    bags = torch.empty((len(ids), bag_size), dtype=torch.int32, device=ids.device)
    bags[:, 0] = ids
    position = torch.arange(1, bag_size, device=ids.device)
    step = max(1, (1 << 16) // bag_size)  # rows at a time: their ids fit into a CPU's caches
    for part, out in zip(ids.split(step), bags.split(step), strict=True):
        number = part[:, None] * (bag_size - 1) + position
        out[:, 1:] = mix(number * -0x61C8864680B583EB + key) % cardinality
    return bags


def with_bag_sizes(
    tables: Sequence[Categorical], bag_sizes: Sequence[int]
) -> tuple[Categorical, ...]:
    """Turn one-hot columns into columns with bags; with bags of one id, a column stays one-hot.
    There must be a size of 1 or more for each, and no more than 2^31 ids.

    Raises:
        ValueError: there is no size for a column, a size is below 1, or a column is multi-hot or
            has a table of more than 2^31 rows.
    """
    if len(bag_sizes) != len(tables):
        raise ValueError(
            f"there are {len(bag_sizes)} bag sizes for {len(tables)} categorical columns; give one "
            "for each"
        )
    for table, size in zip(tables, bag_sizes, strict=True):
        if size < 1:
            raise ValueError(f"the bag size of {table.name!r} is {size}, it must be at least 1")
        if table.multi_hot or table.cardinality > 2**31:
            what = "is multi-hot" if table.multi_hot else f"has {table.cardinality} ids"
            raise ValueError(
                f"column {table.name!r} {what}; bags are drawn for one-hot columns with tables of "
                "at most 2^31 rows"
            )
    return tuple(
        replace(table, multi_hot=True, bag_size=size) if size > 1 else table
        for table, size in zip(tables, bag_sizes, strict=True)
    )


def group_rows(tables: Sequence[Categorical]) -> int:
    """Rows of a row group: with bags, it has up to four times the ids of one of one-hot rows, so
    that what a row group costs Python weighs less."""
    one_hot = GROUP_ROWS * len(tables) // sum(table.bag_size or 1 for table in tables)
    return max(1, min(4 * one_hot, GROUP_ROWS))


def id_field(table: Categorical) -> pa.Field:
    """The column of a file with the ids of a feature, int32, or of the bags of a multi-hot one.

    Those of one length are stored as bytes: lists take three times as long to read. Columns with
    nulls take 1.4 times as long.
    """
    kind = pa.int32()
    if table.multi_hot:
        lists = pa.list_(pa.field("element", kind, nullable=False))
        kind = pa.binary(4 * table.bag_size) if table.bag_size else lists
    return pa.field(table.name, kind, nullable=False)


def id_array(ids: Tensor, table: Categorical, *, feature: int, seed: int) -> pa.Array:
    """The values of :func:`id_field` for rows with the one-hot ``ids [B]`` of a feature."""
    if table.bag_size is None:
        return pa.array(ids.to(torch.int32).cpu().numpy())
    bags = draw_bags(ids, table.cardinality, table.bag_size, feature=feature, seed=seed)
    content = pa.py_buffer(bags.cpu().numpy())
    return pa.Array.from_buffers(id_field(table).type, len(ids), [None, content])


def open_writer(path: Path, schema: pa.Schema, tables: Sequence[Categorical]) -> pq.ParquetWriter:
    """A writer of rows with bags, with dictionaries where they save space."""
    unlike = {t.name for t in tables if t.multi_hot or t.cardinality > DICTIONARY}
    dictionary = [name for name in schema.names if name not in unlike]
    # Among the encodings measured, dictionaries with LZ4 are the fastest to read for their size.
    return pq.ParquetWriter(
        path, schema, compression="lz4", write_page_checksum=True, use_dictionary=dictionary
    )
