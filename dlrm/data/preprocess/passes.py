"""The three passes of a preparation; see :mod:`dlrm.data.preprocess.pipeline`."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm.data.preprocess.parser import MISSING, hex_strings
from dlrm.data.preprocess.reader import RawBlock, RawFile
from dlrm.data.preprocess.spill import Spilled
from dlrm.data.preprocess.vocabulary import group, ids_in, look_up, number, open_vocabulary
from dlrm.data.preprocess.workspace import Workspace
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, META_FILE, Categorical, Meta, Split
from dlrm.utils.atomic import atomic_write

ROW_GROUP_ROWS = 1 << 17
# zstd with dictionaries: 43 bytes a row, read at 9M rows/s by a core; lz4: 54 bytes, 14M rows/s.
# Both are far faster than a loader needs, so the smaller is taken.
# Checksums, for zstd itself decodes a damaged page without complaint every other time.
ZSTD: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "write_page_checksum": True,
}
LARGEST_DICTIONARY = 1 << 16  # more ids than that hardly repeat within a row group
CHUNK_KEYS = 1 << 25  # of the blocks, merged at a time: 0.3 GB, with what it takes to sort 1 GB
SCHEMA = pa.schema(
    [("label", pa.uint8())]
    + [(name, pa.float32()) for name in CRITEO_DENSE]
    + [(name, pa.int32()) for name in CRITEO_CATEGORICAL]
)
VOCABULARY = pa.schema([("value", pa.string()), ("id", pa.int32()), ("count", pa.int64())])

Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(ThreadPoolExecutor):
    """Threads that keep order and never run far ahead of the one that takes the results."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._ahead = workers + 1

    def ordered(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> Iterator[Result]:
        """``function`` of each item, in the order of the items."""
        running: deque[Future[Result]] = deque()
        for item in items:
            running.append(self.submit(function, item))
            if len(running) > self._ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def parse_files(
    paths: Sequence[Path],
    work: Workspace,
    pool: Pool,
    *,
    transform: str,
    limit: int | None,
    skip_bad: bool,
    block_bytes: int,
    progress: bool,
) -> tuple[list[Spilled], list[dict[str, Any]]]:
    """Pass 1: spill the blocks of all files.

    Returns:
        The blocks in row order; name, bytes and SHA-256 of each file that was read.

    Raises:
        ValueError: there is a bad row and ``skip_bad`` is false; the first one is named.
    """
    inputs: list[dict[str, Any]] = []
    spilled = []
    consumed: dict[str, int] = {}
    total_bytes = sum(path.stat().st_size for path in paths)

    def spill(numbered: tuple[int, RawBlock]) -> tuple[Spilled, int]:
        index, block = numbered
        path = work / "blocks" / f"{index:06}.arrow"
        return Spilled.of(block, path, transform), block.consumed

    with _bar("parse", "rows", progress) as bar:
        blocks = enumerate(_read(paths, limit, block_bytes, inputs))
        for part, consumed[part.source] in pool.ordered(spill, blocks):
            if part.first_bad and not skip_bad:
                raise ValueError(
                    f"{part.first_bad[0]}; correct the input, or leave out what is bad with "
                    "--bad-rows skip"
                )
            spilled.append(part)
            share = sum(consumed.values()) / max(total_bytes, 1)
            bar.total = min(round((bar.n + part.rows) / max(share, 1e-9)), limit or sys.maxsize)
            bar.update(part.rows)
    return spilled, inputs


def number_columns(
    blocks: Sequence[Spilled],
    work: Workspace,
    *,
    counted: int,
    cap: int | None,
    min_count: int,
    oov: bool,
    known: Path | None,
    progress: bool,
) -> tuple[Categorical, ...]:
    """Pass 2: the vocabulary of each column, and the id of each code of each block.

    Args:
        blocks: what pass 1 returned, without blocks that hold no rows.
        work: gets ``vocabulary/NAME.parquet`` and ``ids/NAME``, int32, the blocks' codes behind
            one another.
        counted: the first so many rows make the vocabulary.
        cap: values are taken modulo this before they are counted, as in the reference; a missing
            value stays one of its own.
        min_count: see :func:`dlrm.data.preprocess.vocabulary.number`.
        oov: see there.
        known: a prepared directory whose vocabularies are taken instead.
        progress: show a bar.

    Raises:
        ValueError: a value is not in a known vocabulary, which has no id for such, or that is
            damaged.
    """

    def column(name: str) -> Categorical:
        done = work / "ids" / f"{name}.json"
        if not done.exists():
            keys, counts = _count(blocks, name, cap, counted)
            if known is None:
                vocabulary, ids = number(keys, counts, min_count=min_count, oov=oov)
                table = vocabulary.table()
            else:
                table, ids = _of_known(known, name, keys)
            unlisted = pc.index(table["value"].is_null(), True).as_py()
            described = Categorical(
                name=name, cardinality=len(table), oov_id=None if unlisted < 0 else unlisted
            )
            with atomic_write(work / Meta.vocabulary_file(name)) as temporary:
                pq.write_table(
                    table,
                    temporary,
                    use_dictionary=["count"],
                    column_encoding={"value": "PLAIN", "id": "DELTA_BINARY_PACKED"},
                    **ZSTD,
                )
            del table  # of hundreds of millions of values, in Terabyte
            with atomic_write(work / "ids" / name) as temporary, temporary.open("wb") as file:
                for chunk in _chunks(blocks, name):
                    # Not by tofile, which drops the last bytes silently where the disk is full.
                    file.write(look_up(keys, ids, _keys(chunk, name, cap)).data)
            with atomic_write(done) as temporary:
                temporary.write_text(json.dumps(asdict(described)))
        return Categorical(**json.loads(done.read_text()))

    # Two columns at a time whatever the number of cores, to bound the memory.
    with Pool(2) as pool, _bar("number", "columns", progress) as bar:
        bar.total = len(CRITEO_CATEGORICAL)
        described = []
        for categorical in pool.ordered(column, CRITEO_CATEGORICAL):
            described.append(categorical)
            bar.update()
    return tuple(described)


def require_known(known: Path, columns: Sequence[Categorical]) -> None:
    """See that data prepared before has the vocabularies that it tells of.

    Raises:
        ValueError: one can't be opened, or is of another preparation.
    """
    for column in columns:
        with open_vocabulary(known / Meta.vocabulary_file(column.name), known) as file:
            if (rows := file.metadata.num_rows) != column.cardinality:
                raise ValueError(f"it has {rows} rows, {META_FILE} tells of {column.cardinality}")


def _of_known(
    known: Path, name: str, keys: NDArray[np.int64]
) -> tuple[pa.Table, NDArray[np.int32]]:
    """The vocabulary of a column of data prepared before, and the id of each key in it."""
    with open_vocabulary(known / Meta.vocabulary_file(name), known) as file:
        table = file.read().cast(VOCABULARY)
        ids = ids_in(table, keys)
    if (ids < 0).any():
        value = hex_strings(keys[ids < 0][:1])[0].as_py()
        raise ValueError(
            f"{name}: {sum(ids < 0)} values, such as {value!r}, have no id in {known}, "
            "which was prepared with --vocabulary all and has none for others: prepare it with "
            "--vocabulary train"
        )
    return table, ids


def write_splits(
    blocks: Sequence[Spilled],
    categorical: Sequence[Categorical],
    parts: Mapping[str, range],
    work: Workspace,
    pool: Pool,
    *,
    progress: bool,
) -> dict[str, Split]:
    """Pass 3: ``SPLIT.parquet`` for the rows of each split, in the workspace."""
    firsts = list(accumulate((block.rows for block in blocks), initial=0))
    ids = {name: np.memmap(work / "ids" / name, np.int32, "r") for name in CRITEO_CATEGORICAL}
    code_firsts = {
        name: list(accumulate((block.distinct[name] for block in blocks), initial=0))
        for name in CRITEO_CATEGORICAL
    }

    def rows_of(part: range, index: int) -> pa.Table:
        batch = blocks[index].read()
        columns = {name: batch[name] for name in ("label", *CRITEO_DENSE)}
        for name in CRITEO_CATEGORICAL:
            first, last = code_firsts[name][index : index + 2]
            columns[name] = pa.array(ids[name][first:last]).take(batch[name].indices)
        start = max(part.start - firsts[index], 0)
        stop = min(part.stop - firsts[index], batch.num_rows)
        return pa.table(columns, schema=SCHEMA).slice(start, stop - start)

    repeating = ["label", *CRITEO_DENSE]
    repeating += [c.name for c in categorical if c.cardinality <= LARGEST_DICTIONARY]
    splits = {}
    with _bar("write", "rows", progress) as bar:
        bar.total = sum(map(len, parts.values()))
        for name, part in parts.items():
            touched = [
                index
                for index in range(len(blocks))
                if max(part.start, firsts[index]) < min(part.stop, firsts[index + 1])
            ]
            tables = pool.ordered(partial(rows_of, part), touched)
            file = f"{name}.parquet"
            with (
                atomic_write(work / file) as temporary,
                pq.ParquetWriter(temporary, SCHEMA, use_dictionary=repeating, **ZSTD) as writer,
            ):
                positives = _write_rows(writer, tables, bar)
            splits[name] = Split(files=(file,), rows=len(part), positives=positives)
    return splits


def _read(
    paths: Sequence[Path], limit: int | None, block_bytes: int, inputs: list[dict[str, Any]]
) -> Iterator[RawBlock]:
    """The blocks of all files; ``inputs`` gets the record of each file as it ends."""
    for path in paths:
        if limit == 0:
            return
        file = RawFile(path)
        for block in file.blocks(limit, block_bytes):
            yield block
            if limit is not None:
                limit -= block.lines
        inputs.append({"name": path.name, "bytes": path.stat().st_size, "sha256": file.sha256()})


def _chunks(blocks: Sequence[Spilled], name: str) -> Iterator[Sequence[Spilled]]:
    """Consecutive blocks with some ``CHUNK_KEYS`` keys together."""
    start, size = 0, 0
    for stop, block in enumerate(blocks, 1):
        size += block.distinct[name]
        if size >= CHUNK_KEYS or stop == len(blocks):
            yield blocks[start:stop]
            start, size = stop, 0


def _count(
    blocks: Sequence[Spilled], name: str, cap: int | None, counted: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct keys of a column in rising order, and the occurrences of each among the first
    ``counted`` rows."""
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for chunk in _chunks(blocks, name):
        occurrences = [counts]
        for block in chunk:
            values = block.read_column(name)
            codes = values.indices.to_numpy()[: max(counted, 0)]
            occurrences.append(np.bincount(codes, minlength=len(values.dictionary)))
            counted -= block.rows
        more = _keys(chunk, name, cap)
        keys, counts = group(np.concatenate((keys, more)), np.concatenate(occurrences))
    return keys, counts


def _keys(blocks: Sequence[Spilled], name: str, cap: int | None) -> NDArray[np.int64]:
    """What each code of each block stands for."""
    keys = np.concatenate([block.read_column(name).dictionary.to_numpy() for block in blocks])
    return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))


def _write_rows(writer: pq.ParquetWriter, tables: Iterable[pa.Table], bar: tqdm) -> int:
    """Write ``tables`` in row groups of one size; returns the number of positive labels."""
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
