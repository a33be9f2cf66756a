"""Fine-tuning compared: kinds trained from scratch, and a trained model compressed and trained on.

    python scripts/prepare_criteo.py sample.tsv.gz --output data/sample --split 0.75 0.1 0.15 \\
        --min-count 2
    for seed in 1 2 3; do
        train="python train.py --config configs/criteo_sample.yaml --seed $seed"
        $train --emb dense --name dense_$seed
        $train --emb hash --budget 10x
        $train --emb hash --budget 10x --init_from runs/dense_$seed
    done
    python scripts/experiments/fine_tuning.py runs/* --output benchmarks/fine_tuning_sample.json

Runs are distinguished by their options. A kind counts if it has both runs of a seed.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from dlrm.training.tracking import read_result
from dlrm.utils.program import Parser, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness

ROUNDED = 5  # digits of an AUC


def compare(directories: list[Path]) -> list[dict[str, Any]]:
    """Test AUC of each kind and seed, and what fine-tuning misses of the better alternative.

    Raises:
        ValueError: no kind has a run from scratch and one that was fine-tuned.
    """
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for directory in directories:
        result = read_result(directory)
        options, metrics = result["options"], result["metrics"]
        seeds = found.setdefault((options["emb"], options["budget"] or ""), {})
        own = seeds.setdefault(options["seed"], {})
        if options["init_from"]:
            own |= {"fine_tuned": metrics["test/auc"], "fitted": metrics["fitted/auc"]}
        else:
            own["scratch"] = metrics["test/auc"]

    rows = []
    for (emb, budget), seeds in found.items():
        whole = {seed: own for seed, own in sorted(seeds.items()) if len(own) == 3}
        if whole:
            gained = [
                own["fine_tuned"] - max(own["fitted"], own["scratch"]) for own in whole.values()
            ]

            row: dict[str, Any] = {"emb": emb, "budget": budget or None, "seeds": list(whole)}
            for name in ("scratch", "fitted", "fine_tuned"):
                row[name] = [round(own[name], ROUNDED) for own in whole.values()]
            rows.append(row | {"gained": round(statistics.fmean(gained), ROUNDED)})

    if not rows:
        raise ValueError("no kind has a run from scratch and a fine-tuned one of the same seed")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=path_arg, help="run directories")
    parser.add_argument("--output", type=path_arg, help="where the JSON goes")
    options = parser.parse_args(argv)

    def work() -> None:
        rows = compare(options.runs)
        for row in rows:
            print(*(f"{name} {value}" for name, value in row.items()), sep=", ")
        if options.output:
            harness.write(options.output, {"metric": "test AUC", "results": rows})

    return exit_status(work, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
