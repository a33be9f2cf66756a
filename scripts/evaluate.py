"""Measure a trained model again: ``python scripts/evaluate.py CHECKPOINT DATA``."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from dlrm.data.criteo import CriteoLoader
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.training import checkpoint, metrics
from dlrm.utils.device import pick_device
from dlrm.utils.program import Parser, count_arg, exit_status


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="run directory, or one of its checkpoints/")
    parser.add_argument("data", help="prepared directory with meta.json")
    parser.add_argument("--split", default="test", help="which split to measure")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--batch-size",
        type=count_arg,
        help="samples per batch (default: as in the run's evaluations)",
    )
    return parser


def loaded(run: str, options: Namespace) -> tuple[DLRM, CriteoLoader, bool]:
    """The model, the rows to score, by default in batches as in the run, and whether in bf16.

    Args:
        run: where the model is.
        options: with ``data``, ``split``, ``batch_size`` and ``device``.
    """
    device = pick_device(options.device)
    model, config = checkpoint.load_model(run, device)
    loader = CriteoLoader(
        options.data,
        options.split,
        batch_size=options.batch_size or config["eval_batch_size"],
        device=device,
        num_embeddings=model.sparse_arch.num_embeddings,
    )
    columns = len(loader.meta.dense)
    if columns != model.num_dense:
        raise ValueError(
            f"{options.data} has {columns} dense columns, the model {model.num_dense}: name data "
            "prepared as that which it was trained on"
        )
    checkpoint.note_other_tables(model, loader.meta)
    return model, loader, config["precision"] == "bf16"


def evaluate(options: Namespace) -> None:
    """Print the metrics as JSON."""
    model, loader, bf16 = loaded(options.checkpoint, options)
    values = metrics.classification(*metrics.predict(model, loader, bf16=bf16))
    found = {"split": options.split, "rows": loader.rows, **metrics.finite(values)}
    print(json.dumps(found, indent=2))


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    if not World.of_environment().first:  # under torchrun each would print the same
        return 0
    options = arguments().parse_args(argv)
    return exit_status(lambda: evaluate(options))


if __name__ == "__main__":
    sys.exit(main())
