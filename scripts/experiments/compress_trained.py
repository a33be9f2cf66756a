"""Compress a trained model with every kind at several sizes, and evaluate it without retraining.

    python scripts/experiments/compress_trained.py runs/dense data/kaggle --json compressed.json

The MLPs are copied, and the tables of each kind are fitted to the trained tables; the options of a
kind follow from the memory budget. If several runs (seeds) are given, the results are their means.
``train.py --init_from`` compresses a model in the same way and then trains it.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from dlrm.config.schema import RunConfig
from dlrm.embeddings import available
from dlrm.embeddings.common.budget import DTYPES
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import format_ratio
from dlrm.training.evaluation import TrainedModel
from dlrm.training.fine_tuning import compress
from dlrm.utils.device import pick_device
from dlrm.utils.messages import did_you_mean
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", help="run directories or checkpoints of trained models")
    add("data", help="prepared directory with meta.json")
    add("--kinds", nargs="+", help="embedding kinds, or auto (default: all that take a budget)")
    ratios = [4, 10, 20, 40, 100]
    add("--ratios", nargs="+", type=positive_arg, default=ratios, help="compression ratios")
    add(
        "--dtype", choices=DTYPES, help="type of the tables (default: as train.py has for the kind)"
    )
    add("--split", default="test", help="split to evaluate on")
    add("--batch-size", type=count_arg, default=16384, help="samples per batch")
    add("--seed", type=int, default=0, help="seed of random fits (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


class Compressor:
    """A trained model, which it compresses and evaluates.

    Args:
        run: run directory or checkpoint.
        options: the data, and how to evaluate.
    """

    def __init__(self, run: str, options: Namespace) -> None:
        self.trained = TrainedModel.load(
            run,
            options.data,
            options.split,
            device=pick_device(options.device),
            batch_size=options.batch_size,
        )
        self.spec = self.trained.spec
        own = self.spec.get("tables_dtype", "fp32")
        self.dtype: str | None = options.dtype or (own if own != "fp32" else None)
        self.data, self.meta = options.data, self.trained.loader.meta

    def evaluate(self, model: DLRM | None = None) -> dict[str, float]:
        """Quality and size of a model; None for the trained one."""
        model = model or self.trained.model
        values = self.trained.evaluate(model)
        sizes = model.sparse_arch.sizes()
        return {
            **{name: values[name] for name in ("auc", "log_loss", "accuracy")},
            "bytes": sizes["bytes"],
            "compression": sizes["compression"],
        }

    def compressed(self, kind: str, ratio: float) -> dict[str, float]:
        """Quality and size at ``1 / ratio`` of the bytes of dense tables.

        Raises:
            ValueError: the kind can't be that small.
        """
        given = RunConfig(emb=kind, budget=format_ratio(ratio))
        assert given.budget is not None
        dtype = self.dtype or given.tables_dtype
        data = Path(self.data), self.meta
        model = compress(self.trained.model, self.spec, data, kind, given.budget, dtype)
        return self.evaluate(model)


def compress_all(options: Namespace) -> None:
    """Print a line per kind and size."""
    kinds = options.kinds or [
        name for name, kind in available().items() if "for_budget" in vars(kind)
    ]

    torch.manual_seed(options.seed)
    if options.json:  # if it can't be written, fail now and not at the end
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)

    valid = ["auto", *available()]
    for kind in kinds:
        if kind not in valid:
            raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, valid)}")

    models = [Compressor(run, options) for run in options.runs]
    rows = [_mean("trained", None, [model.evaluate() for model in models])]
    for kind in kinds:
        for ratio in options.ratios:
            try:
                results = [model.compressed(kind, ratio) for model in models]
            except ValueError as error:
                print(f"{kind} at {format_ratio(ratio)}: {error}")
                continue
            rows.append(_mean(kind, ratio, results, rows[0]["auc"]))

    if options.json:
        report = {"data": Path(options.data).name, "split": options.split, "results": rows}
        harness.write(options.json, report)


def _mean(
    kind: str, ratio: float | None, results: list[dict[str, float]], baseline: float | None = None
) -> dict[str, Any]:
    """Average the results over seeds, and print them; ``baseline`` is the AUC to compare with."""
    row: dict[str, Any] = {"emb": kind, "budget": ratio, "seeds": len(results)}
    row |= {name: statistics.fmean(each[name] for each in results) for name in results[0]}
    if baseline is not None:
        row["auc_change"] = row["auc"] - baseline
    change = "" if baseline is None else f" ({row['auc_change']:+.4f})"
    print(
        f"{kind:8} {row['compression']:7.1f}x {row['bytes'] / 1e6:9.2f} MB  "
        f"AUC {row['auc']:.4f}{change}  log loss {row['log_loss']:.4f}",
        flush=True,
    )
    return row


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: compress_all(options))


if __name__ == "__main__":
    sys.exit(main())
