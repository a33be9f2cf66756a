"""Samples per second of MLPerf's DLRM-DCNv2 on one GPU, multi-hot batches already on it.

    python scripts/benchmarks/benchmark_mlperf.py --output benchmarks/speedrun/mlperf_h200.json
    python scripts/benchmarks/benchmark_mlperf.py --profile --batches 6912 65536

The model and the optimizers are those of configs/mlperf_dcnv2.yaml. Ids are log-uniform; bags have
the fixed sizes of MLPerf or, as ``ragged``, lengths from 0 to twice that. First, on small tables,
captured losses are compared with eager ones; a difference is an error, not a result. 6,912 is the
share of one of 8 GPUs in the fastest submission with H200.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm.config.build import optimizer_specs
from dlrm.config.schema import ModelConfig, OptimConfig
from dlrm.data.batch import Batch
from dlrm.data.schema import MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training import benchmark
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg, exit_status

CONFIG = benchmark.ROOT / "configs" / "mlperf_dcnv2.yaml"
INPUTS = 8  # different batches in rotation
CAPTURES = 3  # of a step: the driver schedules the branches of each graph anew
TOLERANCE = 1e-2  # of a loss in bf16
CHECKED_ROWS, CHECKED_STEPS = 50_000, 10  # of the comparison with eager steps
GFLOP = 0.096  # of the matrix products of a sample, forward and backward
KERNELS = 25  # of a profile


def make_step(rows: Sequence[int], device: str, mode: str) -> TrainStep:
    """A step on a new model of the configuration."""
    config = yaml.safe_load(CONFIG.read_text())
    model_options, optim = ModelConfig(**config["model"]), OptimConfig(**config["optim"])
    torch.manual_seed(0)
    with torch.device(device):
        model = DLRM(
            13,
            rows,
            model_options.embedding_dim,
            [("dense", {})] * len(rows),
            bottom_mlp=model_options.bottom_mlp,
            top_mlp=model_options.top_mlp,
            interaction=model_options.interaction,
            cross_layers=model_options.cross_layers,
            cross_rank=model_options.cross_rank,
        )
    parts = model.dense_parameters(), model.sparse_arch.parameters()
    optimizers = [
        RowOptimizer(own, rule, lr=lr, **options)
        for own, (rule, lr, options) in zip(parts, optimizer_specs(optim), strict=True)
    ]
    return TrainStep(model, optimizers, precision=config["precision"], mode=mode)


def draw(rows: Sequence[int], size: int, device: str, *, ragged: bool) -> Batch:
    """A random batch with bags of MLPerf's sizes, or of ragged lengths with these means."""
    return benchmark.draw_bags(rows, MLPERF_BAG_SIZES, size, device, ragged=ragged)


def check(device: str, size: int, *, ragged: bool) -> float:
    """The largest difference between the losses of captured and of eager steps, small tables.

    Raises:
        ValueError: it is larger than rounding explains.
    """
    rows = [min(table, CHECKED_ROWS) for table in TERABYTE_CARDINALITIES]
    batches = [draw(rows, size, device, ragged=ragged) for _ in range(CHECKED_STEPS)]
    losses = []
    for mode in ("eager", "auto"):
        step = make_step(rows, device, mode)
        losses.append([step(batch)["loss"].item() for batch in batches])
        del step
        benchmark.release()
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    if not worst <= TOLERANCE:
        raise ValueError(f"batch {size}: captured losses differ from eager ones by {worst}")
    return worst


def measure(step: TrainStep, batches: Sequence[Batch], device: str) -> list[float]:
    """Milliseconds of a step, once for each time that it is captured."""
    times = []
    on_gpu = device == "cuda"
    for _ in range(CAPTURES if on_gpu else 1):
        step.graphs.close()
        counts = {"warm_up": 15, "steps": 40} if on_gpu else {"warm_up": 1, "steps": 3}
        run = lambda index: step(batches[index % len(batches)])  # noqa: E731
        times.append(benchmark.milliseconds(run, device, **counts))
    return times


def profile(step: TrainStep, batches: Sequence[Batch], steps: int = 5) -> str:
    """The kernels that take the most time of a step, and the sum of all."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for index in range(steps):
            step(batches[index % len(batches)])
        torch.cuda.synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time_total / steps
            counts[event.name] += 1
    total, launches = sum(times.values()), sum(counts.values()) / steps
    lines = [f"{total:9.1f} us a step in {launches:.0f} launches"]
    for name, time in times.most_common(KERNELS):
        lines.append(f"{time:9.1f} us {counts[name] / steps:5.1f} x {name[:110]}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batches", nargs="+", type=count_arg, default=[6912, 16384, 65536])
    parser.add_argument("--bags", nargs="+", choices=["fixed", "ragged"], default=["fixed"])
    parser.add_argument("--max-rows", type=count_arg, help="cap the rows of a table")
    parser.add_argument("--no-check", action="store_true", help="compare no losses")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA GPU; measure the CPU with --device cpu", file=sys.stderr)
        return 2
    return exit_status(lambda: measure_all(options))


def measure_all(options: Any) -> None:
    """Measure every case on one model, and write the results."""
    device = options.device
    errors = {}
    for bags in options.bags if not options.no_check else ():
        size = min(min(options.batches), 1024)
        errors[bags] = check(device, size, ragged=bags == "ragged")
        print(f"{bags}: captured losses are eager ones within {errors[bags]:.1e}", flush=True)
    rows = [min(table, options.max_rows or table) for table in TERABYTE_CARDINALITIES]
    step = make_step(rows, device, "auto")
    results: list[dict[str, Any]] = []
    for size in options.batches:
        for bags in options.bags:
            batches = [draw(rows, size, device, ragged=bags == "ragged") for _ in range(INPUTS)]
            times = measure(step, batches, device)
            ms = statistics.median(times)
            results.append(
                {
                    "batch": size,
                    "bags": bags,
                    "ms": round(ms, 4),
                    "ms_range": [round(min(times), 4), round(max(times), 4)],
                    "Msamples/s": round(size / ms / 1e3, 3),
                    "TFLOP/s": round(GFLOP * size / ms, 1),
                    "loss_error": errors.get(bags),
                }
            )
            print(results[-1], flush=True)
            if options.profile:
                print(profile(step, batches), flush=True)
            if options.output:
                about = {"model": "DLRM-DCNv2, multi-hot", "rows": sum(rows)}
                about["config"] = yaml.safe_load(CONFIG.read_text())
                benchmark.write(options.output, {**about, "results": results})
            del batches
            step.graphs.close()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
