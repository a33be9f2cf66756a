"""Fuzzes the JSON beside the rows, ``meta.json``.

    python tests/fuzz/meta.py --count 10000

Rows that a loader accepts must be those that a plain reader finds under the same description.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import Case, Outcome, main, scratch
from trees import as_json, mutate_text, mutate_values

from dlrm.config.cli import parse
from dlrm.config.model_spec import model_spec
from dlrm.data.frequencies import IdStatistics
from dlrm.data.loader import BatchLoader
from dlrm.data.schema import Categorical, Meta, Split
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.training.profiling import out_of_memory_advice

KINDS = available()
ROWS = {"train": 40, "val": 0, "test": 9}


@cache
def prepared() -> Path:
    """A small directory of data."""
    directory = scratch()
    rng = np.random.default_rng(0)
    splits = {}
    for split, rows in ROWS.items():
        label = np.arange(rows) % 4 == 0
        ids = rng.integers(0, 5, rows)
        nulls = pa.array([None if i % 7 == 3 else i % 3 for i in range(rows)], pa.int32())
        dense = {"I1": rng.normal(size=rows), "I2": ids * 2.0}
        columns = {"label": label, **dense, "C1": ids, "C2": nulls}
        pq.write_table(pa.table(columns), directory / f"{split}.parquet")
        splits[split] = Split(files=(f"{split}.parquet",), rows=rows, positives=int(label.sum()))
    meta = Meta(
        dense=("I1", "I2"),
        categorical=(
            Categorical(name="C1", cardinality=5),
            Categorical(name="C2", cardinality=4, oov_id=3),
        ),
        splits=splits,
        options={"split": "days"},
        inputs=({"name": "day_0", "bytes": 9},),
        planted={"test": {"auc": 0.8}},
    )
    meta.write(directory)
    return directory


def plain_rows(directory: Path, raw: dict[str, Any], split: str) -> list[np.ndarray]:
    """Labels, dense columns and ids as a plain reader finds them."""
    table = pa.concat_tables(
        [pq.read_table(directory / name) for name in raw["splits"][split]["files"]]
    ).to_pandas()
    dense = [table[name].fillna(0).astype(np.float32) for name in raw["dense"]]
    ids = [table[c["name"]].fillna(c.get("oov_id")).astype(np.int64) for c in raw["categorical"]]
    label = table[raw.get("label", "label")].astype(np.float32)
    return [column.to_numpy() for column in (label, *dense, *ids)]


def judge_data(directory: Path, kind: str) -> Outcome:
    """Read a directory, and build a model for it."""
    content = (directory / "meta.json").read_bytes()
    loaders = {}
    meta = Meta.read(directory)
    for split in meta.splits:
        if split == "train" or meta.has_rows(split):
            loaders[split] = BatchLoader(directory, split, batch_size=7, readers=1)
    for split, loader in loaders.items():
        batches = list(loader)
        found = [torch.cat([batch.labels for batch in batches]).numpy()]
        found += [*torch.cat([batch.dense for batch in batches], dim=1).numpy()]
        ids = [batch.ids.reshape(len(meta.tables), -1) for batch in batches]
        found += [*torch.cat(ids, dim=1).numpy()]
        expected = plain_rows(directory, json.loads(content), split)
        if not all(map(np.array_equal, found, expected)) or len(found) != len(expected):
            return Outcome.SILENT
    given = ["--emb", kind, "--data", str(directory), "--model.embedding_dim", "4"]
    config, _ = parse([*given, "--tables.threshold", "1000", "--model.top_mlp", "4"], KINDS)
    with out_of_memory_advice(config.data, 4):
        DLRM(**model_spec(config, meta, IdStatistics(config.data, meta)))
    return Outcome.EQUAL


def described(rng: random.Random, directory: Path) -> Case:
    """``meta.json`` with other values or bytes."""
    shutil.copytree(prepared(), directory, dirs_exist_ok=True)
    (directory / "link.parquet").symlink_to(prepared() / "train.parquet")
    path = directory / "meta.json"
    what, content = _mutated(rng, json.loads(path.read_text()))
    if rng.random() < 0.1:
        raw = json.loads(path.read_text())
        elsewhere = str(prepared() / "train.parquet"), "link.parquet", "none/../link.parquet"
        raw["splits"]["train"]["files"] = [rng.choice(elsewhere)]
        what, content = "file elsewhere", as_json(raw)
    path.write_bytes(content)
    kind = rng.choice(("dense", "tt", "hash", "qr", "paged", "robe"))

    def run() -> Outcome:
        outcome = judge_data(directory, kind)
        return Outcome.SILENT if what == "file elsewhere" else outcome

    return Case(what=what, run=run, size=len(content))


def _mutated(rng: random.Random, value: Any) -> tuple[str, bytes]:
    if rng.random() < 0.7:
        what, changed = mutate_values(rng, value)
        return what, as_json(changed)
    return mutate_text(rng, json.dumps(value))


FUZZED = {"described": described}

if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    sys.exit(main(FUZZED))
