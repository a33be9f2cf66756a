"""Writes the scores of ``dlrm predict``: of raw rows, or of a split of a prepared directory."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dlrm.data.prepare.input_paths import find_files
from dlrm.data.prepare.raw_rows import in_batches
from dlrm.data.prepare.table import MADE_BY
from dlrm.data.schema import META_FILE
from dlrm.distributed.world import World
from dlrm.training import metrics
from dlrm.training.evaluation import TrainedModel
from dlrm.training.modes import hash_ahead
from dlrm.training.predictor import (
    Predictor,
    on_host,
    require_new_names,
    rows_at_once,
)
from dlrm.training.score_file import LABEL, PROBABILITY, ROW, write_batches
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import is_out_of_memory, pick_device


def write_scores(options: Namespace) -> None:
    """Write the predictions.

    Raises:
        ValueError: something does not fit, or takes too much memory.
    """
    processes = World.from_environment().size
    if processes > 1:  # each would write the file
        raise ValueError(
            f"dlrm predict runs in one process, but there are {processes}: start it without "
            "torchrun"
        )

    rows, output = options.rows, options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    prepared = (rows / META_FILE).is_file()
    try:
        batches = _prepared_scores(options) if prepared else _raw_scores(options)
        began = time.perf_counter()
        with atomic_write(output) as temporary:
            count = write_batches(batches, temporary, output.suffix, output)
            if not count:
                raise ValueError(f"{rows} has no rows to score")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError("out of memory: give a smaller --batch-size") from error

    rate = count / (time.perf_counter() - began)
    print(f"{count:,} predictions in {output}, {rate:,.0f} rows/s")


def _raw_scores(options: Namespace) -> Iterator[pa.RecordBatch]:
    """Scores of raw rows, in batches."""
    if options.split:
        raise ValueError(f"{options.rows} has no splits, as it is not prepared: leave out --split")
    predictor = Predictor.load(options.checkpoint, device=_device(options), last=options.last)
    inputs = find_files([options.rows])
    if options.output.resolve() in {path.resolve() for path in inputs}:
        raise ValueError(f"{options.output} is also to be scored: name another file to write")
    return predictor.score(
        inputs,
        keep=options.keep,
        skip_bad=options.bad_rows == "skip",
        batch_size=options.batch_size or rows_at_once(predictor.model, predictor.device),
    )


def _device(options: Namespace) -> torch.device:
    device = pick_device(options.device)
    hash_ahead(device)  # while the model is loaded
    return device


def _prepared_scores(options: Namespace) -> Iterator[pa.RecordBatch]:
    """Scores of a split of a prepared directory, in batches."""
    # Load the model, and open the rows.
    split = options.split or "test"
    device = _device(options)
    trained = TrainedModel.load(
        options.checkpoint,
        options.rows,
        split,
        device=device,
        batch_size=options.batch_size or partial(rows_at_once, device=device),
        allow_outside=options.allow_outside,
        last=options.last,
    )

    # Find the columns to copy.
    meta = trained.loader.meta
    files = [options.rows / name for name in meta.splits[split].files]
    columns = meta.options.get("columns", {})
    tables = meta.options.get("made_by") == MADE_BY
    passed = [name for name, column in columns.items() if tables and column["kind"] == "pass"]
    names = list(dict.fromkeys([*passed, *options.keep]))

    for path in files:
        there = pq.read_schema(path).names
        if missing := [name for name in names if name not in there]:
            raise ValueError(f"{path} has no column {missing[0]!r} to keep: leave it out")
    require_new_names(names)

    # The loader and the reader of these columns go through the rows in step.
    size = trained.loader.batch_size
    kept = in_batches(_read(files, names, size), size)
    return _scores(trained, names, kept)


def _scores(
    trained: TrainedModel, names: Sequence[str], kept: Iterator[tuple[pa.Table, ...]]
) -> Iterator[pa.RecordBatch]:
    """Scores of all batches, each with its rows of ``kept``, the columns ``names``."""
    done = 0
    for batch in trained.loader:
        outputs = metrics.predict(trained.model, [batch], bf16=trained.bf16)
        probability, labels = on_host(*outputs[:2])
        copied = next(kept)[0] if names else {}
        rows = np.arange(done + 1, done + 1 + len(labels))
        columns = {ROW: pa.array(rows)} | {name: copied[name].combine_chunks() for name in names}
        columns |= {PROBABILITY: pa.array(probability), LABEL: pa.array(labels)}
        yield pa.RecordBatch.from_pydict(columns)
        done += len(labels)


def _read(
    files: Sequence[Path], names: Sequence[str], size: int
) -> Iterator[tuple[pa.RecordBatch]]:
    for path in files:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(size, columns=list(names)):
                yield (batch,)
