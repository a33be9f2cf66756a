"""Samples per second of MLPerf's DLRM-DCNv2 on one GPU, multi-hot batches already on it.

    python scripts/benchmarks/run.py mlperf --output benchmarks/speedrun/mlperf_h200.json
    python scripts/benchmarks/run.py mlperf --profile --batches 6912 65536

The model and the optimizers are those of configs/mlperf_dcnv2.yaml. Ids are log-uniform; bags have
MLPerf's fixed sizes or, as ``ragged``, lengths from 0 to twice that. First, losses of captured and
of eager steps are compared on small tables; a difference is an error, not a result. 6,912 is the
share of one of 8 GPUs in the fastest submission with H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import torch
import yaml

from dlrm.config.build import optimizer_specs
from dlrm.config.schema import OptimConfig
from dlrm.data.batch import Batch
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import (
    SHAPES,
    draw_bags,
    losses,
    step_milliseconds,
    worst_difference,
)

SMALL = "--batches 4 --max-rows 50 --bags ragged --check-rows 50 --mode eager"
SHAPE = SHAPES["mlperf"]
CONFIG = harness.ROOT / "configs" / "mlperf_dcnv2.yaml"
INPUTS = 8  # different batches in rotation
CAPTURES = 3  # of a step
TOLERANCE = 1e-2  # of a loss in bf16
CHECKED_STEPS = 10
GFLOP = 0.096  # of the matrix products of a sample, forward and backward
KERNELS = 25  # of a profile


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--batches", nargs="+", type=count_arg, default=[6912, 16384, 65536])
    add("--bags", nargs="+", choices=["fixed", "ragged"], default=["fixed"])
    add("--max-rows", type=count_arg, help="cap the rows of a table")
    add("--check-rows", type=count_arg, default=50_000, help="the same, where losses are compared")
    add("--mode", default="auto", help="see dlrm.training.step")
    add("--profile", action="store_true", help="print the kernels of a step")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every case on one model."""
    device = options.device
    size = min(1024, *options.batches)
    errors = {bags: check(options, size, bags) for bags in options.bags}
    rows = SHAPE.capped(options.max_rows)
    config = yaml.safe_load(CONFIG.read_text())
    record.note(model="DLRM-DCNv2, multi-hot", rows=sum(rows), config=config)

    step = make_step(rows, device, options.mode)
    for size, bags in product(options.batches, options.bags):
        batches = draw(rows, size, device, bags, INPUTS)
        counts = {"warm_up": 1, "steps": 3} if device == "cpu" else {"warm_up": 15, "steps": 40}
        timed = step_milliseconds(step, batches, device, CAPTURES, **counts)
        row = {"batch": size, "bags": bags, **timed, "Msamples/s": size / timed["ms"] / 1e3}
        row |= {"TFLOP/s": GFLOP * size / timed["ms"], "loss_error": errors[bags]}
        record.add(row)

        if options.profile:
            run = lambda i, drawn=batches: step(drawn[i % INPUTS])  # noqa: E731
            found = harness.kernel_milliseconds(run, steps=5)
            print(f"{found['kernel_ms']:9.4f} ms a step in {found['launches']} launches")
            for name, spent in list(found["kernels"].items())[:KERNELS]:
                print(f"{spent:9.4f} ms {name[:110]}", flush=True)

        del batches
        step.graphs.close()
        harness.release()


def check(options: argparse.Namespace, size: int, bags: str) -> float:
    """The largest difference between losses of captured and of eager steps on small tables.

    Raises:
        ValueError: it is larger than rounding explains.
    """
    rows, device = SHAPE.capped(options.check_rows), options.device
    batches = draw(rows, size, device, bags, CHECKED_STEPS)
    found = []
    for mode in ("eager", options.mode):
        step = make_step(rows, device, mode)
        found.append(losses(step, batches))
        del step
        harness.release()
    worst = worst_difference(*found)
    harness.require(worst <= TOLERANCE, f"captured losses differ from eager ones by {worst}")
    return worst


def make_step(rows: Sequence[int], device: str, mode: str) -> TrainStep:
    """A step on a new model, with the optimizers of the configuration."""
    config = yaml.safe_load(CONFIG.read_text())
    torch.manual_seed(0)
    with torch.device(device):
        model = DLRM(13, rows, SHAPE.dim, [("dense", {})] * len(rows), **SHAPE.options)
    parts = model.dense_parameters(), model.sparse_arch.parameters()
    specs = optimizer_specs(OptimConfig(**config["optim"]))
    optimizers = [
        RowOptimizer(part, rule, lr=lr, **options)
        for part, (rule, lr, options) in zip(parts, specs, strict=True)
    ]
    return TrainStep(model, optimizers, precision=config["precision"], mode=mode)


def draw(rows: Sequence[int], size: int, device: str, bags: str, count: int) -> list[Batch]:
    """Random batches with bags of MLPerf's sizes, or of ragged lengths with these means."""
    assert SHAPE.bag_sizes is not None
    ragged = bags == "ragged"
    return [draw_bags(rows, SHAPE.bag_sizes, size, device, ragged=ragged) for _ in range(count)]
