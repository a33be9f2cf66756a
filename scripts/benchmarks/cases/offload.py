"""Samples per second with tables in host memory, compared with the same tables on the GPU.

    python scripts/benchmarks/run.py offload --output benchmarks/offload_h100.json
    python scripts/benchmarks/run.py offload --large --output FILE
    python scripts/benchmarks/run.py offload --table --output FILE
    python scripts/benchmarks/run.py offload --variants dense dynamic 'dynamic, host' --output FILE

The Kaggle model with log-uniform ids, no batch twice; the GPU caches 10% of the rows, or 1.5%.
Losses that differ from those of dense tables are an error, not a result. ``dynamic`` has the same
tables with a row for each id that occurs, on the GPU or in host memory. With --large the Terabyte
model (dim 128: 104.5 GB of tables), which no GPU of 80 GB holds. With --table no model, but a
look-up with its update at the shape that FBGEMM publishes: one table of 24 million rows, dim 128,
and 1,048,576 look-ups from a power law of exponent 1.05; the GPU caches 10% of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.embeddings.common.context import LookupContext
from dlrm.embeddings.common.host_rows import MAX_WINDOW, HostRows
from dlrm.embeddings.offload import Offload
from dlrm.kernels.update.packed import BITS
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.sparse_arch.table_plan import make_table_plan
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import (
    NAMES,
    SHAPES,
    draw_batch,
    make_step,
    power_law,
    worst_difference,
)

SMALL = "--cap 100 --batches 16 --mode eager --precision fp32 --rules adagrad"
SMALL += " --warm-up 4 --checked 3 --span 4 --spans 2"
LINK = 53e9  # bytes a second each way between pinned host memory and an H100 (PCIe 5), as measured
TABLE_ROWS, TABLE_LOOKUPS, TABLE_SHARE = 24_000_000, 1 << 20, 0.1
WINDOWS, TABLE_WARM_UP = 12, 20  # of one table: those that are timed, and that fill the cache
TOLERANCE = 1e-3  # of a loss
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {  # kind, options, rows fetched ahead
    "dense": ("dense", {}, False),
    "offload": ("offload", {}, True),
    "offload, 1.5%": ("offload", {"cache_share": 0.015}, True),
    "offload, not ahead": ("offload", {}, False),
    "offload, no cache": ("offload", {"cache_rows": 0}, False),
    "dynamic": ("dynamic", {}, False),
    "dynamic, host": ("dynamic", {"cache_share": 0.1}, True),
}
USUAL = [name for name, (kind, *_) in VARIANTS.items() if kind != "dynamic"]


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--variants", nargs="+", choices=list(VARIANTS), default=USUAL)
    add("--rules", nargs="+", choices=RULES, default=["sgd", "adagrad"])
    add("--batches", nargs="+", type=count_arg, default=[2048, 16384, 65536])
    add("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    add("--mode", choices=["auto", "eager", "graph"], default="auto")
    add("--dtypes", nargs="+", choices=["fp32", "bf16", "int8"], default=["fp32"], help="of rows")
    add("--dim", type=count_arg, help="16, or 128 with --large")
    add("--cap", type=count_arg, default=2**31, help="rows of a table at most")
    add("--large", action="store_true", help="the Terabyte model, offloaded")
    add("--table", action="store_true", help="one table of FBGEMM's shape")
    add("--warm-up", type=count_arg, default=150, help="steps that fill the cache")
    add("--checked", type=count_arg, default=30, help="steps whose losses are compared")
    add("--span", type=count_arg, default=3 * MAX_WINDOW, help="steps that are timed together")
    add("--spans", type=count_arg, default=5, help="how often")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every variant, rule and batch size, or one table under every rule."""
    if options.table:
        for dtype, rule in itertools.product(options.dtypes, options.rules):
            record.add(measure_table(options, rule, dtype))
            harness.release()
        return

    rows = SHAPES["terabyte" if options.large else "kaggle"].capped(options.cap)
    variants = [name for name in options.variants if not (options.large and name == "dense")]
    cases = itertools.product(options.dtypes, options.rules, options.batches)
    for dtype, rule, size in cases:
        first: tuple[str, list[float], float] | None = None
        for variant in variants:
            result, losses = measure_one(variant, options, rows, rule, size, dtype)
            harness.release()
            first = first or (variant, losses, result["ms"])

            name, expected, ms = first
            if worst := worst_difference(expected, losses):
                result["losses_differ_by"] = worst
            what = f"{variant} {rule} {size}: losses differ by {worst}"
            harness.require(worst <= TOLERANCE, what)
            record.add(result | {f"speed of {name}": round(ms / result["ms"], 3)})


def measure_one(
    variant: str,
    options: argparse.Namespace,
    rows: Sequence[int],
    rule: str,
    size: int,
    dtype: str,
) -> tuple[dict[str, Any], list[float]]:
    """Train with one variant; its figures and its first losses."""
    began = time.perf_counter()
    model, step = step_of(variant, options, rows, rule, dtype)
    made = time.perf_counter() - began
    seeds = itertools.count()

    def batches(count: int) -> list[Batch]:
        generators = (
            torch.Generator(options.device).manual_seed(next(seeds)) for _ in range(count)
        )
        return [draw_batch(rows, size, options.device, generator=g) for g in generators]

    ahead = VARIANTS[variant][2]
    losses = [
        loss.item() for loss in train(step, batches(options.checked + options.warm_up), ahead)
    ]

    timed = batches(options.spans * options.span)
    train(step, timed[:2], ahead)
    model.sparse_arch.cache_stats()  # rates from here on
    ms = mean_milliseconds(step, timed, ahead, options)

    stats = model.sparse_arch.cache_stats()
    moved = {name: stats.get(f"cache/MB_{name}_per_step") for name in ("in", "out")}
    busier = max(moved["in"] or 0.0, moved["out"] or 0.0)
    parts = model.sparse_arch.sizes()
    return {
        "model": "Terabyte" if options.large else "Kaggle",
        "variant": variant,
        "rows": dtype,
        "rule": rule,
        "batch": size,
        "ms": ms,
        "Msamples/s": size / ms / 1e3,
        "hit_rate": stats.get("cache/hit_rate"),
        "MB_in": moved["in"],
        "MB_out": moved["out"],
        "link_share": busier * 1e6 / (ms / 1e3) / LINK,
        **{name: parts[name] / 1e6 for name in parts if name.endswith("_bytes")},
        "loss": statistics.mean(losses[-10:]),
        "seconds_to_make": made,
    }, losses


def step_of(
    variant: str, options: argparse.Namespace, rows: Sequence[int], rule: str, dtype: str
) -> tuple[DLRM, TrainStep]:
    """A model on the device whose tables are all of a kind."""
    kind, more, _ = VARIANTS[variant]
    shape = SHAPES["terabyte" if options.large else "kaggle"]
    dim = options.dim or shape.dim
    plan = make_table_plan(NAMES, rows, dim, kind, threshold=0, options={kind: more})
    torch.manual_seed(0)
    with torch.device(options.device):
        model = DLRM(13, rows, dim, plan, **shape.options, tables_dtype=dtype)
    return model, make_step(model, rule, precision=options.precision, mode=options.mode)


def train(step: TrainStep, batches: Sequence[Batch], ahead: bool) -> list[Tensor]:
    """The losses of a step on each batch, left on the device."""
    prepared = step.prefetcher(batches) if ahead else batches
    return [step(batch)["loss"].clone() for batch in prepared]


def mean_milliseconds(
    step: TrainStep, batches: Sequence[Batch], ahead: bool, options: argparse.Namespace
) -> float:
    """Milliseconds of a step over all spans but the first; windows may begin in any of them."""
    prepared: Iterator[Any] = iter(step.prefetcher(batches) if ahead else batches)
    times = []
    for _ in range(options.spans):
        _wait(options.device)
        began = time.perf_counter()
        for _ in range(options.span):
            step(next(prepared))
        _wait(options.device)
        times.append(1e3 * (time.perf_counter() - began) / options.span)
    return statistics.mean(times[1:])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure_table(options: argparse.Namespace, rule: str, dtype: str) -> dict[str, Any]:
    """Look-up, backward and update of one offloaded table, its rows fetched ahead."""
    dim, device = options.dim or 128, options.device
    packed: dict[str, Any] = {"dtype": dtype} if dtype in BITS else {}
    with torch.device(device):
        group = Offload([TABLE_ROWS], dim, cache_share=TABLE_SHARE, check_ids=False, **packed)
    if dtype == "bf16":
        group.bfloat16()

    def draw(size: int) -> list[Tensor]:
        return [power_law(TABLE_ROWS, TABLE_LOOKUPS, device).int()[None] for _ in range(size)]

    found = measure_windows(group, rule, draw, TABLE_LOOKUPS, TABLE_WARM_UP)
    what = {"model": "one table", "variant": "offload", "rows": dtype, "rule": rule}
    return {**what, "batch": TABLE_LOOKUPS, **found}


def measure_windows(
    group: HostRows,
    rule: str,
    draw: Callable[[int], list[Tensor]],
    lookups: int,
    warm_up: int,
) -> dict[str, Any]:
    """Captured steps of one table whose rows are fetched ahead, a window at a time.

    Args:
        group: the table, with rows in host memory.
        rule: of the update.
        draw: draws so many batches ``[1, lookups]``.
        lookups: of a batch.
        warm_up: windows that fill the cache.
    """
    optimizer = RowOptimizer(group.parameters(), rule, lr=0.01)
    weight = group.weight
    sorter = RowSorter(weight.device)
    grad = torch.randn(lookups, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)

    def step(ids: Tensor) -> None:
        with sorter:
            out = group(ids, context=LookupContext(rows_fetched=True, sorter=sorter))
            sorter.sort()
            out.backward(grad)
            optimizer.step(sorter=sorter)
        optimizer.zero_grad()

    def train_window(now: list[Tensor], coming: list[Tensor], run: Callable[..., object]) -> None:
        group.begin_window([] if group.rows_ready else now, coming)
        for ids in now:
            run(ids)

    now = draw(1)
    for _ in range(warm_up):  # windows as long as the cache asks for by then
        coming = draw(group.window_size(lookups))
        train_window(now, coming, step)
        now = coming
    _wait(weight.device.type)
    size = group.window_size(lookups)
    run = _captured(step, now[0]) if weight.is_cuda else step

    drawn = [now, *(draw(size) for _ in range(2 + WINDOWS))]
    before = group.cache_stats()
    counts = {"warm_up": 2, "steps": WINDOWS}
    device = weight.device
    windows = [*itertools.pairwise(drawn)]
    ms = harness.milliseconds(lambda i: train_window(*windows[i], run), device, **counts) / size

    after = group.cache_stats()
    moved = {name: after[name] - before[name] for name in after}
    per_step = {name: moved[name] / moved["steps"] / 1e6 for name in ("bytes_in", "bytes_out")}
    return {
        "window": size,
        "ms": ms,
        "hit_rate": moved["hits"] / moved["lookups"],
        "MB_in": per_step["bytes_in"],
        "MB_out": per_step["bytes_out"],
        "link_share": per_step["bytes_in"] * 1e6 / (ms / 1e3) / LINK,
    }


def _captured(step: Callable[[Tensor], None], like: Tensor) -> Callable[[Tensor], object]:
    """A step in a CUDA graph, which reads a copy of its batch."""
    ids, graph = like.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step(ids)

    def run(batch: Tensor) -> None:
        ids.copy_(batch)
        graph.replay()

    return run
