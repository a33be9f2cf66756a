"""Write a trained model's scores: ``python scripts/predict.py CHECKPOINT DATA OUT.parquet``."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from dlrm import checkpoint, metrics
from dlrm.data.criteo import CriteoLoader
from dlrm.distributed import pick_device
from dlrm.files import whole
from dlrm.hints import Parser, count


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="run directory, or one of its checkpoints/")
    parser.add_argument("data", help="prepared directory with meta.json")
    parser.add_argument("output", help="Parquet file to write: probability and label, in row order")
    parser.add_argument("--split", default="test", help="which split to score")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch-size", type=count, default=16384, help="samples per batch")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Score the split; returns the exit status."""
    options = arguments().parse_args(argv)
    output = Path(options.output)
    try:
        device = pick_device(options.device)
        model, config = checkpoint.load_model(options.checkpoint, device)
        loader = CriteoLoader(
            options.data,
            options.split,
            batch_size=options.batch_size,
            device=device,
            num_embeddings=model.sparse_arch.num_embeddings,
        )
        checkpoint.note_other_tables(model, loader.meta)
        bf16 = config["precision"] == "bf16"
        schema = pa.schema({"probability": pa.float32(), "label": pa.float32()})
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole(output) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
            for batch in loader:
                logits, labels = metrics.predict(model, [batch], bf16=bf16)
                probabilities = metrics.sigmoid(logits).float().cpu().numpy()
                columns = [probabilities, labels.cpu().numpy()]
                writer.write_table(pa.table(columns, schema=schema))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"{loader.rows:,} scores in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
