"""The worth of each part of tensor-train tables at equal bytes.

    python scripts/experiments/tt_changes.py --lr 0.03 --data data/sample \\
        --config configs/criteo_sample.yaml

Trains tables of trains alone, in fp32; with exact rows for the most frequent ids; that in bf16;
with exact rows of 8 and of 4 bits and the trains in bf16; and bf16 with a cache, of a tenth of the
rows that dense tables of the same bytes would have. ``auto`` is trained for comparison. Each run is
a run of ``train.py``; finished runs are not repeated.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from dlrm.data.schema import Meta
from dlrm.sparse_arch.table_plan import format_ratio
from dlrm.utils.program import Parser, exit_status, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import (
    INTERRUPTED,
    Runner,
    RunSpec,
    add_run_arguments,
    require_rows,
)

TRAINS, EXACT, BF16, INT8, INT4 = "trains", "exact rows", "bf16", "int8", "int4"
CACHE, AUTO = "cache", "auto"


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, help="prepared directory")
    add("--config", required=True, help="configuration of the runs: a YAML file for train.py")
    ratios = [10, 100]
    add("--ratios", nargs="+", type=positive_arg, default=ratios, help="compression ratios")
    add("--lr", type=positive_arg, required=True, help="learning rate of the embeddings")
    add_run_arguments(parser, "tt_changes")
    return parser


def options_of(variant: str, ratio: float, rows: int) -> list[str]:
    """Options of ``train.py`` for one variant.

    Args:
        variant: one of the constants above.
        ratio: compression ratio.
        rows: rows of all dense tables.
    """
    budget = f"--budget={format_ratio(ratio)}"
    if variant == AUTO:
        return ["--emb=auto", budget]
    own = {
        TRAINS: ["--tt.keep=0", "--tables.dtype=fp32"],
        EXACT: ["--tables.dtype=fp32"],
        **{dtype: [f"--tables.dtype={dtype}"] for dtype in (BF16, INT8, INT4)},
        CACHE: ["--tables.dtype=bf16", f"--tt.cache_rows={round(rows / ratio / 10)}"],
    }
    return ["--emb=tt", budget, *own[variant]]


def measure(options: Namespace) -> None:
    """Train the runs that are missing, print a line for each variant, and write the JSON file."""
    meta = Meta.read(options.data)
    require_rows(options.data, meta, "test")
    common = [f"--config={Path(options.config).resolve()}", "--checkpoint=false"]
    common += [f"--optim.embeddings_lr={options.lr}", *(f"--{each}" for each in options.options)]
    runner = Runner(options.runs, options.jobs, common)

    points: dict[tuple[str, float], list[RunSpec]] = {}
    for ratio in options.ratios:
        for variant in (TRAINS, EXACT, BF16, INT8, INT4, CACHE, AUTO):
            own = options_of(variant, ratio, sum(meta.cardinalities))
            name = f"{variant.replace(' ', '_')}-{format_ratio(ratio)}"
            points[variant, ratio] = [
                RunSpec(f"{name}-{seed}", [*own, f"--seed={seed}"]) for seed in range(options.seeds)
            ]

    impossible = runner.train([run for runs in points.values() for run in runs], options.data)
    print(*impossible, sep="\n")
    results: list[dict[str, Any]] = []
    for (variant, ratio), runs in points.items():
        found = [runner.metrics(name) for name, _ in runs if runner.finished(name)]
        if not found:
            continue
        aucs = [metrics["test/auc"] for metrics in found]

        std = statistics.stdev(aucs) if len(aucs) > 1 else None
        compression = found[0]["embeddings/compression"]
        row = {"variant": variant, "budget": ratio, "seeds": len(aucs)}
        row |= {"auc": statistics.fmean(aucs), "auc_std": std, "compression": compression}
        results.append(row)

        spread = "" if std is None else f" +- {std:.4f}"
        print(f"{variant:10} {compression:7.1f}x  test AUC {row['auc']:.4f}{spread}")

    if options.json:
        report = {"data": Path(options.data).name, "config": Path(options.config).name}
        harness.write(options.json, {**report, "lr": options.lr, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: measure(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
