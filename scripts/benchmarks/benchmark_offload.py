"""Samples per second with tables in host memory, compared with the same tables on the GPU.

    python scripts/benchmarks/benchmark_offload.py --output benchmarks/offload_h100.json
    python scripts/benchmarks/benchmark_offload.py --large --output FILE
    python scripts/benchmarks/benchmark_offload.py --table --output FILE

The Kaggle model with log-uniform ids, no batch twice; the GPU caches 1.5% of the rows. Losses that
differ from those of dense tables are an error, not a result. With --large the Terabyte model
(tables cut off at 40 million rows, dim 128: 104.5 GB), which no GPU of 80 GB holds. With --table
no model, but a look-up with its update at the shape that FBGEMM publishes: one table of 24 million
rows, dim 128, and 1,048,576 look-ups from a power law of exponent 1.05; the GPU caches 10% of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.data.schema import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from dlrm.embeddings.common.context import LookupContext
from dlrm.embeddings.common.row_caches import Ids
from dlrm.embeddings.offload import MAX_WINDOW, Offload
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.sparse_arch.table_plan import make_table_plan
from dlrm.training import benchmark
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, exit_status

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = [f"C{i}" for i in range(1, 27)]
LINK = 53e9  # bytes a second each way between pinned host memory and an H100 (PCIe 5), as measured
WARM_UP, CHECKED = 150, 30
SPAN, SPANS = 3 * MAX_WINDOW, 5  # steps of whole windows that are timed together, and how often
TABLE_ROWS, TABLE_LOOKUPS, TABLE_SHARE = 24_000_000, 1 << 20, 0.1
WINDOWS = 12  # of one table that are timed
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {  # kind, options, rows fetched ahead
    "dense": ("dense", {}, False),
    "offload": ("offload", {}, True),
    "offload, not ahead": ("offload", {}, False),
    "offload, no cache": ("offload", {"cache_rows": 0}, False),
}


def draw(rows: Sequence[int], size: int, seed: int, device: str) -> Batch:
    """A batch with log-uniform ids."""
    generator = torch.Generator(device).manual_seed(seed)
    return benchmark.draw_batch(rows, size, device, generator=generator)


def make_step(
    variant: str, options: argparse.Namespace, rows: Sequence[int], rule: str
) -> tuple[DLRM, TrainStep]:
    """A model on the device whose tables from ``threshold`` rows on are of a kind."""
    kind, own, _ = VARIANTS[variant]
    large: dict[str, Any] = {}
    if options.large:
        large = {"bottom_mlp": (512, 256), "top_mlp": (1024, 1024, 512, 256)}
    dim = options.dim or (128 if options.large else 16)
    table_plan = make_table_plan(
        NAMES, rows, dim, kind, threshold=options.threshold, options={kind: own} if own else {}
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = DLRM(13, rows, dim, table_plan, **large, tables_dtype=options.dtype)
    optimizers = [
        RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
        RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.01),
    ]
    return model, TrainStep(model, optimizers, precision=options.precision, mode=options.mode)


def train(step: TrainStep, batches: Sequence[Batch], ahead: bool) -> list[Tensor]:
    """The losses of a step on each batch, left on the device."""
    prepared = step.prefetcher(batches) if ahead else batches
    return [step(batch)["loss"].clone() for batch in prepared]


def mean_milliseconds(run: Callable[[int], object], device: str) -> float:
    """Milliseconds of a step over whole windows, the median of all such times but the first."""
    times = []
    for start in range(0, SPANS * SPAN, SPAN):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for index in range(start, start + SPAN):
            run(index)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / SPAN)
    return statistics.median(times[1:])


def measure_one(
    variant: str, options: argparse.Namespace, rows: Sequence[int], rule: str, size: int
) -> tuple[dict[str, Any], list[float]]:
    """Train with one variant; its figures and its first losses."""
    began = time.perf_counter()
    model, step = make_step(variant, options, rows, rule)
    made = time.perf_counter() - began
    ahead = VARIANTS[variant][2]
    drawn = range(CHECKED + WARM_UP)
    first = [draw(rows, size, seed, options.device) for seed in drawn]
    found = [loss.item() for loss in train(step, first, ahead)]
    seeds = range(len(drawn), len(drawn) + SPANS * SPAN)
    batches = [draw(rows, size, seed, options.device) for seed in seeds]
    train(step, batches[:2], ahead)
    model.sparse_arch.cache_stats()  # rates from here on

    prepared: Iterator[Any] = iter(step.prefetcher(batches) if ahead else batches)
    ms = mean_milliseconds(lambda _: step(next(prepared)), options.device)
    stats = model.sparse_arch.cache_stats()
    moved = {name: stats.get(f"cache/MB_{name}_per_step") for name in ("in", "out")}
    busier = max(moved["in"] or 0.0, moved["out"] or 0.0)
    parts = model.sparse_arch.sizes()
    return {
        "model": "Terabyte" if options.large else "Kaggle",
        "variant": variant,
        "rule": rule,
        "batch": size,
        "ms": round(ms, 4),
        "Msamples/s": round(size / ms / 1e3, 3),
        "hit_rate": stats.get("cache/hit_rate"),
        "MB_in": moved["in"],
        "MB_out": moved["out"],
        "link_share": busier * 1e6 / (ms / 1e3) / LINK,
        **{name: round(parts[name] / 1e6, 1) for name in parts if name.endswith("_bytes")},
        "loss": round(statistics.mean(found[-10:]), 4),
        "seconds_to_make": round(made, 1),
    }, found


def measure_table(
    options: argparse.Namespace, rule: str, rows: int = TABLE_ROWS, lookups: int = TABLE_LOOKUPS
) -> dict[str, Any]:
    """Look-up, backward and update of one offloaded table, its rows fetched ahead."""
    dim, device = options.dim or 128, options.device
    group = Offload([rows], dim, cache_share=TABLE_SHARE, check_ids=False).to(
        device, TYPES[options.dtype]
    )
    optimizer = RowOptimizer(group.parameters(), rule, lr=0.01)
    sorter, size = RowSorter(torch.device(device)), group.window_size(lookups)
    drawn = [
        [benchmark.power_law(rows, lookups, device).int()[None] for _ in range(size)]
        for _ in range(options.table_warm_up + 2 + WINDOWS + 1)
    ]
    grad = torch.randn(lookups, 1, dim, device=device).to(TYPES[options.dtype])

    def train_window(index: int) -> None:
        now: list[Ids] = [*drawn[index]]
        group.begin_window([] if index else now, drawn[index + 1])
        for ids in now:
            with sorter:
                out = group(ids, context=LookupContext(rows_fetched=True, sorter=sorter))
                sorter.sort()
                out.backward(grad)
                optimizer.step(sorter=sorter)
            optimizer.zero_grad()

    first = options.table_warm_up
    for index in range(first):
        train_window(index)
    before = group.cache_stats()
    counts = {"warm_up": 2, "steps": WINDOWS}
    ms = benchmark.milliseconds(lambda i: train_window(first + i), device, **counts) / size
    after = group.cache_stats()
    moved = {name: after[name] - before[name] for name in after}
    per_step = {name: moved[name] / moved["steps"] / 1e6 for name in ("bytes_in", "bytes_out")}
    return {
        "model": "one table",
        "variant": "offload",
        "rule": rule,
        "batch": lookups,
        "window": size,
        "ms": round(ms, 3),
        "hit_rate": moved["hits"] / moved["lookups"],
        "MB_in": per_step["bytes_in"],
        "MB_out": per_step["bytes_out"],
        "link_share": per_step["bytes_in"] * 1e6 / (ms / 1e3) / LINK,
    }


def main(argv: list[str] | None = None) -> int:
    """Measure every variant; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["sgd", "adagrad"])
    parser.add_argument("--batches", nargs="+", type=int, default=[2048, 16384, 65536])
    parser.add_argument("--threshold", type=int, default=0, help="smaller tables stay on the GPU")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16")
    parser.add_argument("--mode", choices=["auto", "eager", "graph"], default="auto")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the rows")
    parser.add_argument("--dim", type=int, help="16, or 128 with --large")
    parser.add_argument("--cap", type=int, default=2**31, help="rows of a table at most")
    parser.add_argument("--large", action="store_true", help="the Terabyte model, offloaded")
    parser.add_argument("--table", action="store_true", help="one table of FBGEMM's shape")
    parser.add_argument("--table_warm_up", type=int, default=20, help="windows that fill the cache")
    parser.add_argument("--output", default="benchmarks/offload.json")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA GPU; try the script with --device cpu", file=sys.stderr)
        return 2
    if options.large:
        options.variants = [name for name in options.variants if name != "dense"]
    measure = measure_tables if options.table else measure_all
    return exit_status(lambda: print(pd.DataFrame(measure(options)).to_string(index=False)))


def measure_tables(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and write the figures of one table under every rule."""
    results: list[dict[str, Any]] = []
    for rule in options.rules:
        results.append(measure_table(options, rule))
        print(results[-1], flush=True)
        benchmark.release()
        benchmark.write(options.output, {"results": results})
    return results


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and write the figures of every variant, rule and batch size.

    Raises:
        ValueError: the losses of a variant are not those of the first.
    """
    cardinalities = TERABYTE_CARDINALITIES if options.large else KAGGLE_CARDINALITIES
    rows = [min(count, options.cap) for count in cardinalities]
    results: list[dict[str, Any]] = []
    for rule, size in itertools.product(options.rules, options.batches):
        expected = None
        for variant in options.variants:
            result, found = measure_one(variant, options, rows, rule, size)
            benchmark.release()
            if expected and expected["found"] != found:
                worst = max(abs(a - b) for a, b in zip(expected["found"], found, strict=True))
                result["losses_differ_by"] = worst
                if not worst <= 1e-3:
                    raise ValueError(f"{variant} {rule} {size}: losses differ by {worst}")
            expected = expected or {"found": found, "ms": result["ms"], "of": variant}
            result[f"speed of {expected['of']}"] = round(expected["ms"] / result["ms"], 3)
            results.append(result)
            print(result, flush=True)
            benchmark.write(options.output, {"results": results})
    return results


if __name__ == "__main__":
    sys.exit(main())
