"""Count what compressed tables really keep, in training and in serving, next to published methods.

    python scripts/experiments/true_bytes.py --json benchmarks/true_bytes.json

Papers count weights. Here pointers, codes, scales, full-precision copies and the state of row-wise
Adagrad count as well, for the tables of Kaggle at full size. The library counts
our kinds; of the others every tensor that their algorithm keeps is counted. Nothing is trained.

CCE: Tsang and Ahle, "Clustering the Sketch", NeurIPS 2023, arXiv 2210.05974; as in its published
code, two int64 pointers per id and chunk. ALPT: Li et al., "Adaptive Low-Precision Training for
Embeddings in Click-Through Rate Prediction", AAAI 2023, arXiv 2212.05735: int8 rows, a learned step
per row. MPE: Li et al., "Mixed-Precision Embeddings for Large-Scale Recommendation Models", arXiv
2409.20305: codes of 0 to 6 bits, learned on a table in fp32. As rows differ in length, an id needs
the address of its row, unless ids are renumbered by frequency.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import format_ratio, make_table_plan
from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness

DIM = 16
CHUNKS = 4  # of CCE: parts of a row, each with pointers of its own
CANDIDATES, GROUP = 7, 128  # of MPE: bit widths, and ids that share one
OURS = {
    "dense": ("fp32", "bf16", "int8", "int4"),
    "drop": ("fp32", "int8"),
    "robe": ("fp32", "int8"),
}

Bytes = dict[str, int]
"""Bytes by part."""


def cce(rows: int, ratio: float) -> tuple[Bytes, Bytes]:
    """Bytes that CCE keeps for a table in serving, and in training in addition."""
    kept = 2 * max(1, int(rows / ratio / 2))  # rows of two tables
    serving = {"weights": 4 * DIM * kept, "pointers": 2 * 8 * CHUNKS * rows}
    return serving, {"state": 4 * CHUNKS * kept}


def alpt(rows: int, ratio: float) -> tuple[Bytes, Bytes]:
    """Likewise for ALPT in 8 bits, whatever the ratio; it has a state for rows and for steps."""
    return {"weights": DIM * rows, "scales": 4 * rows}, {"state": 2 * 4 * rows}


def mpe(rows: int, ratio: float) -> tuple[Bytes, Bytes]:
    """Likewise for MPE."""
    choices = 4 * CANDIDATES * -(-rows // GROUP)
    serving = {"weights": int(rows * 4 * DIM / ratio), "pointers": 4 * rows}
    return serving, {"fp32 copy": 4 * DIM * rows, "choices": choices, "state": 4 * rows}


OTHERS = {"CCE": cce, "ALPT": alpt, "MPE": mpe}


def of_others(name: str, ratio: float) -> dict[str, Any]:
    """The bytes of a published method, tables too small to compress being dense in fp32."""
    found = {"serving": Counter[str](), "training": Counter[str]()}
    for rows in KAGGLE_CARDINALITIES:
        serving, training = OTHERS[name](rows, ratio)
        if name != "ALPT" and rows < 2 * ratio:
            serving, training = {"weights": 4 * DIM * rows}, {"state": 4 * rows}
        # Codes of MPE and their addresses come into being after training.
        found["serving"].update(serving)
        found["training"].update(training if "fp32 copy" in training else serving | training)
    return {"method": name, "ratio": None if name == "ALPT" else ratio, **found}


def of_ours(kind: str, dtype: str, ratio: float) -> dict[str, Any]:
    """The bytes of one of our kinds, as the library counts them."""
    names = [f"C{table + 1}" for table in range(len(KAGGLE_CARDINALITIES))]
    budget = None if kind == "dense" else format_ratio(ratio)
    plan = make_table_plan(names, KAGGLE_CARDINALITIES, DIM, kind, budget=budget, dtype=dtype)
    arch = SparseArch(KAGGLE_CARDINALITIES, DIM, plan, dtype=dtype)
    serving = Counter[str]()
    for table in arch.footprint():
        serving.update(table)
    parameters = list(arch.parameters())
    state = RowOptimizer(parameters, "rowwise_adagrad").state_bytes(parameters)
    return {
        "method": f"{kind} {dtype}",
        "ratio": None if kind == "dense" else ratio,
        "serving": serving,
        "training": {**serving, "state": state},
    }


def count(ratio: float) -> list[dict[str, Any]]:
    """All methods, largest in training first."""
    with torch.device("meta"):
        rows = [of_ours(kind, dtype, ratio) for kind, dtypes in OURS.items() for dtype in dtypes]
        rows += [of_others(name, ratio) for name in OTHERS]
    dense = next(row for row in rows if row["method"] == "dense fp32")
    for row in rows:
        for where in ("serving", "training"):
            total = sum(row[where].values())
            row[f"{where}_MB"] = round(total / 1e6, 1)
            row[f"{where}_smaller"] = round(sum(dense[where].values()) / total, 2)
    return sorted(rows, key=lambda row: -row["training_MB"])


def main(argv: list[str] | None = None) -> int:
    """Print the counts; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--ratio", type=positive_arg, default=100.0, help="compression of weights")
    parser.add_argument("--json", type=path_arg, help="also write the counts to this JSON file")
    options = parser.parse_args(argv)

    def run() -> None:
        rows = count(options.ratio)
        for row in rows:
            print(
                f"{row['method']:12} training {row['training_MB']:8,.1f} MB "
                f"({row['training_smaller']:6.1f}x)  serving {row['serving_MB']:8,.1f} MB "
                f"({row['serving_smaller']:6.1f}x)"
            )
        if options.json:
            harness.write(options.json, {"embedding_dim": DIM, "results": rows})

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
