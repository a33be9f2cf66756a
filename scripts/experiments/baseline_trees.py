"""Gradient-boosted trees on the same data, as a baseline for DLRM.

    python scripts/experiments/baseline_trees.py --data data/sample

Each id is replaced by two features: how often it occurs in the training rows, and the share of
positives among them. The share is smoothed, and computed out of fold, so that no row sees its own
label.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

from dlrm.data.schema import Meta
from dlrm.training.metrics import classification
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import require_rows

FOLDS = 5
PRIOR = 20.0  # number of pseudo-rows with the average share of positives


def read(directory: Path, meta: Meta, split: str) -> pd.DataFrame:
    """All rows of a split."""
    return pd.concat(
        [
            pd.read_parquet(directory / file, page_checksum_verification=True)
            for file in meta.splits[split].files
        ]
    )


def positive_shares(
    ids: pd.Series, train_ids: pd.Series, train_labels: pd.Series, base: float
) -> np.ndarray:
    """The smoothed share of positives among the training rows of each id.

    Args:
        ids: the ids to encode.
        train_ids, train_labels: the training rows.
        base: the overall share, which unknown ids get.
    """
    sums = train_labels.groupby(train_ids).agg(["sum", "count"])
    rate = (sums["sum"] + PRIOR * base) / (sums["count"] + PRIOR)
    return ids.map(rate).fillna(base).to_numpy()


def features(
    meta: Meta, train: pd.DataFrame, test: pd.DataFrame, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Feature matrices of training and test rows."""
    labels = train[meta.label].astype(np.float64).reset_index(drop=True)
    base = labels.mean()
    folds = pd.Series(np.random.default_rng(seed).integers(0, FOLDS, len(train)))
    train_columns = [train[name].to_numpy() for name in meta.dense]
    test_columns = [test[name].to_numpy() for name in meta.dense]
    for column in meta.categorical:
        ids, test_ids = train[column.name].reset_index(drop=True), test[column.name]
        counts = ids.value_counts()
        out_of_fold = np.empty(len(train))
        for fold in range(FOLDS):
            inside = folds == fold
            out_of_fold[inside] = positive_shares(ids[inside], ids[~inside], labels[~inside], base)
        train_columns += [ids.map(counts).to_numpy(), out_of_fold]
        test_columns.append(test_ids.map(counts).fillna(0).to_numpy())
        test_columns.append(positive_shares(test_ids, ids, labels, base))
    return np.column_stack(train_columns), np.column_stack(test_columns)


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=path_arg, required=True, help="prepared directory")
    add("--seeds", type=count_arg, default=3, help="number of seeds")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


def boost(options: Namespace) -> None:
    """Train one model per seed, and print the test metrics."""
    meta = Meta.read(options.data)
    for split in ("train", "test"):
        require_rows(options.data, meta, split)
    if meta.multi_hot:
        raise ValueError(f"{options.data} has lists of ids; trees take one id per row and column")

    train, test = (read(options.data, meta, split) for split in ("train", "test"))
    if {*train[meta.label]} != {0, 1}:
        raise ValueError(
            f"{options.data}: the labels of the train rows must be 0 and 1, and both must occur"
        )

    results = []
    for seed in range(options.seeds):
        inputs, test_inputs = features(meta, train, test, seed)
        model = HistGradientBoostingClassifier(
            max_iter=300, learning_rate=0.05, min_samples_leaf=100, random_state=seed
        )
        model.fit(inputs, train[meta.label])
        logits = model.decision_function(test_inputs)
        labels = test[meta.label].to_numpy(np.float64, copy=True)
        results.append({"seed": seed, **classification(logits, labels)})

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
