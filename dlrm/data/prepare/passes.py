"""The three passes over a table; see :mod:`dlrm.data.prepare.pipeline`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm.data.prepare.bad_rows import BadRows, convert_good_rows
from dlrm.data.prepare.columns import SPLIT, ColumnPlan, Feature
from dlrm.data.prepare.convert import convert_rows, map_parts
from dlrm.data.prepare.files import Part, RawFile
from dlrm.data.prepare.numbers import (
    Scaling,
    bucket_edges,
    bucket_names,
    bucket_numbers,
    fit_scaling,
    summarise,
)
from dlrm.data.prepare.splitting import TRAIN, Codes, Splitter
from dlrm.data.prepare.transform import TableTransform
from dlrm.data.prepare.vocabulary import TextVocabulary, make_vocabulary, merge_counts
from dlrm.data.prepare.workspace import Workspace
from dlrm.data.preprocess.passes import LARGEST_DICTIONARY, ROW_GROUP_ROWS
from dlrm.data.preprocess.vocabulary import ZSTD
from dlrm.data.schema import SPLITS, Meta, Split
from dlrm.data.threads import map_in_order
from dlrm.utils.atomic import atomic_write

CHUNK_BYTES = 1 << 28  # texts of the blocks that are merged at a time
CHUNK_ENTRIES = 1 << 22  # of dictionaries whose ids are looked up at a time


@dataclass(frozen=True, kw_only=True)
class Block:
    """Converted rows on disk."""

    path: Path
    first: int
    """Number of the first row in the table."""
    rows: int

    def read(self) -> pa.RecordBatch:
        """All columns, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.path))).get_batch(0)

    def column(self, name: str) -> pa.Array:
        """A single column, memory-mapped."""
        with pa.memory_map(str(self.path)) as file:
            at = pa.ipc.open_file(file).schema.names.index(name)
        options = pa.ipc.IpcReadOptions(included_fields=[at])
        file = pa.ipc.open_file(pa.memory_map(str(self.path)), options=options)
        return file.get_batch(0).column(0)

    def entries(self, feature: Feature) -> pa.DictionaryArray:
        """The values of a category, or of all lists one after another."""
        column = self.column(feature.name)
        return column.flatten() if feature.multi_hot else column

    def codes(self, splitter: Splitter) -> Codes:
        """The split of each row."""
        by_column = splitter.options.column is not None
        column = self.column(SPLIT).to_numpy() if by_column else None
        return splitter.codes(self.first, self.rows, column)


def convert_files(
    files: Sequence[RawFile],
    plan: ColumnPlan,
    types: Mapping[str, pa.DataType],
    work: Workspace,
    *,
    block_bytes: int,
    workers: int,
    progress: bool,
    skip_bad: bool = False,
) -> tuple[list[Block], BadRows]:
    """Pass 1: convert and spill all rows.

    Returns:
        The blocks, and the rows that were left out.

    Raises:
        ValueError: a row or value doesn't fit, and is not to be skipped; the error names the first
            one.
    """

    def spill(index: int, part: Part) -> tuple[tuple[Path, int, BadRows], int]:
        path = work / "blocks" / f"{index:06}.arrow"
        if not path.exists():  # else an earlier run has converted it
            if skip_bad:
                good = convert_good_rows(part, types, partial(convert_rows, plan))
                rows = good.result.replace_schema_metadata(BadRows.of(good.bad).as_metadata())
            else:
                rows = convert_rows(plan, part.parse(types))
            with (
                atomic_write(path) as temporary,
                pa.ipc.new_file(str(temporary), rows.schema) as file,
            ):
                file.write_batch(rows)
        with pa.memory_map(str(path)) as source:
            file = pa.ipc.open_file(source)
            bad, rows = BadRows.from_metadata(file.schema.metadata), file.get_batch(0).num_rows
            return (path, rows, bad), rows + bad.count

    blocks: list[Block] = []
    skipped, seen = BadRows(), Counter[Path]()
    total = sum(file.path.stat().st_size for file in files)
    consumed: dict[Path, int] = {}
    with _bar("read", "B", progress) as bar:
        bar.total, first = total, 0
        parts = (part for file in files for part in file.parts(block_bytes))
        for part, (path, rows, bad), count in map_parts(parts, spill, workers):
            if rows:
                blocks.append(Block(path=path, first=first, rows=rows))
            first += rows
            skipped.add(bad, part.path, seen[part.path])
            seen[part.path] += count
            consumed[part.path] = part.consumed
            bar.update(sum(consumed.values()) - bar.n)
    return blocks, skipped


def index_features(
    blocks: Sequence[Block],
    plan: ColumnPlan,
    splitter: Splitter,
    work: Workspace,
    *,
    progress: bool,
) -> TableTransform:
    """Pass 2: the scaling or the vocabulary of each feature, from the training rows.

    Leaves the id of each dictionary entry of each block in ``ids/NUMBER``, int32.

    Raises:
        ValueError: a feature has no value in any training row.
    """
    transform = TableTransform(plan=plan)
    if weight := plan.only("weight"):
        transform.mean_weight = _mean_weight(blocks, splitter, weight.name)
    learner = Learner(blocks=blocks, splitter=splitter, work=work, transform=transform)
    with _bar("learn", "features", progress) as bar:
        bar.total = len(plan.features)
        # Two features at a time, whatever the number of cores, to bound the memory.
        for _ in map_in_order(learner.learn, enumerate(plan.features), 2):
            bar.update()
    return transform


def _mean_weight(blocks: Sequence[Block], splitter: Splitter, name: str) -> float:
    """The mean of the weights of the training rows.

    Raises:
        ValueError: all are 0.
    """
    total, rows = 0.0, 0
    for block in blocks:
        training = block.codes(splitter) == TRAIN
        total += float(block.column(name).to_numpy()[training].sum(dtype=np.float64))
        rows += int(training.sum())
    if not total:
        raise ValueError(f"column {name!r}: all training rows have weight 0; correct the weights")
    return total / rows


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Pass 2 for one feature at a time."""

    blocks: Sequence[Block]
    splitter: Splitter
    work: Workspace
    transform: TableTransform

    def learn(self, numbered: tuple[int, Feature]) -> None:
        """Learn one feature, unless an earlier run did, and put it into the transform."""
        index, feature = numbered
        name, done = feature.name, self.work / "ids" / f"{index}.json"
        vocabulary = self.work / Meta.vocabulary_file(name)
        if not done.exists():
            learned = {}
            if feature.dense or feature.bucketed:
                learned = self._learn_number(feature, vocabulary)
            else:
                self._learn_values(feature, index, vocabulary)
            with atomic_write(done) as temporary:
                temporary.write_text(json.dumps(learned))
        learned = json.loads(done.read_text())
        if "scaling" in learned:
            self.transform.scalings[name] = Scaling(**learned["scaling"])
        if "newest" in learned:
            self.transform.newest[name] = learned["newest"]
        if "edges" in learned:
            self.transform.edges[name] = np.array(learned["edges"], float)
        if not feature.dense:
            self.transform.vocabularies[name] = TextVocabulary.read(vocabulary)

    def _learn_number(self, feature: Feature, vocabulary: Path) -> dict[str, object]:
        learned: dict[str, object] = {}
        if feature.part == "age":
            newest = max(np.nanmax(x, initial=-np.inf) for x in self._training(feature))
            if newest == -np.inf:
                raise _no_value(feature)
            self.transform.newest[feature.name] = learned["newest"] = float(newest)
        rows = sum(int((block.codes(self.splitter) == TRAIN).sum()) for block in self.blocks)
        summary = summarise(self._training(feature), rows)
        if summary.missing == summary.rows:
            raise _no_value(feature)
        own = feature.column.options
        if not feature.bucketed:
            transform = "log" if feature.part == "age" else own.transform or "auto"
            return learned | {"scaling": asdict(fit_scaling(transform, summary))}
        edges = bucket_edges(summary, own.buckets)
        counts = np.zeros(len(edges) + 2, np.int64)
        for values in self._training(feature):
            counts += np.bincount(bucket_numbers(values, edges), minlength=len(counts))
        names = pa.array(bucket_names(edges))
        made, _ = make_vocabulary(names, counts, min_count=1, cap=None)
        made.write(vocabulary)
        return {"edges": edges.tolist()}

    def _training(self, feature: Feature) -> Iterator[NDArray[np.float64]]:
        """The numbers of the training rows, in blocks; of a time its age, once it is known."""
        for block in self.blocks:
            values = block.column(feature.name).to_numpy()
            if feature.name in self.transform.newest:
                values = np.maximum(self.transform.newest[feature.name] - values, 0)
            yield values[block.codes(self.splitter) == TRAIN]

    def _learn_values(self, feature: Feature, index: int, vocabulary: Path) -> None:
        own = feature.column.options
        with atomic_write(self.work / "ids" / f"{index}") as temporary:
            with temporary.open("wb") as file:
                values, counts = self.count(feature, file)
            if not (counts > 0).any() or values.filter(pa.array(counts > 0)).to_pylist() == [""]:
                raise _no_value(feature)
            made, ids = make_vocabulary(values, counts, min_count=own.min_count or 1, cap=own.cap)
            made.write(vocabulary)
            del values, counts, made
            entries = np.memmap(temporary, np.int32, "r+")
            for start in range(0, len(entries), CHUNK_ENTRIES):
                part = entries[start : start + CHUNK_ENTRIES]
                part[:] = ids[part]
            entries.flush()

    def count(
        self, feature: Feature, file: BinaryIO | None = None
    ) -> tuple[pa.Array, NDArray[np.int64]]:
        """The distinct values of all rows, and how often each occurs in the training rows.

        Args:
            feature: a category or list.
            file: gets the position among these values, int32, of each dictionary entry of each
                block.
        """
        values, counts = pa.array([], pa.large_string()), np.empty(0, np.int64)
        at = 0
        for chunk in self._chunks(feature):
            occurrences = [counts]
            for _ in chunk:
                occurrences.append(self._occurrences(feature, self.blocks[at]))
                at += 1
            before = len(values)  # they stay where they are
            values, counts, positions = merge_counts([values, *chunk], occurrences)
            if file is not None:
                file.write(positions[before:].data)
        return values, counts

    def _occurrences(self, feature: Feature, block: Block) -> NDArray[np.int64]:
        """How often each dictionary entry of a block occurs in its training rows."""
        training = block.codes(self.splitter) == TRAIN
        column = block.column(feature.name)
        entries = column
        if feature.multi_hot:
            training = np.repeat(training, pc.list_value_length(column).to_numpy())
            entries = column.flatten()
        indices = entries.indices.to_numpy()
        if not training.all():
            indices = indices[training]
        return np.bincount(indices, minlength=len(entries.dictionary))

    def _chunks(self, feature: Feature) -> Iterator[list[pa.Array]]:
        """The dictionaries of consecutive blocks that have some ``CHUNK_BYTES`` together."""
        chunk: list[pa.Array] = []
        for block in self.blocks:
            chunk.append(block.entries(feature).dictionary)
            if sum(part.nbytes for part in chunk) >= CHUNK_BYTES:
                yield chunk
                chunk = []
        if chunk:
            yield chunk


def write_splits(
    blocks: Sequence[Block],
    transform: TableTransform,
    splitter: Splitter,
    work: Workspace,
    *,
    workers: int,
    progress: bool,
) -> dict[str, Split]:
    """Pass 3: write ``SPLIT.parquet`` into the workspace."""
    plan = transform.plan
    looked_up = {
        feature.name: (
            np.memmap(work / "ids" / str(index), np.int32, "r"),
            list(accumulate((len(b.entries(feature).dictionary) for b in blocks), initial=0)),
        )
        for index, feature in enumerate(plan.features)
        if not feature.dense and not feature.bucketed and (work / "ids" / str(index)).exists()
    }

    def encode(numbered: tuple[int, Block]) -> list[pa.RecordBatch]:
        index, block = numbered
        ids = {n: i[firsts[index] : firsts[index + 1]] for n, (i, firsts) in looked_up.items()}
        rows, codes = transform.encode(block.read(), ids), block.codes(splitter)
        return [rows.filter(pa.array(codes == code)) for code in range(len(SPLITS))]

    label = plan.only("label")
    assert label is not None
    vocabularies = transform.vocabularies
    splits = {name: Split(files=(f"{name}.parquet",), rows=0, positives=0) for name in SPLITS}
    with _bar("write", "rows", progress) as bar, ExitStack() as stack:
        bar.total = sum(block.rows for block in blocks)
        writers: dict[str, SplitWriter] = {}
        for rows in map_in_order(encode, enumerate(blocks), workers):
            for name, part in zip(SPLITS, rows, strict=True):
                if name not in writers:
                    few = [
                        field
                        for field in part.schema.names
                        if field not in vocabularies
                        or len(vocabularies[field]) <= LARGEST_DICTIONARY
                    ]
                    path = work / f"{name}.parquet"
                    writers[name] = stack.enter_context(SplitWriter(path, part.schema, few))
                writers[name].write(part)
                splits[name] = replace(
                    splits[name],
                    rows=splits[name].rows + part.num_rows,
                    positives=splits[name].positives + (pc.sum(part[label.name]).as_py() or 0),
                )
            bar.update(sum(part.num_rows for part in rows))
    return splits


class SplitWriter:
    """Writes batches to a Parquet file in row groups of equal size."""

    def __init__(self, path: Path, schema: pa.Schema, repeating: Sequence[str]) -> None:
        self._path, self._schema, self._repeating = path, schema, repeating
        self._pending = schema.empty_table()

    def __enter__(self) -> SplitWriter:
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_write(self._path))
            self._file = stack.enter_context(
                pq.ParquetWriter(temporary, self._schema, use_dictionary=self._repeating, **ZSTD)
            )
            self._stack = stack.pop_all()
        return self

    def write(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._pending = pa.concat_tables([self._pending, pa.Table.from_batches([rows])])
        while self._pending.num_rows >= ROW_GROUP_ROWS:
            self._file.write_table(self._pending.slice(0, ROW_GROUP_ROWS), ROW_GROUP_ROWS)
            self._pending = self._pending.slice(ROW_GROUP_ROWS)

    def __exit__(self, *error: object) -> bool | None:
        if error[0] is None and self._pending.num_rows:
            self._file.write_table(self._pending, ROW_GROUP_ROWS)
        return self._stack.__exit__(*error)  # type: ignore[arg-type]


def _no_value(feature: Feature) -> ValueError:
    return ValueError(
        f"column {feature.column.name!r} has no value in any training row; leave it out with "
        f"{feature.column.drop_line}, or choose another split"
    )


def _bar(phase: str, unit: str, shown: bool) -> tqdm:
    return tqdm(desc=phase, unit=f" {unit}", unit_scale=True, mininterval=0.5, disable=not shown)
