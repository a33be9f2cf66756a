"""Write synthetic rows: Parquet like that of ``prepare_criteo``, or TSV like Criteo's raw files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch

from dlrm.data.schema import Categorical, Split
from dlrm.data.synthetic.distributions import hashed
from dlrm.data.synthetic.generator import GeneratedRows, Generator
from dlrm.data.synthetic.label_model import BINS
from dlrm.data.synthetic.multi_hot import (
    GROUP_ROWS,
    group_rows,
    id_array,
    id_field,
    open_writer,
)
from dlrm.data.threads import map_in_order

FILE_GROUPS = 8  # row groups of a Parquet file
TSV_FILE = "train.txt"

Progress = Callable[[int], object]


def write_parquet(
    directory: Path,
    generator: Generator,
    splits: Mapping[str, range],
    threads: int,
    progress: Progress,
    *,
    tables: Sequence[Categorical],
    seed: int,
) -> tuple[dict[str, Split], dict[str, np.ndarray]]:
    """Write the splits as Parquet, several files at a time; with bags where ``tables`` have them.

    Returns:
        The splits by name, and for each split the number of rows by label and true probability,
        ``[2, BINS]``.
    """
    write = partial(_write_file, generator=generator, tables=tables, seed=seed, progress=progress)
    size = group_rows(tables) * FILE_GROUPS
    jobs = [
        (split, f"{split}-{number:05d}.parquet", range(start, min(start + size, rows.stop)))
        for split, rows in splits.items()
        for number, start in enumerate(range(rows.start, max(rows.stop, rows.start + 1), size))
    ]

    files: dict[str, list[str]] = {split: [] for split in splits}
    counts = {split: np.zeros((2, BINS), dtype=np.int64) for split in splits}
    results = map_in_order(lambda job: write(directory / job[1], rows=job[2]), jobs, threads)
    for (split, file, _), added in zip(jobs, results, strict=True):
        files[split].append(file)
        counts[split] += added
    return {split: _split(files[split], counts[split]) for split in splits}, counts


def write_tsv(
    directory: Path,
    generator: Generator,
    splits: Mapping[str, range],
    threads: int,
    progress: Progress,
    *,
    seed: int,
) -> tuple[dict[str, Split], dict[str, np.ndarray]]:
    """Write all rows in order as one raw TSV file; returns the same as :func:`write_parquet`."""
    tokens = Tokens(generator, seed)
    jobs = [
        (split, range(start, min(start + GROUP_ROWS, rows.stop)))
        for split, rows in splits.items()
        for start in range(rows.start, rows.stop, GROUP_ROWS)
    ]

    def encode(job: tuple[str, range]) -> tuple[bytes, np.ndarray]:
        rows = generator.rows(job[1].start, job[1].stop)
        return _tsv(rows, tokens), _tally(rows)

    counts = {split: np.zeros((2, BINS), dtype=np.int64) for split in splits}
    with open(directory / TSV_FILE, "wb") as file:
        results = map_in_order(encode, jobs, threads)
        for (split, rows), (text, added) in zip(jobs, results, strict=True):
            file.write(text)
            counts[split] += added
            progress(len(rows))
    return {split: _split([TSV_FILE], counts[split]) for split in splits}, counts


class Tokens:
    """The raw value of each id: 32 bits as 8 hex digits, different for different ids.

    The ids of all columns are numbered consecutively, and a bijection of 32-bit integers (the
    finalizer of MurmurHash3) scatters these numbers.
    """

    def __init__(self, generator: Generator, seed: int) -> None:
        columns = generator.categorical
        sizes = [column.cardinality for column in columns]
        self.missing = [column.missing_rank if column.missing else None for column in columns]
        self.offsets = np.cumsum([0, *sizes])
        self.key = np.uint32(int(hashed(seed, 5, 1)) & 0xFFFFFFFF)
        digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
        pairs = np.stack(np.meshgrid(digits, digits, indexing="ij"), axis=-1).reshape(256, 2)
        self.pairs = np.ascontiguousarray(pairs).view(np.uint16)[:, 0]

    def values(self, column: int, ids: np.ndarray) -> np.ndarray:
        """Raw values of ``ids [B]`` of a column, uint32 ``[B]``."""
        x = (ids + self.offsets[column]).astype(np.uint32) ^ self.key
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    def text(self, column: int, ids: np.ndarray) -> pa.Array:
        """Raw values of ``ids [B]`` as 8 hex digits, null for missing."""
        octets = self.values(column, ids).astype(">u4").view(np.uint8)
        offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.pairs[octets])]
        if (missing := self.missing[column]) is not None:
            buffers[0] = pa.py_buffer(np.packbits(ids != missing, bitorder="little"))
        return pa.Array.from_buffers(pa.string(), len(ids), buffers)


def _write_file(
    path: Path,
    *,
    generator: Generator,
    rows: range,
    tables: Sequence[Categorical],
    seed: int,
    progress: Progress,
) -> np.ndarray:
    schema = pa.schema(
        [
            pa.field("label", pa.uint8(), nullable=False),
            *(pa.field(column.name, pa.float32(), nullable=False) for column in generator.dense),
            *map(id_field, tables),
        ]
    )
    multi_hot = any(table.multi_hot for table in tables)
    counts, size = np.zeros((2, BINS), dtype=np.int64), group_rows(tables)

    with open_writer(path, schema, tables if multi_hot else ()) as writer:
        for start in range(rows.start, rows.stop, size):
            made = generator.rows(start, min(start + size, rows.stop))
            arrays = [pa.array(made.labels.cpu().numpy())]
            arrays += [pa.array(column) for column in generator.transformed(made).cpu().numpy()]
            arrays += [
                id_array(ids, table, feature=feature, seed=seed)
                for feature, (ids, table) in enumerate(zip(made.ids, tables, strict=True))
            ]

            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), size)
            counts += _tally(made)
            progress(len(made.labels))
    return counts


def _tsv(rows: GeneratedRows, tokens: Tokens) -> bytes:
    """Label, integers and tokens, separated by tabs; missing values are empty."""
    columns = [pa.array(rows.labels.cpu().numpy())]
    for values, missing in zip(rows.dense.cpu(), rows.missing.cpu(), strict=True):
        columns.append(pa.array(values.numpy(), mask=missing.numpy()))
    for column, ids in enumerate(rows.ids.cpu()):
        columns.append(tokens.text(column, ids.numpy()))
    table = pa.Table.from_arrays(columns, names=[str(number) for number in range(len(columns))])
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    buffer = BytesIO()
    pa.csv.write_csv(table, buffer, options)
    return buffer.getvalue()


def _tally(rows: GeneratedRows) -> np.ndarray:
    """Number of rows by label and true probability, ``[2, BINS]``."""
    tally = torch.bincount(rows.bins + BINS * rows.labels.long(), minlength=2 * BINS)
    return tally.cpu().numpy().reshape(2, BINS)


def _split(files: list[str], counts: np.ndarray) -> Split:
    return Split(files=tuple(files), rows=int(counts.sum()), positives=int(counts[1].sum()))
