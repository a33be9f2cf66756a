"""Gradient-boosted trees on the same data, as a baseline for DLRM.

    pip install lightgbm
    python scripts/experiments/baseline_trees.py --data data/sample

Each id is replaced by two features: how often it occurs, and the share of positives among these
rows, smoothed. For a training row, only earlier training rows count, so the rows must be in order
of time; for validation and test rows, all training rows. Training stops early by the log loss on
the validation rows, if there are any.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlrm.data.prepare.rates import rate_names
from dlrm.data.schema import Meta
from dlrm.training.metrics import classification
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import require_rows

PRIOR = 20.0  # number of pseudo-rows with the average share of positives
TREES = {
    "objective": "binary",
    "num_leaves": 127,
    "learning_rate": 0.1,
    "min_data_in_leaf": 100,
    "verbose": -1,
}
ROUNDS = 300
WITHOUT_VALIDATION = 100  # rounds, where none says when to stop
PATIENCE = 20  # rounds without a lower log loss on validation rows
TABLES = "tables"  # directory, beside prepared logs, of their tables and of the results of trees


def trees_file(log: Path) -> Path:
    """Where the results of boosted trees on a prepared log are."""
    return log.parent / TABLES / f"{log.name}.trees.json"


def read(directory: Path, meta: Meta, split: str) -> pd.DataFrame:
    """All rows of a split."""
    files = [directory / file for file in meta.splits[split].files]
    parts = [pd.read_parquet(file, page_checksum_verification=True) for file in files]
    return pd.concat(parts, ignore_index=True)


def encode(
    ids: NDArray[np.integer], labels: NDArray[np.float64], rows: int, later: list[NDArray]
) -> list[NDArray[np.float64]]:
    """The count of each id and its smoothed share of positives, ``[n, 2]`` of each split.

    Args:
        ids, labels: of the training rows, in order of time.
        rows: number of ids.
        later: the ids of the other splits.
    """
    base = labels.mean()

    def pair(counts: NDArray, positives: NDArray) -> NDArray[np.float64]:
        return np.column_stack([counts, (positives + PRIOR * base) / (counts + PRIOR)])

    # Rows of an id next to each other, in their order: running sums less those at its first row.
    order = np.argsort(ids, kind="stable")
    counts, positives = np.bincount(ids, minlength=rows), np.bincount(ids, labels, minlength=rows)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    sums = np.concatenate([[0.0], np.cumsum(labels[order])])
    before = np.empty((len(ids), 2))
    before[order] = np.column_stack([np.arange(len(ids)) - first, sums[:-1] - sums[first]])
    return [pair(*before.T), *(pair(counts[split], positives[split]) for split in later)]


def features(meta: Meta, splits: list[pd.DataFrame]) -> list[NDArray[np.float64]]:
    """The feature matrix of each split, the first of which is that of the training rows."""
    labels = splits[0][meta.label].to_numpy(np.float64)
    encoded_already = {name for column in meta.categorical for name in rate_names(column.name)}
    numbers = [name for name in meta.dense if name not in encoded_already]
    columns = [[rows[numbers].to_numpy(np.float64)] for rows in splits]
    for column in meta.categorical:
        ids, *later = (rows[column.name].to_numpy() for rows in splits)
        encoded = encode(ids, labels, column.cardinality, later)
        for column_parts, new in zip(columns, encoded, strict=True):
            column_parts.append(new)
    return [np.concatenate(parts, axis=1) for parts in columns]


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=path_arg, required=True, help="prepared directory")
    add("--seeds", type=count_arg, default=3, help="number of seeds")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


def boost(options: Namespace) -> None:
    """Train one model per seed, and print the metrics of validation and test rows."""
    meta = Meta.read(options.data)
    for split in ("train", "test"):
        require_rows(options.data, meta, split)
    if meta.multi_hot:
        raise ValueError(f"{options.data} has lists of ids; trees take one id per row and column")

    names = [name for name in ("train", "val", "test") if meta.has_rows(name)]
    splits = [read(options.data, meta, name) for name in names]
    labels = {
        n: rows[meta.label].to_numpy(np.float64) for n, rows in zip(names, splits, strict=True)
    }
    if {*labels["train"]} != {0, 1}:
        raise ValueError(
            f"{options.data}: the labels of the train rows must be 0 and 1, and both must occur"
        )
    try:
        import lightgbm
    except ImportError:
        raise ValueError("the package lightgbm is not installed: pip install lightgbm") from None

    # The rows, and when to stop.
    inputs = dict(zip(names, features(meta, splits), strict=True))
    train = lightgbm.Dataset(inputs["train"], labels["train"])
    held_out = [train.create_valid(inputs[n], labels[n]) for n in names if n == "val"]
    stop: list[Any] = [lightgbm.early_stopping(PATIENCE, verbose=False) for _ in held_out]
    rounds = ROUNDS if held_out else WITHOUT_VALIDATION

    results = []
    for seed in range(options.seeds):
        model = lightgbm.train(
            TREES | {"seed": seed}, train, rounds, valid_sets=held_out, callbacks=stop
        )
        result: dict[str, float] = {"seed": seed, "trees": model.current_iteration()}
        for name in names[1:]:
            logits = np.asarray(model.predict(inputs[name], raw_score=True))
            values = classification(logits, labels[name])
            prefix = "" if name == "test" else f"{name}/"
            result |= {f"{prefix}{metric}": value for metric, value in values.items()}
        results.append(result)

    table = pd.DataFrame(results).set_index("seed")
    print(pd.concat([table, table.agg(["mean", "std"])]).to_string())
    if options.json:
        harness.write(options.json, {"data": options.data.name, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: boost(options))


if __name__ == "__main__":
    sys.exit(main())
