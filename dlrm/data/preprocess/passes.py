"""The three passes of a preparation; see :mod:`dlrm.data.preprocess.pipeline`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm.data.prepare.criteo_rows import MISSING
from dlrm.data.prepare.text_blocks import BlockReader, TextBlock
from dlrm.data.prepare.workspace import Workspace
from dlrm.data.preprocess.appending import append_ids
from dlrm.data.preprocess.spill import SpilledBlock
from dlrm.data.preprocess.vocabulary import (
    UNSEEN,
    ZSTD,
    assign_ids,
    look_up,
    reuse_ids,
    sum_counts,
)
from dlrm.data.schema import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    SPLITS,
    Categorical,
    Meta,
    Split,
)
from dlrm.data.threads import map_in_order
from dlrm.utils.atomic import atomic_write
from dlrm.utils.documents import read_json

ROW_GROUP_ROWS = 1 << 17
LARGEST_DICTIONARY = 1 << 16  # with more ids than this, few repeat within a row group
CHUNK_KEYS = 1 << 25  # keys of the blocks merged at a time: 0.3 GB, 1 GB while they are sorted
TYPES = {
    "label": pa.uint8(),
    **dict.fromkeys(CRITEO_DENSE, pa.float32()),
    **dict.fromkeys(CRITEO_CATEGORICAL, pa.int32()),
}
# Columns that can't be null are read 1.4 times as fast.
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in TYPES.items()])


def parse_files(
    paths: Sequence[Path],
    work: Workspace,
    *,
    transform: str,
    limit: int | None,
    skip_bad: bool,
    block_bytes: int,
    workers: int,
    progress: bool,
) -> tuple[list[SpilledBlock], list[dict[str, Any]]]:
    """Pass 1: parse and spill the blocks of all files.

    Returns:
        The blocks in row order; name, size in bytes and SHA-256 of each file that was read.

    Raises:
        ValueError: there is a bad row and ``skip_bad`` is false; the error names the first one.
    """
    inputs: list[dict[str, Any]] = []
    spilled = []
    consumed: dict[str, int] = {}
    total_bytes = sum(path.stat().st_size for path in paths)

    def spill(numbered: tuple[int, TextBlock]) -> tuple[SpilledBlock, int]:
        index, block = numbered
        path = work / "blocks" / f"{index:06}.arrow"
        return SpilledBlock.of(block, path, transform), block.consumed

    with _bar("parse", "rows", progress) as bar:
        blocks = enumerate(_read(paths, limit, block_bytes, inputs))
        for done, consumed[done.source] in map_in_order(spill, blocks, workers):
            if done.first_bad and not skip_bad:
                raise ValueError(
                    f"{done.first_bad[0]}; correct the input, or skip bad rows with --bad-rows skip"
                )
            spilled.append(done)
            share = sum(consumed.values()) / max(total_bytes, 1)
            bar.total = min(round((bar.n + done.rows) / max(share, 1e-9)), limit or sys.maxsize)
            bar.update(done.rows)
    return spilled, inputs


def index_columns(
    blocks: Sequence[SpilledBlock],
    work: Workspace,
    *,
    counted: int,
    cap: int | None,
    min_count: int,
    oov: bool,
    ids_of: Path | None,
    append_new: bool = False,
    forget: int | None = None,
    progress: bool,
) -> tuple[Categorical, ...]:
    """Pass 2: the vocabulary of each column, and the id of each dictionary entry of each block.

    Args:
        blocks: the blocks of pass 1 that have rows.
        work: gets ``vocabulary/NAME.parquet``, and ``ids/NAME``: the ids of the dictionary entries
            as int32, one block after another.
        counted: number of rows, from the first one, whose values make the vocabulary.
        cap: take values modulo this before they are counted, as in the reference; a missing value
            remains a value of its own.
        min_count: see :func:`dlrm.data.preprocess.vocabulary.assign_ids`.
        oov: see there.
        ids_of: a prepared directory whose vocabularies are used instead.
        append_new: give values that ``ids_of`` does not list ids too.
        forget: see :func:`dlrm.data.preprocess.appending.extend_ids`.
        progress: show a progress bar.

    Raises:
        ValueError: a vocabulary of ``ids_of`` is damaged, or has no id for a value.
    """

    def column(name: str) -> Categorical:
        done = work / "ids" / f"{name}.json"
        if not done.exists():
            keys, counts = _count(blocks, name, cap, counted)
            if ids_of is None:
                vocabulary, ids = assign_ids(keys, counts, min_count=min_count, oov=oov)
                table = vocabulary.table()
            elif append_new:
                table, ids = append_ids(
                    ids_of, name, keys, counts, min_count=min_count, forget=forget
                )
            else:
                table, ids = reuse_ids(ids_of, name, keys)
            oov_id = pc.index(table["value"].is_null(), True).as_py()
            described = Categorical(
                name=name, cardinality=len(table), oov_id=None if oov_id < 0 else oov_id
            )
            with atomic_write(work / Meta.vocabulary_file(name)) as temporary:
                pq.write_table(
                    table,
                    temporary,
                    use_dictionary=["count", UNSEEN.name],
                    column_encoding={"value": "PLAIN", "id": "DELTA_BINARY_PACKED"},
                    **ZSTD,
                )
            del table  # up to hundreds of millions of values in Terabyte
            with atomic_write(work / "ids" / name) as temporary, temporary.open("wb") as file:
                for chunk in _chunks(blocks, name):
                    # Not with tofile, which silently drops the last bytes if the disk is full.
                    file.write(look_up(keys, ids, _keys(chunk, name, cap)).data)
            with atomic_write(done) as temporary:
                temporary.write_text(json.dumps(asdict(described)))
        return Categorical(**read_json(done))

    with _bar("index", "columns", progress) as bar:
        bar.total = len(CRITEO_CATEGORICAL)
        described = []
        # Two columns at a time, whatever the number of cores, to bound the memory.
        for categorical in map_in_order(column, CRITEO_CATEGORICAL, 2):
            described.append(categorical)
            bar.update()
    return tuple(described)


def write_splits(
    blocks: Sequence[SpilledBlock],
    categorical: Sequence[Categorical],
    rows: Mapping[str, range],
    work: Workspace,
    *,
    workers: int,
    progress: bool,
) -> dict[str, Split]:
    """Pass 3: write ``SPLIT.parquet`` with the ``rows`` of each split into the workspace."""
    firsts = list(accumulate((block.rows for block in blocks), initial=0))
    ids = {name: np.memmap(work / "ids" / name, np.int32, "r") for name in CRITEO_CATEGORICAL}
    first_ids = {
        name: list(accumulate((block.distinct[name] for block in blocks), initial=0))
        for name in CRITEO_CATEGORICAL
    }

    def rows_of(split: range, index: int) -> pa.Table:
        batch = blocks[index].read()
        columns = {name: batch[name] for name in ("label", *CRITEO_DENSE)}
        for name in CRITEO_CATEGORICAL:
            first, last = first_ids[name][index : index + 2]
            columns[name] = pa.array(ids[name][first:last]).take(batch[name].indices)
        start = max(split.start - firsts[index], 0)
        stop = min(split.stop - firsts[index], batch.num_rows)
        return pa.table(columns, schema=SCHEMA).slice(start, stop - start)

    repeating = ["label", *CRITEO_DENSE]
    repeating += [c.name for c in categorical if c.cardinality <= LARGEST_DICTIONARY]
    splits = {}
    with _bar("write", "rows", progress) as bar:
        bar.total = sum(map(len, rows.values()))
        for name in SPLITS:
            split = rows[name]
            overlapping = [
                index
                for index in range(len(blocks))
                if max(split.start, firsts[index]) < min(split.stop, firsts[index + 1])
            ]
            tables = map_in_order(partial(rows_of, split), overlapping, workers)
            file = f"{name}.parquet"
            with (
                atomic_write(work / file) as temporary,
                pq.ParquetWriter(temporary, SCHEMA, use_dictionary=repeating, **ZSTD) as writer,
            ):
                positives = _write_rows(writer, tables, bar)
            splits[name] = Split(files=(file,), rows=len(split), positives=positives)
    return splits


def _read(
    paths: Sequence[Path], limit: int | None, block_bytes: int, inputs: list[dict[str, Any]]
) -> Iterator[TextBlock]:
    """The blocks of all files; appends the record of each finished file to ``inputs``."""
    for path in paths:
        if limit == 0:
            return
        file = BlockReader(path)
        for block in file.blocks(limit, block_bytes):
            yield block
            if limit is not None:
                limit -= block.lines
        inputs.append({"name": path.name, "bytes": path.stat().st_size, "sha256": file.sha256()})


def _chunks(blocks: Sequence[SpilledBlock], name: str) -> Iterator[Sequence[SpilledBlock]]:
    """Consecutive blocks that have about ``CHUNK_KEYS`` keys together."""
    start, size = 0, 0
    for stop, block in enumerate(blocks, 1):
        size += block.distinct[name]
        if size >= CHUNK_KEYS or stop == len(blocks):
            yield blocks[start:stop]
            start, size = stop, 0


def _count(
    blocks: Sequence[SpilledBlock], name: str, cap: int | None, counted: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct keys of a column in rising order, and how often each occurs in the first
    ``counted`` rows."""
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for chunk in _chunks(blocks, name):
        occurrences = [counts]
        for block in chunk:
            values = block.read_column(name)
            indices = values.indices.to_numpy()[: max(counted, 0)]
            occurrences.append(np.bincount(indices, minlength=len(values.dictionary)))
            counted -= block.rows
        more = _keys(chunk, name, cap)
        keys, counts = sum_counts(np.concatenate((keys, more)), np.concatenate(occurrences))
    return keys, counts


def _keys(blocks: Sequence[SpilledBlock], name: str, cap: int | None) -> NDArray[np.int64]:
    """The key of each dictionary entry of each block."""
    keys = np.concatenate([block.read_column(name).dictionary.to_numpy() for block in blocks])
    return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))


def _write_rows(writer: pq.ParquetWriter, tables: Iterable[pa.Table], bar: tqdm) -> int:
    """Write ``tables`` in row groups of equal size; returns the number of positive labels."""
    positives = 0
    pending = SCHEMA.empty_table()
    for table in tables:
        positives += pc.sum(table["label"]).as_py()
        pending = pa.concat_tables([pending, table])
        while pending.num_rows >= ROW_GROUP_ROWS:
            writer.write_table(pending.slice(0, ROW_GROUP_ROWS), ROW_GROUP_ROWS)
            pending = pending.slice(ROW_GROUP_ROWS)
        bar.update(table.num_rows)
    if pending.num_rows:
        writer.write_table(pending, ROW_GROUP_ROWS)
    return positives


def _bar(phase: str, unit: str, shown: bool) -> tqdm:
    return tqdm(desc=phase, unit=f" {unit}", unit_scale=True, mininterval=0.5, disable=not shown)
