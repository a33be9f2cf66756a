"""Gradient-boosted trees on the same data: a mark beside which to see a DLRM.

    python scripts/experiments/baseline_trees.py --data data/sample

Each id is replaced by how often it occurs in training and by the share of positives among its
other training rows (smoothed, and left out fold by fold, so that no row sees its own label).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

from dlrm.data.schema import Meta
from dlrm.training import benchmark
from dlrm.training.metrics import classification
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for train.py and the other scripts
from scripts.experiments.runner import require_rows

FOLDS = 5
PRIOR = 20.0  # pseudo-observations with the average share of positives


def read(directory: Path, meta: Meta, split: str) -> pd.DataFrame:
    """All rows of a split."""
    return pd.concat([pd.read_parquet(directory / file) for file in meta.splits[split].files])


def shares(ids: pd.Series, labels: pd.Series, seen: pd.Series, base: float) -> np.ndarray:
    """Smoothed share of positives of each value of ``seen``, measured on ``ids`` and ``labels``."""
    sums = labels.groupby(ids).agg(["sum", "count"])
    rate = (sums["sum"] + PRIOR * base) / (sums["count"] + PRIOR)
    return seen.map(rate).fillna(base).to_numpy()


def features(
    meta: Meta, train: pd.DataFrame, test: pd.DataFrame, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Feature matrices of training and test rows."""
    label = train[meta.label].astype(np.float64).reset_index(drop=True)
    base = label.mean()
    fold = pd.Series(np.random.default_rng(seed).integers(0, FOLDS, len(train)))
    columns: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for name in meta.dense:
        columns[0].append(train[name].to_numpy())
        columns[1].append(test[name].to_numpy())
    for column in meta.categorical:
        ids = train[column.name].reset_index(drop=True)
        other = test[column.name]
        counts = ids.value_counts()
        columns[0].append(ids.map(counts).to_numpy())
        columns[1].append(other.map(counts).fillna(0).to_numpy())
        own = np.empty(len(train))
        for k in range(FOLDS):
            inside = fold == k
            own[inside] = shares(ids[~inside], label[~inside], ids[inside], base)
        columns[0].append(own)
        columns[1].append(shares(ids, label, other, base))
    return np.column_stack(columns[0]), np.column_stack(columns[1])


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=path_arg, required=True, help="prepared directory")
    parser.add_argument("--seeds", type=count_arg, default=3, help="of the folds and of the trees")
    parser.add_argument("--json", type=path_arg, help="where the result is written as JSON")
    return parser


def boost(options: Namespace) -> None:
    """Train with several seeds and print the test metrics."""
    meta = Meta.read(options.data)
    for split in ("train", "test"):
        require_rows(options.data, meta, split)
    if meta.multi_hot:
        raise ValueError(f"{options.data} has lists of ids; trees take one id per row and column")
    train, test = (read(options.data, meta, split) for split in ("train", "test"))
    if {*train[meta.label]} != {0, 1}:
        raise ValueError(
            f"{options.data}: labels of the train rows must be 0 and 1, some of each, for trees "
            "to tell them apart"
        )
    results = []
    for seed in range(options.seeds):
        inputs, others = features(meta, train, test, seed)
        model = HistGradientBoostingClassifier(
            max_iter=300, learning_rate=0.05, min_samples_leaf=100, random_state=seed
        )
        model.fit(inputs, train[meta.label])
        logits = model.decision_function(others)
        labels = test[meta.label].to_numpy(np.float64, copy=True)
        results.append({"seed": seed, **classification(logits, labels)})
    table = pd.DataFrame(results).set_index("seed")
    print(pd.concat([table, table.agg(["mean", "std"])]).to_string())
    if options.json:
        benchmark.write(options.json, {"data": options.data.name, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: boost(options))


if __name__ == "__main__":
    sys.exit(main())
