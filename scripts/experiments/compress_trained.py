"""Compress a trained model and measure it again: every kind, at every size, without more training.

    python scripts/experiments/compress_trained.py runs/dense data/kaggle --json compressed.json

The MLPs are taken over, and the tables of each kind are fitted to the trained ones; options follow
from the memory budget. Several runs (seeds) are averaged. ``train.py --init_from`` does the same
and trains on.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from dlrm.data.frequencies import read_frequencies
from dlrm.embeddings import available
from dlrm.model import DLRM, WEIGHT_BYTES
from dlrm.sparse_arch.table_plan import format_ratio, make_table_plan
from dlrm.training import benchmark, checkpoint, metrics
from dlrm.utils.messages import did_you_mean
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for train.py and the other scripts
from scripts.evaluate import loaded


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", help="run directories or checkpoints of trained models")
    parser.add_argument("data", help="prepared directory with meta.json")
    parser.add_argument(
        "--kinds", nargs="+", help="embedding kinds, or auto (default: all that take a budget)"
    )
    ratios = [4, 10, 20, 40, 100]
    parser.add_argument(
        "--ratios", nargs="+", type=positive_arg, default=ratios, help="of compression"
    )
    parser.add_argument("--split", default="test", help="which split to measure")
    parser.add_argument("--batch-size", type=count_arg, default=16384, help="samples per batch")
    parser.add_argument("--seed", type=int, default=0, help="of fits that draw (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--json", type=path_arg, help="where the result is written as JSON")
    return parser


class Trained:
    """A trained model, and its quality at any kind and size.

    Args:
        run: run directory or checkpoint.
        options: the data, and how it is measured: see :func:`evaluate.loaded`.
    """

    def __init__(self, run: str, options: Namespace) -> None:
        self.model, self.loader, self.bf16 = loaded(run, options)
        self.recipe = checkpoint.about(run)["recipe"]
        self.data, self.meta = options.data, self.loader.meta
        self.device = self.loader.device

    def measure(self, model: DLRM) -> dict[str, float]:
        """Quality and size of a model."""
        found = metrics.predict(model, self.loader, bf16=self.bf16)
        values = metrics.classification(*found)
        sizes = model.sparse_arch.sizes()
        return {
            **{name: values[name] for name in ("auc", "log_loss", "accuracy")},
            "bytes": sizes["bytes"],
            "compression": sizes["compression"],
        }

    def compressed(self, kind: str, ratio: float) -> dict[str, float]:
        """Quality and size at ``1 / ratio`` of the bytes of dense tables.

        Raises:
            ValueError: the kind can't be as small.
        """
        chosen = make_table_plan(
            self.meta.tables,
            self.recipe["num_embeddings"],
            self.recipe["embedding_dim"],
            kind,
            budget=format_ratio(ratio),
            counts=lambda: read_frequencies(self.data, self.meta),
            weight_bytes=WEIGHT_BYTES[self.recipe.get("tables_dtype", "fp32")],
        )
        model = DLRM(**{**self.recipe, "plan": chosen}).to(self.device)
        model.load_trained(self.model)
        return self.measure(model.eval())


def compress(options: Namespace) -> None:
    """Print a line per kind and size."""
    kinds = options.kinds or [
        name for name, kind in available().items() if "for_budget" in vars(kind)
    ]
    torch.manual_seed(options.seed)
    if options.json:  # a place that can't be had is better known before than after
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    valid = ["auto", *available()]
    for kind in kinds:
        if kind not in valid:
            raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, valid)}")
    trained = [Trained(run, options) for run in options.runs]
    rows = [_mean("trained", None, [model.measure(model.model) for model in trained])]
    for kind in kinds:
        for ratio in options.ratios:
            try:
                found = [model.compressed(kind, ratio) for model in trained]
            except ValueError as error:
                print(f"{kind} at {format_ratio(ratio)}: {error}")
                continue
            rows.append(_mean(kind, ratio, found, rows[0]["auc"]))
    if options.json:
        record = {"data": Path(options.data).name, "split": options.split, "results": rows}
        benchmark.write(options.json, record)


def _mean(
    kind: str, ratio: float | None, found: list[dict[str, float]], trained: float | None = None
) -> dict[str, Any]:
    """Average over seeds, and print."""
    row: dict[str, Any] = {"emb": kind, "budget": ratio, "seeds": len(found)}
    row |= {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    if trained is not None:
        row["auc_change"] = row["auc"] - trained
    change = "" if trained is None else f" ({row['auc_change']:+.4f})"
    print(
        f"{kind:8} {row['compression']:7.1f}x {row['bytes'] / 1e6:9.2f} MB  "
        f"AUC {row['auc']:.4f}{change}  log loss {row['log_loss']:.4f}",
        flush=True,
    )
    return row


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: compress(options))


if __name__ == "__main__":
    sys.exit(main())
