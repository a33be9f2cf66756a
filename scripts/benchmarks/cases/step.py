"""Samples per second of whole training steps, batches already on the device.

    python scripts/benchmarks/run.py step --output benchmarks/step_h200.json
    python scripts/benchmarks/run.py step --device cpu --output benchmarks/step_cpu.json

The Kaggle model: on a GPU its 26 tables at full size, on a CPU tables of at most 20,000 rows; ids
with log-uniform skew, as in the published figures. With ``--kinds auto`` the tables have
``--budget``, planned by how often ids occur in ten million such rows. The model ``terabyte`` is
that of MLPerf v1, its tables of at most 10 million rows of dim 128. Losses that differ from the
eager ones are an error, not a result. A step is captured five times, and the median is reported,
since the driver schedules the branches of every CUDA graph again.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dlrm.embeddings import available
from dlrm.embeddings.common.budget import DTYPES
from dlrm.kernels.update.rules import OPTIONS
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import AUTO, KnownIds, make_table_plan
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import (
    NAMES,
    SHAPES,
    draw_batch,
    expected_counts,
    losses,
    make_step,
    step_milliseconds,
    worst_difference,
)

SMALL = "--cap 50 --batches 32 --kinds tt --rules sgd --precisions fp32 --modes eager"
TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "bf16": 1e-2}
# Milliseconds of a step of TorchRec 1.6, the fastest peer: on an H100 whichever precision is the
# faster one, on 2 CPU cores by precision.
PEER_H100 = {2048: 2048 / 520, 16384: 16384 / 3550, 65536: 65536 / 6000}
PEER_CPU = {("fp32", 2048): 68.0, ("bf16", 2048): 35.0}
CAPS = {"kaggle": None, "terabyte": 10_000_000}  # rows of a table on a GPU
CPU_CAP = 20_000
CAPTURES = 5  # of a step
BUDGET, PLANNED = "20MB", 10**7  # of auto, and the rows by which it plans
KIND_OPTIONS = {"hash": {"rows": 200_000}, "qr": {"collisions": 100}, "block": {"dim": 4}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step."""

    model: str
    kind: str
    rule: str
    dtype: str
    precision: str
    mode: str
    batch: int
    ids: str


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--kinds", nargs="+", default=["dense", "tt"], choices=[AUTO, *sorted(available())])
    add("--budget", default=BUDGET, help="for auto")
    rules, precisions = sorted(OPTIONS), ("fp32", "tf32", "bf16")
    add("--rules", nargs="+", default=["sgd", "rowwise_adagrad"], choices=rules)
    add("--dtypes", nargs="+", default=["fp32"], choices=DTYPES, help="of tables")
    add("--models", nargs="+", default=["kaggle"], choices=CAPS)
    add("--precisions", nargs="+", default=precisions, choices=precisions)
    add("--modes", nargs="+", default=["auto"], choices=("auto", "eager", "graph"))
    add("--batches", nargs="+", type=count_arg, default=[2048, 16384, 65536])
    add("--ids", nargs="+", default=["skewed"], choices=["skewed", "uniform"])
    add("--cap", type=count_arg, help="rows of a table at most")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure all combinations."""
    choices = (
        *(options.models, options.kinds, options.rules, options.dtypes),
        *(options.precisions, options.modes, options.batches, options.ids),
    )
    names = Case.__dataclass_fields__
    for chosen in itertools.product(*choices):
        case = Case(**dict(zip(names, chosen, strict=True)))
        record.add(measure_one(case, options))
        harness.release()


def measure_one(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Check a configuration against eager steps, then time it.

    Raises:
        ValueError: the losses differ.
    """
    device, on_gpu = options.device, options.device != "cpu"
    rows = SHAPES[case.model].capped(options.cap or (CAPS[case.model] if on_gpu else CPU_CAP))
    skewed = case.ids == "skewed"
    batches = [draw_batch(rows, case.batch, device, skewed=skewed) for _ in range(8)]
    expected = losses(step_of(case, rows, device, "eager", options.budget)[1], batches)
    harness.release()

    held = torch.cuda.memory_allocated() if on_gpu else 0
    model, step = step_of(case, rows, device, case.mode, options.budget)
    worst = worst_difference(expected, losses(step, batches))
    harness.require(worst <= TOLERANCE[case.precision], f"{case}: losses differ by {worst}")

    peer, memory = PEER_CPU.get((case.precision, case.batch)), {}
    if on_gpu:
        peer = PEER_H100.get(case.batch) if case.model == "kaggle" else None
        memory = {"peak_gpu_MB": (torch.cuda.max_memory_allocated() - held) / 1e6}
    counts = {"warm_up": 20, "steps": 60} if on_gpu else {}
    timed = step_milliseconds(step, batches, device, CAPTURES, **counts)

    ms = timed["ms"]
    tables = sum(sum(parts.values()) for parts in model.sparse_arch.footprint())
    state = sum(o.state_bytes(model.sparse_arch.parameters()) for o in step.optimizers)
    return {
        **asdict(case),
        **timed,
        "Msamples/s": case.batch / ms / 1e3,
        "times best peer": round(peer / ms, 2) if peer else None,
        "loss_error": worst,
        "embedding_MB": tables / 1e6,
        "state_MB": state / 1e6,
        **memory,
    }


def step_of(
    case: Case, rows: list[int], device: str, mode: str, budget: str = BUDGET
) -> tuple[DLRM, TrainStep]:
    """The model, its 7 largest tables of the kind (tt at rank 32), and its step."""
    torch.manual_seed(0)
    shape, kinds = SHAPES[case.model], {case.kind: KIND_OPTIONS.get(case.kind, {})}
    sizes = {"budget": budget} if case.kind == AUTO else {"largest": 7}
    ids = KnownIds(counts=lambda: expected_counts(tuple(rows), PLANNED))
    plan = make_table_plan(NAMES, rows, shape.dim, case.kind, options=kinds, ids=ids, **sizes)
    with torch.device(device):
        model = DLRM(13, rows, shape.dim, plan, tables_dtype=case.dtype, **shape.options)
    return model, make_step(model, case.rule, precision=case.precision, mode=mode)
