"""Helpers that tests of several rooms share."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm.data import synthetic
from dlrm.data.batch import Batch
from dlrm.data.loader import BatchLoader
from dlrm.data.prepare.columns import ColumnPlan
from dlrm.data.prepare.files import RawFile
from dlrm.data.prepare.table import open_and_plan, prepare_table
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, SPLITS, Categorical, Meta, Split
from dlrm.data.shuffle import Shard
from dlrm.distributed.world import World
from dlrm.kernels.update.rules import RULES, make_rule
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training import run_directory
from dlrm.training.checkpoint import Parts
from dlrm.training.checkpoint.choice import best_of
from dlrm.training.checkpoint.manifest import RunState
from dlrm.training.checkpoint.writer import CheckpointWriter
from dlrm.utils.graph_recorder import GraphRecorder

GPU = torch.cuda.is_available()
SLOW = () if GPU else pytest.mark.slow
"""The mark of what takes long in Triton's interpreter."""


RULE_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{rule: (rule, {}) for rule in RULES},
    "momentum": ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    "adagrad_decay": ("adagrad", {"eps": 1e-3, "weight_decay": 0.1}),
    "rowwise_adagrad_decay": ("rowwise_adagrad", {"eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop_momentum": ("rmsprop", {"momentum": 0.5}),
    "adam_decay": ("adam", {"weight_decay": 0.1}),
    "adamw_decay": ("adamw", {"weight_decay": 0.3}),
}
"""Rules of the optimizers with options that change what they do, by name."""
VARIANTS = {name: make_rule(rule, **options) for name, (rule, options) in RULE_OPTIONS.items()}


def optimizers_of(
    model: DLRM, rule: str = "sgd", *, lr: float, **options: Any
) -> list[RowOptimizer]:
    """Optimizers of one rule for the dense part of a model and for its tables."""
    parts = model.dense_parameters(), model.sparse_arch.parameters()
    return [RowOptimizer(part, rule, lr=lr, **options) for part in parts]


def train_product(cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of a tensor train of cores ``[p, r, q, r]`` by its definition, ``[prod(p), D]``."""
    rows = cores[0].new_ones(1, 1, 1)
    for core in cores:
        rows = torch.einsum("vqr,prcs->vpqcs", rows, core).flatten(0, 1).flatten(1, 2)
    return rows[..., 0]


def first(name: str, values: Sequence[Any], slow: Any = SLOW) -> pytest.MarkDecorator:
    """Parametrize a test over values: the first is in the fast suite, the others are ``slow``."""
    rest = [pytest.param(value, marks=slow) for value in values[1:]]
    return pytest.mark.parametrize(name, [values[0], *rest])


def combinations(slow: Any = SLOW, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of the values of its arguments.

    Those of the fast suite have each value at least once; the others have the mark ``slow``.
    """
    rows = max(map(len, axes.values()))
    fast = {tuple(row % len(values) for values in axes.values()) for row in range(rows)}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        values = [axis[place] for axis, place in zip(axes.values(), places, strict=True)]
        cases.append(pytest.param(*values, marks=() if places in fast else slow))
    return pytest.mark.parametrize(tuple(axes), cases)


def captured(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Run a function on a GPU, then record it: its replay, and what it returned."""
    recorder = GraphRecorder(torch.device("cuda", torch.cuda.current_device()))
    recorder.warm_up(run)
    return recorder.record(run)


def write_checkpoint(
    run: Path,
    parts: Parts,
    state: RunState,
    *,
    by: str = "0" * 32,
    best: bool = False,
    keep: int = 2,
) -> None:
    """Write a checkpoint ``step_N`` of the run ``by``, and wait until it is on disk."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(run, by, World(), keep)
    writer.best = best_name(run)
    try:
        writer.save(parts, state, best=best)
        writer.wait()
    finally:
        writer.close()


def best_name(run: Path) -> str | None:
    """The name of the best checkpoint of a run; None without one."""
    return next((best.name for best in best_of(run_directory.checkpoints(run))), None)


def latest_step(run: Path) -> int | None:
    """The step of the latest checkpoint of a run; None without one."""
    return next(iter(run_directory.checkpoints(run).values()), None)


ALL_TRAIN = {"split": {"train": 1, "val": 0, "test": 0}}
"""Options of a preparation in which all rows are training rows."""


def write_rows(path: Path, columns: Mapping[str, Sequence[Any]], delimiter: str = ",") -> Path:
    """Write columns to a file of raw rows: Parquet, JSON lines or CSV, by its name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(columns)), path)
        return path
    with path.open("w", newline="") as file:
        rows = zip(*columns.values(), strict=True)
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
        else:
            csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(
                [[*columns], *rows]
            )
    return path


def write_split(
    directory: Path,
    columns: Mapping[str, Any],
    tables: Sequence[Categorical],
    *,
    files: int = 1,
    group: int = 64,
    split: str = "train",
    dense: Sequence[str] = (),
    **described: Any,
) -> Meta:
    """Write columns as the rows of a split, in several files, and ``meta.json``."""
    table = pa.table(dict(columns))
    cuts = np.linspace(0, table.num_rows, files + 1).astype(int)
    names = [f"{split}_{file}.parquet" for file in range(files)]
    for name, (start, stop) in zip(names, itertools.pairwise(cuts), strict=True):
        rows = table.slice(start, stop - start)
        pq.write_table(rows, directory / name, row_group_size=group, write_page_checksum=True)
    splits = {split: Split(files=tuple(names), rows=table.num_rows, positives=0)}
    meta = Meta(dense=tuple(dense), categorical=tuple(tables), splits=splits, **described)
    meta.write(directory)
    return meta


def open_loader(directory: Path, split: str = "train", **options: Any) -> BatchLoader:
    """Open a loader, with the rank and the number of ranks next to all other options."""
    shard = Shard(**{name: options.pop(name) for name in ("rank", "world_size") if name in options})
    return BatchLoader(directory, split, shard=shard, **options)


def same_batches(left: Sequence[Batch], right: Sequence[Batch]) -> bool:
    """Whether two runs of batches are equal bit by bit."""
    tensors = [
        ([each.cpu() for each in one.tensors], [each.cpu() for each in other.tensors])
        for one, other in zip(left, right, strict=True)
        if (one.bounds, one.bag_sizes) == (other.bounds, other.bag_sizes)
    ]
    return len(tensors) == len(left) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for one, other in tensors
        for a, b in zip(one, other, strict=True)
    )


def plan_rows(rows: Any, /, **options: Any) -> tuple[list[RawFile], ColumnPlan]:
    """Open one or several files of raw rows, and find what their columns are."""
    return open_and_plan(rows if isinstance(rows, list) else [rows], options)


def prepare_rows(
    rows: Any, output: Path, options: Mapping[str, Any] | None = None, **given: Any
) -> tuple[Meta, ColumnPlan]:
    """Prepare raw rows as ``prepare_table.py`` does; returns the description and the columns."""
    skip_bad = given.get("bad_rows", "stop") != "stop"
    inputs = rows if isinstance(rows, list) else [rows]
    files, plan = open_and_plan(inputs, options or {}, skip_bad=skip_bad)
    return prepare_table(files, plan, output, progress=False, **given), plan


def read_split(directory: Path, split: str) -> pd.DataFrame:
    """The rows of a split of any number of files."""
    files = Meta.read(directory).splits[split].files
    return pd.concat([pd.read_parquet(directory / file) for file in files])


def read_values(directory: Path, column: str) -> list[str | None]:
    """The value of each id of a column of a prepared directory."""
    values = pq.read_table(directory / Meta.vocabulary_file(column))["value"].to_pylist()
    return list(values)


def read_splits(directory: Path) -> dict[str, pa.Table]:
    """The rows of a prepared directory."""
    return {split: pq.read_table(directory / f"{split}.parquet") for split in SPLITS}


def contents(directory: Path) -> dict[str, str]:
    """The digests of all files at or below a path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (directory, *directory.rglob("*"))
        if path.is_file()
    }


def corrupt(path: Path, at: int = -5) -> None:
    """Change a byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def criteo_rows(count: int, seed: int = 0) -> list[list[str]]:
    """Rows of fields in Criteo's format: skewed, with missing and negative values."""
    return [list(row) for row in _criteo_rows(count, seed)]


@cache
def _criteo_rows(count: int, seed: int) -> list[list[str]]:
    rng = random.Random(seed)

    def category(column: int) -> str:
        if rng.random() < 0.1:
            return ""
        value = int(rng.paretovariate(0.7)) % 10 ** (1 + column % 5)
        return f"{value * 0x9E3779B1 % 2**32:08x}"

    def number() -> str:
        return "" if rng.random() < 0.2 else str(int(rng.paretovariate(0.5)) - 4)

    return [
        [str(int(rng.random() < 0.3)), *(number() for _ in range(13)), *map(category, range(26))]
        for _ in range(count)
    ]


def read_criteo(path: Path) -> pd.DataFrame:
    """The rows of a raw log of Criteo; a missing number is NaN, a missing value empty."""
    names = {"label": int, **dict.fromkeys(CRITEO_DENSE, float)}
    names |= dict.fromkeys(CRITEO_CATEGORICAL, str)
    empty = {name: [""] for name in CRITEO_DENSE}
    form: dict[str, Any] = {"keep_default_na": False, "na_values": empty}
    return pd.read_csv(path, sep="\t", header=None, names=list(names), dtype=names, **form)


def write_criteo(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Write rows of fields as a raw log of Criteo."""
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def write_synthetic(directory: Path, rows: int) -> Path:
    """Write synthetic data of Criteo's shape, with some larger tables."""
    cardinalities = [3000 if column % 5 == 0 else 20 + column for column in range(26)]
    given: dict[str, Any] = {"cardinalities": cardinalities, "fractions": [0.8, 0.1, 0.1]}
    synthetic.write(directory, rows=rows, device="cpu", **given)
    return directory


def log_lines(run: Path) -> list[dict[str, Any]]:
    """The logged lines of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The logged losses of a run by step, each of which is logged once."""
    logged = [(x["step"], x["train/loss"]) for x in log_lines(run) if "train/loss" in x]
    assert len(dict(logged)) == len(logged), "a step is logged twice"
    return dict(logged)


def metrics_of(run: Path) -> dict[str, Any]:
    """The final metrics of a run."""
    return dict(json.loads((run / "result.json").read_text())["metrics"])


def wait_for(path: Path, text: str, process: Any) -> None:
    """Wait until a file contains a text; the process that writes it must not end before."""
    until = time.monotonic() + 120
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, f"it ended before {path} had {text}"
        assert time.monotonic() < until
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
