"""Samples per second of whole training steps, batches already on the device.

    python scripts/benchmarks/benchmark_step.py --output benchmarks/step_h100.json
    python scripts/benchmarks/benchmark_step.py --device cpu --output benchmarks/step_cpu.json

The Kaggle model, on a GPU with its 26 tables at full size, on a CPU with tables of at most 20,000
rows; ids with log-uniform skew, as in the published figures. A mode whose losses differ from the
eager ones is an error, not a result. The model ``terabyte`` is that of MLPerf v1, its tables of at
most 10 million rows of dim 128. A step is captured five times, and the median is reported:
the driver schedules the branches of every CUDA graph anew.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch

from dlrm.data.batch import Batch
from dlrm.data.schema import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from dlrm.embeddings import available
from dlrm.embeddings.common.budget import DTYPES
from dlrm.kernels.update.rules import OPTIONS
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.table_plan import make_table_plan
from dlrm.training import benchmark
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg, exit_status

NAMES = [f"C{i}" for i in range(1, 27)]
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 1e-2}
# Milliseconds of a step of TorchRec 1.6, the fastest peer: on an H100 whichever precision is the
# faster one, on 2 CPU cores by precision.
PEER_H100 = {2048: 2048 / 520, 16384: 16384 / 3550, 65536: 65536 / 6000}
PEER_CPU = {("fp32", 2048): 68.0, ("bf16", 2048): 35.0}
CPU_CAP = 20_000  # rows of a table on a CPU
TERABYTE_CAP = 10_000_000
TERABYTE_MLPS = {"bottom_mlp": (512, 256), "top_mlp": (1024, 1024, 512, 256)}
CAPTURES = 5  # of a step


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    device: str
    terabyte: bool
    kind: str
    rule: str
    dtype: str
    precision: str
    mode: str
    batch: int
    ids: str

    @property
    def rows(self) -> list[int]:
        """Rows of the tables."""
        rows = TERABYTE_CARDINALITIES if self.terabyte else KAGGLE_CARDINALITIES
        cap = TERABYTE_CAP if self.terabyte else max(rows)
        return [min(own, CPU_CAP if self.device == "cpu" else cap) for own in rows]


def make_batches(case: Case, count: int) -> list[Batch]:
    """Random batches on the device."""
    rows, skewed = case.rows, case.ids == "skewed"
    return [
        benchmark.draw_batch(rows, case.batch, case.device, skewed=skewed) for _ in range(count)
    ]


def make_step(case: Case, mode: str) -> tuple[DLRM, TrainStep]:
    """The model, its 7 largest tables of the kind (tt at rank 32)."""
    torch.manual_seed(0)
    rows, kind, dim = case.rows, case.kind, 128 if case.terabyte else 16
    options = {"hash": {"rows": 200_000}, "qr": {"collisions": 100}, "block": {"dim": 4}}
    table_plan = make_table_plan(
        NAMES, rows, dim, kind, largest=7, options={kind: options.get(kind, {})}
    )
    mlps: dict[str, Any] = TERABYTE_MLPS if case.terabyte else {}
    with torch.device(case.device):
        model = DLRM(13, rows, dim, table_plan, tables_dtype=case.dtype, **mlps)
    optimizers = [
        RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
        RowOptimizer(model.sparse_arch.parameters(), case.rule, lr=0.01),
    ]
    return model, TrainStep(model, optimizers, precision=case.precision, mode=mode)


def losses(step: TrainStep, batches: list[Batch]) -> list[float]:
    """The losses of a step on each batch in turn."""
    return [step(batch)["loss"].item() for batch in batches]


def measure_one(case: Case) -> dict[str, Any]:
    """Check a configuration against eager steps, then time it."""
    device, precision, size = case.device, case.precision, case.batch
    batches = make_batches(case, 8)
    expected = losses(make_step(case, "eager")[1], batches)
    benchmark.release()
    on_gpu = device != "cpu"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    model, step = make_step(case, case.mode)
    found = losses(step, batches)
    worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not worst <= TOLERANCE[precision]:
        raise ValueError(f"{case}: losses differ by {worst}")
    peer, memory = PEER_CPU.get((precision, size)), {}
    if on_gpu:
        peer = None if case.terabyte else PEER_H100.get(size)
        memory = {"peak_gpu_MB": round((torch.cuda.max_memory_allocated() - held) / 1e6, 1)}
    times = []
    for _ in range(CAPTURES if on_gpu else 1):
        step.graphs.close()
        counts = {"warm_up": 20, "steps": 60} if on_gpu else {}
        times.append(benchmark.milliseconds(lambda i: step(batches[i % 8]), device, **counts))
    ms = statistics.median(times)
    footprint = sum(sum(parts.values()) for parts in model.sparse_arch.footprint())
    state = sum(o.state_bytes(model.sparse_arch.parameters()) for o in step.optimizers)
    described = {name: own for name, own in asdict(case).items() if name != "device"}
    return {
        **described,
        "ms": round(ms, 4),
        "ms_range": [round(min(times), 4), round(max(times), 4)],
        "Msamples/s": round(size / ms / 1e3, 3),
        "times best peer": round(peer / ms, 2) if peer else None,
        "loss_error": worst,
        "embedding_MB": round(footprint / 1e6, 2),
        "state_MB": round(state / 1e6, 2),
        **memory,
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All requested combinations."""
    choices = {
        "terabyte": [model == "terabyte" for model in options.models],
        "kind": options.kinds,
        "rule": options.rules,
        "dtype": options.dtypes,
        "precision": options.precisions,
        "mode": options.modes,
        "batch": options.batches,
        "ids": options.ids,
    }
    for chosen in itertools.product(*choices.values()):
        named = dict(zip(choices, chosen, strict=True))
        yield Case(device=options.device, **named)


def main(argv: list[str] | None = None) -> int:
    """Measure every case; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    kinds = sorted(available())
    parser.add_argument("--kinds", nargs="+", default=["dense", "tt"], choices=kinds)
    rules, modes = sorted(OPTIONS), ("auto", "eager", "compile", "graph")
    precisions = ("fp32", "tf32", "bf16")
    parser.add_argument("--rules", nargs="+", default=["sgd", "rowwise_adagrad"], choices=rules)
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=DTYPES, help="of tables")
    models = ("kaggle", "terabyte")
    parser.add_argument("--models", nargs="+", default=["kaggle"], choices=models)
    parser.add_argument("--precisions", nargs="+", default=precisions, choices=precisions)
    parser.add_argument("--modes", nargs="+", default=["auto"], choices=modes)
    parser.add_argument("--batches", nargs="+", type=count_arg, default=[2048, 16384, 65536])
    parser.add_argument("--ids", nargs="+", default=["skewed"], choices=["skewed", "uniform"])
    parser.add_argument("--output", default="benchmarks/step.json")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA GPU; measure the CPU with --device cpu", file=sys.stderr)
        return 2
    return exit_status(lambda: measure_all(options))


def measure_all(options: argparse.Namespace) -> None:
    """Measure every case, write after each, and print a table."""
    results = []
    for case in cases(options):
        results.append(measure_one(case))
        benchmark.release()
        print(results[-1], flush=True)
        benchmark.write(options.output, {"results": results})
    print(pd.DataFrame(results).to_string(index=False))


if __name__ == "__main__":
    sys.exit(main())
