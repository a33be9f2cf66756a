"""Write a trained model's scores: ``python scripts/predict.py CHECKPOINT DATA OUT.parquet``."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from dlrm.distributed.world import World
from dlrm.training import metrics
from dlrm.utils.atomic import atomic_write
from dlrm.utils.program import Parser, count_arg, exit_status

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other scripts
from scripts.evaluate import loaded


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="run directory, or one of its checkpoints/")
    parser.add_argument("data", help="prepared directory with meta.json")
    parser.add_argument("output", help="Parquet file to write: probability and label, in row order")
    parser.add_argument("--split", default="test", help="which split to score")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=count_arg, default=16384, help="samples per batch")
    return parser


def predict(options: Namespace) -> None:
    """Score the split."""
    processes = World.of_environment().size
    if processes > 1:  # each would write the file
        raise ValueError(
            f"predict.py is one process, here are {processes}: start it without torchrun"
        )
    output = Path(options.output)
    if output.is_dir():
        raise ValueError(f"{output} is a directory; name the Parquet file to write")
    model, loader, bf16 = loaded(options.checkpoint, options)
    schema = pa.schema({"probability": pa.float32(), "label": pa.float32()})
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for batch in loader:
            logits, labels = metrics.predict(model, [batch], bf16=bf16)
            metrics.require_outputs(logits)
            probabilities = metrics.sigmoid(logits).float().cpu().numpy()
            columns = [probabilities, labels.cpu().numpy()]
            writer.write_table(pa.table(columns, schema=schema))
    print(f"{loader.rows:,} scores in {output}")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: predict(options), "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
