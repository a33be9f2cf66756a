"""Write the predictions of a trained model: ``python scripts/predict.py CHECKPOINT DATA OUTPUT``.

The output is a Parquet file with the columns ``probability`` and ``label``, in row order.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import sys
from argparse import Namespace

import pyarrow as pa
from pyarrow import parquet

from dlrm.distributed.world import World
from dlrm.training import metrics
from dlrm.training.evaluation import TrainedModel
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import pick_device
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="run directory, or one of its checkpoints/")
    parser.add_argument("data", help="prepared directory with meta.json")
    parser.add_argument("output", type=path_arg, help="Parquet file to write")
    parser.add_argument("--split", default="test", help="split to predict")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=count_arg, default=16384, help="samples per batch")
    parser.add_argument(
        "--allow-outside",
        action="store_true",
        help="read the files that meta.json lists outside of its directory too (default: no)",
    )
    return parser


def predict(options: Namespace) -> None:
    """Write the predictions for one split."""
    processes = World.from_environment().size
    if processes > 1:  # each would write the file
        raise ValueError(
            f"predict.py runs in one process, but there are {processes}: start it without torchrun"
        )
    output = options.output
    if output.is_dir():
        raise ValueError(f"{output} is a directory; name the Parquet file to write")
    trained = TrainedModel.load(
        options.checkpoint,
        options.data,
        options.split,
        device=pick_device(options.device),
        batch_size=options.batch_size,
        allow_outside=options.allow_outside,
    )
    schema = pa.schema({"probability": pa.float32(), "label": pa.float32()})
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(output) as temporary,
        parquet.ParquetWriter(temporary, schema, write_page_checksum=True) as writer,
    ):
        for batch in trained.loader:
            logits, labels, *_ = trained.predict(batch)
            metrics.require_finite_logits(logits)
            probabilities = metrics.sigmoid(logits).float().cpu().numpy()
            columns = [probabilities, labels.cpu().numpy()]
            writer.write_table(pa.table(columns, schema=schema))
    print(f"{trained.loader.rows:,} predictions in {output}")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: predict(options), "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
