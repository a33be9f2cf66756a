"""Samples per second of whole training steps on one GPU, batches already there.

The Kaggle model with its 26 tables at full size; ids with log-uniform skew, as in the figures of
the peers. A mode whose losses differ from the eager ones is an error, not a result.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from dlrm import measure
from dlrm.data.batch import Batch
from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.sparse_arch import plan
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.step import TrainStep

DIM = 16
NAMES = [f"C{i}" for i in range(1, 27)]
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 1e-2}
# Millions of samples per second of the fastest peer on the same kind of GPU: TorchRec 1.6.
PEER = {2048: 0.52, 16384: 3.55, 65536: 6.00}


def make_batches(size: int, count: int, skewed: bool) -> list[Batch]:
    """Random batches on the GPU."""
    rows = torch.tensor(KAGGLE_CARDINALITIES, device="cuda", dtype=torch.float64)[:, None]
    batches = []
    for _ in range(count):
        uniform = torch.rand(len(rows), size, device="cuda", dtype=torch.float64)
        ids = (rows**uniform - 1 if skewed else rows * uniform).floor().minimum(rows - 1)
        labels = (torch.rand(size, device="cuda") < 0.256).float()
        batches.append(Batch(torch.randn(13, size, device="cuda"), ids.int(), labels))
    return batches


def make_step(kind: str, rule: str, precision: str, mode: str) -> tuple[DLRM, TrainStep]:
    """The Kaggle model, with the 7 largest tables at rank 32 if of kind tt."""
    torch.manual_seed(0)
    options = {"hash": {"rows": 200_000}, "qr": {"collisions": 100}, "block": {"dim": 4}}
    table_plan = plan(
        NAMES, KAGGLE_CARDINALITIES, DIM, kind, largest=7, options={kind: options.get(kind, {})}
    )
    with torch.device("cuda"):
        model = DLRM(13, KAGGLE_CARDINALITIES, DIM, table_plan)
    optimizers = [
        RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
        RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.01),
    ]
    return model, TrainStep(model, optimizers, precision=precision, mode=mode)


def losses(kind: str, rule: str, precision: str, mode: str, batches: list[Batch]) -> list[float]:
    """The losses of the first steps of a fresh model."""
    _, step = make_step(kind, rule, precision, mode)
    return [step(batch)["loss"].item() for batch in batches]


def measure_one(
    kind: str, rule: str, precision: str, mode: str, size: int, skewed: bool
) -> dict[str, Any]:
    """Check a configuration against eager steps, then time it."""
    batches = make_batches(size, 8, skewed)
    if mode != "eager":
        expected = losses(kind, rule, precision, "eager", batches)
        release()
        found = losses(kind, rule, precision, mode, batches)
        release()
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        if not worst <= TOLERANCE[precision]:
            raise ValueError(f"{kind} {rule} {precision} {mode} {size}: losses differ by {worst}")
    torch.cuda.reset_peak_memory_stats()
    model, step = make_step(kind, rule, precision, mode)
    ms = measure.gpu_milliseconds(lambda i: step(batches[i % 8]), warm_up=20, steps=60)
    footprint = sum(sum(parts.values()) for parts in model.sparse_arch.footprint())
    return {
        "kind": kind,
        "rule": rule,
        "precision": precision,
        "mode": mode,
        "batch": size,
        "ids": "skewed" if skewed else "uniform",
        "ms": round(ms, 4),
        "Msamples/s": round(size / ms / 1e3, 3),
        "times best peer": round(size / ms / 1e3 / PEER[size], 2),
        "embedding_MB": round(footprint / 1e6, 2),
        "peak_gpu_MB": round(torch.cuda.max_memory_allocated() / 1e6, 1),
    }


def release() -> None:
    """Give the memory of dropped models and graphs back."""
    gc.collect()
    torch.cuda.empty_cache()


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, str, int, bool]]:
    """All combinations that were asked for."""
    return itertools.product(
        options.kinds, options.rules, options.precisions, options.modes, options.batches,
        [name == "skewed" for name in options.ids],
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure every case; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["dense", "tt"])
    parser.add_argument("--rules", nargs="+", default=["sgd", "rowwise_adagrad"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "tf32", "bf16"])
    parser.add_argument("--modes", nargs="+", default=["graph"])
    parser.add_argument("--batches", nargs="+", type=int, default=[2048, 16384, 65536])
    parser.add_argument("--ids", nargs="+", default=["skewed"], choices=["skewed", "uniform"])
    parser.add_argument("--output", default="benchmarks/step.json")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    results = []
    for case in cases(options):
        results.append(measure_one(*case))
        release()
        print(results[-1], flush=True)
        measure.write(options.output, {"results": results})
    print(pd.DataFrame(results).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
