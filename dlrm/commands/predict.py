"""Write the predictions of a trained model: ``dlrm predict RUN ROWS OUTPUT``."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dlrm.data.prepare.files import find_files
from dlrm.data.prepare.raw_rows import in_batches
from dlrm.data.prepare.table import MADE_BY
from dlrm.data.schema import META_FILE
from dlrm.distributed.world import World
from dlrm.kernels import hash_triton
from dlrm.training.evaluation import TrainedModel
from dlrm.training.predictor import (
    BATCH_SIZE,
    Predictor,
    copy_to_host,
    one_behind,
    require_new_names,
)
from dlrm.training.score_file import LABEL, PROBABILITY, ROW, SUFFIXES, ScoreFile
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import is_out_of_memory, pick_device
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

EPILOG = """\
ROWS is one of these:
  raw rows of the kind that the model's data was prepared from, with or without a label: rows of
    Criteo as text, or a table as CSV, JSON lines or Parquet; plain, gzip or zstd; a file, a
    directory of a table, or a pattern in quotes. The run holds all that they need.
  a prepared directory with meta.json, of which --split is scored. It must have been prepared with
    the ids of the model's data.

OUTPUT is Parquet or CSV, by its suffix. It has the columns row (the number of the row in all files,
from 1, without headers; rows that are left out are counted), those that are passed through (by the
preparation, or --keep), probability, and label if the rows have one. It appears when it is
complete.

Examples:
  dlrm predict runs/mine new.csv scores.csv --keep user
  dlrm predict runs/mine 'logs/*.parquet' scores.parquet
  dlrm predict runs/kaggle test.txt scores.parquet --bad-rows skip
  dlrm predict runs/kaggle data/kaggle scores.parquet --split val
"""
GPU_BATCH_SIZE = 262144


def scores_arg(text: str) -> Path:
    """The ``type`` of the output."""
    path = path_arg(text)
    if path.is_dir():
        raise ArgumentTypeError(f"is {text!r}, a directory; name the file to write")
    if path.suffix not in SUFFIXES:
        raise ArgumentTypeError(f"is {text!r}, its name must end in {' or '.join(SUFFIXES)}")
    return path


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__, epilog=EPILOG)
    add = parser.add_argument

    # The model, the rows and the file of scores.
    named = "run directory, whose best checkpoint is taken, or one of its checkpoints/"
    add("checkpoint", metavar="RUN", help=named)
    add("rows", metavar="ROWS", type=path_arg, help="raw rows, or a prepared directory")
    add("output", metavar="OUTPUT", type=scores_arg, help="file to write, .parquet or .csv")
    last = "take the latest checkpoint of the run, not the best (default: no)"
    add("--last", action="store_true", help=last)
    add("--split", help="split of a prepared directory (default: test)")

    add(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns of the rows to copy to the output, such as keys (default: those that the "
        "preparation passes through)",
    )
    add(
        "--bad-rows",
        choices=("stop", "skip"),
        default="stop",
        help="stop: end with an error at the first bad row. skip: leave bad rows out, as the "
        "preparation does; row numbers tell which are there",
    )

    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    sizes = f"{BATCH_SIZE}, on a GPU {GPU_BATCH_SIZE}"
    add("--batch-size", type=count_arg, help=f"samples per batch (default: {sizes})")
    add(
        "--allow-outside",
        action="store_true",
        help="read the files that meta.json lists outside of its directory too (default: no)",
    )
    return parser


def predict(options: Namespace) -> None:
    """Write the predictions."""
    processes = World.from_environment().size
    if processes > 1:  # each would write the file
        raise ValueError(
            f"dlrm predict runs in one process, but there are {processes}: start it without "
            "torchrun"
        )
    rows, output = options.rows, options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    prepared = (rows / META_FILE).is_file()
    batches = _prepared_scores(options) if prepared else _raw_scores(options)
    began = time.perf_counter()
    with atomic_write(output) as temporary:
        with ScoreFile(temporary, output.suffix, output) as file:
            for batch in batches:
                file.write(batch)
        if not file.rows:
            raise ValueError(f"{rows} has no rows to score")
    rate = file.rows / (time.perf_counter() - began)
    print(f"{file.rows:,} predictions in {output}, {rate:,.0f} rows/s")


def _raw_scores(options: Namespace) -> Iterator[pa.RecordBatch]:
    """Scores of raw rows, in batches."""
    if options.split:
        raise ValueError(f"{options.rows} has no splits, as it is not prepared: leave out --split")
    device, size = _device_and_batch_size(options)
    predictor = Predictor.load(options.checkpoint, device=device, last=options.last)
    inputs = find_files([options.rows])
    if options.output.resolve() in {path.resolve() for path in inputs}:
        raise ValueError(f"{options.output} is also to be scored: name another file to write")
    return predictor.score(
        inputs,
        keep=options.keep,
        skip_bad=options.bad_rows == "skip",
        batch_size=size,
    )


def _device_and_batch_size(options: Namespace) -> tuple[torch.device, int]:
    device = pick_device(options.device)
    if device.type == "cuda":
        Thread(target=hash_triton).start()  # while the model is loaded
    default = BATCH_SIZE if device.type == "cpu" else GPU_BATCH_SIZE
    return device, options.batch_size or default


def _prepared_scores(options: Namespace) -> Iterator[pa.RecordBatch]:
    """Scores of a split of a prepared directory, in batches."""
    # Load the model, and open the rows.
    split = options.split or "test"
    device, size = _device_and_batch_size(options)
    trained = TrainedModel.load(
        options.checkpoint,
        options.rows,
        split,
        device=device,
        batch_size=size,
        allow_outside=options.allow_outside,
        last=options.last,
    )

    # Find the columns to copy.
    meta = trained.loader.meta
    files = [options.rows / name for name in meta.splits[split].files]
    columns = meta.options.get("columns", {})
    tables = meta.options.get("made_by") == MADE_BY
    passed = [name for name, own in columns.items() if tables and own["kind"] == "pass"]
    names = list(dict.fromkeys([*passed, *options.keep]))
    for path in files:
        there = pq.read_schema(path).names
        if missing := [name for name in names if name not in there]:
            raise ValueError(f"{path} has no column {missing[0]!r} to keep: leave it out")
    require_new_names(names)
    kept = in_batches(_read(files, names, size), size)
    return _scores(trained, names, kept)


def _scores(
    trained: TrainedModel, names: Sequence[str], kept: Iterator[tuple[pa.Table, ...]]
) -> Iterator[pa.RecordBatch]:
    """Scores of all batches, each with its rows of ``kept``, the columns ``names``."""
    done = 0
    copies = (
        copy_to_host(logits, labels) for logits, labels, *_ in map(trained.predict, trained.loader)
    )
    for probability, labels in one_behind(copies):
        own = next(kept)[0] if names else {}
        rows = np.arange(done + 1, done + 1 + len(labels))
        columns = {ROW: pa.array(rows)} | {name: own[name].combine_chunks() for name in names}
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


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)

    def work() -> None:
        try:
            predict(options)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError("out of memory: give a smaller --batch-size") from error

    return exit_status(work, "interrupted; nothing was written")
