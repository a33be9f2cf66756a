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

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dlrm.data.column_values import read_ids
from dlrm.data.parquet import RowGroupReader, named_column
from dlrm.data.schema import Categorical, Meta
from dlrm.data.synthetic.distributions import mix
from dlrm.data.threads import map_in_order
from dlrm.utils.atomic import atomic_directory
from dlrm.utils.cpus import cpu_count

STREAM = 6  # of the hash; the generator and the writers have others
DICTIONARY = 1 << 16  # for larger tables, a dictionary of the ids would save nothing
GROUP_ROWS = 1 << 17  # rows of a row group of one-hot rows


def draw_bags(ids: Tensor, cardinality: int, bag_size: int, *, feature: int, seed: int) -> Tensor:
    """The bags of ``ids [B]``: each id and ``bag_size - 1`` others, int32 ``[B, bag_size]``.

    Args:
        ids: in [0, cardinality), int64.
        cardinality: rows of the table, at most 2^31.
        bag_size: ids of a bag, at least 1.
        feature: number of the feature; features have different draws.
        seed: seed of the draws.
    """
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
    """Rows of a row group, such that it has as many ids as one of one-hot rows."""
    return max(1, GROUP_ROWS * len(tables) // sum(table.bag_size or 1 for table in tables))


def id_field(table: Categorical) -> pa.Field:
    """The column of a file with the ids of a feature, or lists of them.

    The types exclude nulls, which makes reading 1.4 times as fast, and up to twice for lists.
    """
    item = pa.field("element", pa.int32(), nullable=False)
    kind = pa.list_(item) if table.multi_hot else pa.int32()
    return pa.field(table.name, kind, nullable=False)


def id_array(ids: Tensor, table: Categorical, *, feature: int, seed: int) -> pa.Array:
    """The values of :func:`id_field` for rows with the one-hot ``ids [B]`` of a feature."""
    if table.bag_size is None:
        return pa.array(ids.to(torch.int32).cpu().numpy())
    bags = draw_bags(ids, table.cardinality, table.bag_size, feature=feature, seed=seed)
    offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * table.bag_size)
    values = pa.array(bags.view(-1).cpu().numpy())
    return pa.ListArray.from_arrays(offsets, values, type=id_field(table).type)


def open_writer(path: Path, schema: pa.Schema, tables: Sequence[Categorical]) -> pq.ParquetWriter:
    """A writer of rows with bags, with dictionaries where they save space."""
    large = {table.name for table in tables if table.cardinality > DICTIONARY}
    dictionary = [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
        if field.name not in large
    ]
    # Among the encodings measured, dictionaries with LZ4 are the fastest to read for their size.
    return pq.ParquetWriter(
        path, schema, compression="lz4", write_page_checksum=True, use_dictionary=dictionary
    )


def convert(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    bag_sizes: Sequence[int],
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Meta:
    """Write the rows of a prepared one-hot directory with bags; an error leaves nothing behind.

    Args:
        directory: the prepared directory.
        output: directory to create; it may exist if it is empty.
        bag_sizes: ids of a bag of each categorical column, in their order.
        seed: seed of the draws.
        threads: files written at a time; by default one per core.
        progress: called with the number of rows just written, by several threads.

    Returns:
        The meta data of ``output``.

    Raises:
        FileNotFoundError: the directory or one of its files is missing.
        ValueError: a file is damaged, a column is multi-hot already or has a table of more than
            2^31 rows, an argument is out of range, or ``output`` is not empty.
    """
    meta = Meta.read(directory)
    tables = with_bag_sizes(meta.categorical, bag_sizes)
    if seed < 0:
        raise ValueError(f"seed is {seed}, it must not be negative")
    reader = RowGroupReader(directory, meta)
    with atomic_directory(Path(output)) as temporary:

        def write(file: str) -> None:
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            _write(reader, file, temporary / file, tables, seed, progress)

        files = [file for split in meta.splits.values() for file in split.files]
        for _ in map_in_order(write, files, threads or cpu_count()):
            pass
        source = {"source": "scripts/make_multi_hot.py", "bag_sizes": list(bag_sizes), "seed": seed}
        made = replace(
            meta,
            categorical=tables,
            options={**source, "one_hot": dict(meta.options)},
            fingerprint=None,
        )
        made.write(temporary)
    return made


def _write(
    reader: RowGroupReader,
    file: str,
    path: Path,
    tables: Sequence[Categorical],
    seed: int,
    progress: Callable[[int], object],
) -> None:
    """Write the rows of one file with bags."""
    source = reader.directory / file
    one_hot_schema = pq.read_schema(source).remove_metadata()
    fields = {name: one_hot_schema.field(name) for name in reader.columns}
    schema = pa.schema(list((fields | {t.name: id_field(t) for t in tables}).values()))
    with open_writer(path, schema, tables) as writer:
        for row_group in reader.open(source):
            rows = reader.read_table(row_group)
            columns = {name: rows[name] for name in reader.columns}
            for feature, (table, one_hot) in enumerate(
                zip(tables, reader.meta.categorical, strict=True)
            ):
                column = named_column(rows, row_group, table.name)
                ids = read_ids(*column, one_hot, table.cardinality).astype(np.int64)
                columns[table.name] = id_array(
                    torch.from_numpy(ids), table, feature=feature, seed=seed
                )
            made = pa.Table.from_arrays(list(columns.values()), schema=schema)
            writer.write_table(made, group_rows(tables))
            progress(row_group.rows)
