"""Samples per second of whole training steps over several processes, batches already in place.

    torchrun --nproc-per-node 2 scripts/benchmarks/benchmark_distributed.py --output OUT.json

The Kaggle model (dim 16), the one of Criteo Terabyte with ids modulo 40,000,000 (dim 128, 104.5 GB
of tables, MLPerf's MLPs), and MLPerf's DLRM-DCNv2 on the same tables, with 214 look-ups a sample;
tables at full size, plain SGD, ids with log-uniform skew. The speed
of one GPU is measured in the same call, by the first process alone, with as many samples as each
has later. Losses that differ from those of one GPU with the same global batch are an error, not a
result; so are replicas that differ in a bit.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dlrm.data.batch import Batch, fixed_bags
from dlrm.data.schema import KAGGLE_CARDINALITIES, MLPERF_BAG_SIZES, TERABYTE_CARDINALITIES
from dlrm.distributed.sharding_plan import make_sharding_plan, sharded_from
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.table_plan import make_table_plan
from dlrm.training import benchmark
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.step import TrainStep
from dlrm.utils.device import pick_device
from dlrm.utils.program import Parser

NAMES = [f"C{i}" for i in range(1, 27)]
TERABYTE_NEEDS = 125e9  # bytes of a GPU that holds the Terabyte model alone
CHECKED = 2048  # samples of each process in the steps whose losses are checked
COMMUNICATES = re.compile("nccl|barrier_kernel|^_read$|^_send$").search  # names of kernels
TOLERANCE = {"fp32": 2e-4, "bf16": 1e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    model: str
    kind: str = "dense"
    by: str = "auto"
    wire: str = "fp32"
    exchange: str = "auto"
    threshold: int | None = None
    """As of ``ShardingConfig``."""

    @property
    def dim(self) -> int:
        """Columns of the tables."""
        return 16 if self.model == "kaggle" else 128

    @property
    def rows_from(self) -> int:
        """Rows from which dense tables are sharded."""
        return sharded_from(self.threshold, self.dim)

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.model}_{self.kind}_{self.wire}_{self.exchange}_{self.rows_from}"

    def recipe(self, cap: int) -> dict[str, Any]:
        """The arguments of the model, its tables of at most ``cap`` rows."""
        kaggle = self.model == "kaggle"
        cardinalities = KAGGLE_CARDINALITIES if kaggle else TERABYTE_CARDINALITIES
        rows = [min(count, cap) for count in cardinalities]
        options = {"tt": {"rank": 32}}
        return {
            "num_dense": 13,
            "num_embeddings": rows,
            "embedding_dim": self.dim,
            "plan": make_table_plan(NAMES, rows, self.dim, self.kind, largest=7, options=options),
            "bottom_mlp": [512, 256, 64] if kaggle else [512, 256],
            "top_mlp": [512, 256] if kaggle else [1024, 1024, 512, 256],
            **({"interaction": "dcn", "cross_layers": 3, "cross_rank": 512} if self.bags else {}),
        }

    @property
    def bags(self) -> tuple[int, ...] | None:
        """Ids of each table for a sample; None: one."""
        return MLPERF_BAG_SIZES if self.model == "mlperf" else None

    def batches(self, cap: int, size: int, seed: int, device: torch.device) -> list[Batch]:
        """Random batches on the device, their ids log-uniform."""
        rows = self.recipe(cap)["num_embeddings"]
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(benchmark.draw_batch, rows)
        if self.bags is not None:
            draw = partial(benchmark.draw_bags, rows, self.bags)
        return [draw(size, device, generator=generator) for _ in range(4)]


def share(batch: Batch, rank: int, size: int) -> Batch:
    """The samples of a process in a batch of all, ``size`` of each."""
    mine = slice(size * rank, size * (rank + 1))
    own = replace(
        batch,
        dense=batch.dense[:, mine].clone(),
        labels=batch.labels[mine].clone(),
        total=batch.size,
    )
    if batch.bag_sizes is None:
        return replace(own, ids=batch.ids[:, mine].clone())
    offsets, bounds = fixed_bags(batch.bag_sizes, size, batch.ids.device)
    tables = batch.ids.split([length * batch.size for length in batch.bag_sizes])
    ids = [
        table.view(batch.size, length)[mine].flatten()
        for table, length in zip(tables, batch.bag_sizes, strict=True)
    ]
    return replace(own, ids=torch.cat(ids), offsets=offsets, bounds=bounds)


def make_step(
    case: Case, world: World, device: torch.device, options: argparse.Namespace, precision: str
) -> tuple[DLRM, TrainStep, str]:
    """A model on the device, its step, and the text of its plan."""
    recipe = case.recipe(options.cap)
    spreading = make_sharding_plan(
        world, NAMES, recipe,
        None if case.bags is None else lambda: [torch.tensor([size]) for size in case.bags or ()],
        by=case.by, threshold=case.threshold, comm_dtype=case.wire, exchange=case.exchange,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = DLRM(**recipe, sharding=spreading)
    optimizers = [
        RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
        RowOptimizer(model.sparse_arch.parameters(), "sgd", lr=0.01),
    ]
    reducer = GradientReducer.of(model, optimizers[1], world)
    step = TrainStep(model, optimizers, precision=precision, mode=options.mode, reducer=reducer)
    return model, step, spreading.text if spreading else ""


def check(case: Case, world: World, device: torch.device, options: argparse.Namespace) -> None:
    """Compare the losses of eight steps with those of one process, and the replicas' bits.

    Raises:
        ValueError: they differ.
    """
    if case.model != "kaggle":  # of a size that one GPU holds
        options = argparse.Namespace(**vars(options) | {"cap": min(options.cap, 1_000_000)})
    whole = case.batches(options.cap, CHECKED * world.size, 1, device)
    shares = [share(batch, world.rank, CHECKED) for batch in whole]
    one, step, _ = make_step(case, World(), device, options, "fp32")
    begin = {name: value.clone() for name, value in one.state_dict().items()}
    expected = [float(step(whole[i % 4])["loss"]) for i in range(8)]
    del one, step
    benchmark.release()
    many, step, _ = make_step(case, world, device, options, "fp32")
    many.load_state_dict(begin)
    del begin
    prepared = step.prefetcher(cycle(shares))
    found = [float(step(next(prepared))["loss"]) for _ in range(8)]
    worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if not worst <= TOLERANCE[case.wire]:
        raise ValueError(f"{case}: losses differ by {worst}: {expected} and {found}")
    local = set(many.sparse_arch.local_parameters())
    for name, parameter in many.named_parameters():
        if parameter not in local:
            copies = [torch.empty_like(parameter) for _ in range(world.size)]
            dist.all_gather(copies, parameter.detach())
            if not all(torch.equal(copies[0], copy) for copy in copies):
                raise ValueError(f"{case}: the replicas of {name} differ")
    if world.first:
        print(f"{case}: losses within {worst:.1e} of one GPU's, replicas equal", flush=True)


def time_steps(step: TrainStep, batches: list[Batch], device: torch.device) -> float:
    """Median milliseconds of a step on this process."""
    warm_up, steps = (12, 40) if device.type == "cuda" else (2, 3)
    prepared = step.prefetcher(cycle(batches))
    return benchmark.milliseconds(
        lambda _: step(next(prepared)), device, warm_up=warm_up, steps=steps
    )


def profiled(
    step: TrainStep, batches: list[Batch], world: World, path: Path | None
) -> dict[str, Any]:
    """Milliseconds of GPU kernels in a step: all, those that communicate (or wait for others), and
    the costliest ones.

    A trace of the steps is written to ``path``, if there is one.
    """
    count, prepared = 8, step.prefetcher(cycle(batches))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        world.wait()  # profilers start at different times, which is no communication
        for _ in range(count):
            step(next(prepared))
        torch.cuda.synchronize()
    if path is not None and world.first:
        trace.export_chrome_trace(str(path))
    kernels = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    spent = {e.key: e.self_device_time_total / count / 1e3 for e in kernels}
    return {
        "kernel_ms": round(sum(spent.values()), 4),
        "communication_ms": round(sum(ms for n, ms in spent.items() if COMMUNICATES(n)), 4),
        "kernels": {name[:90]: round(ms, 4) for name, ms in list(spent.items())[:14]},
        "launches": sum(e.count for e in kernels) // count,
    }


def measure_case(
    case: Case, batch: int, world: World, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """The step's time on the slowest process, and what it consists of."""
    _, step, text = make_step(case, world, device, options, options.precision)
    total = batch * world.size
    drawn = case.batches(options.cap, batch, 10 + world.rank, device)
    batches = [replace(each, total=total) for each in drawn]
    ms = time_steps(step, batches, device)
    times = [ms]
    if world.size > 1:
        box: list[Any] = [None] * world.size
        dist.all_gather_object(box, ms)
        times = box
    on_gpu = device.type == "cuda"
    extra: dict[str, Any] = {}
    if on_gpu:
        path = Path(options.traces) / f"{case.name}.json" if options.traces else None
        extra = profiled(step, batches, world, path if world.size > 1 else None)
        extra["communication_share"] = round(
            extra["communication_ms"] / statistics.median(times), 3
        )
        free, memory = torch.cuda.mem_get_info()  # the allocator knows no symmetric memory
        extra["gpu_GB"] = round((memory - free) / 1e9, 2)
    if text:
        extra["plan"] = text.splitlines()
    return {
        "model": case.model,
        "kind": case.kind,
        "by": case.by if text else "-",
        "wire": case.wire if text else "-",
        "exchange": text.rsplit(" ", 1)[-1] if text else "-",
        "threshold": case.rows_from,
        "gpus": world.size,
        "batch_per_gpu": batch,
        "mode": step.mode,
        "precision": options.precision,
        "ms": round(max(times), 4),
        "Msamples/s": round(total / max(times) / 1e3, 3),
        **extra,
    }


SHAPES = [("kaggle", "dense"), ("kaggle", "tt"), ("terabyte", "dense"), ("mlperf", "dense")]


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Every way to exchange at every threshold, for the requested models and kinds."""
    ways = [(wire, exchange) for exchange in options.exchanges for wire in options.wires]
    return [
        Case(model=model, kind=kind, wire=wire, exchange=exchange, threshold=threshold)
        for model, kind in SHAPES
        if model in options.models and kind in options.kinds
        for threshold in options.thresholds
        for wire, exchange in ways
    ]


def run(options: argparse.Namespace, world: World) -> None:
    """Measure all cases."""
    device = pick_device(options.device)
    world.join(device)
    results: list[dict[str, Any]] = []

    def report(result: dict[str, Any]) -> None:
        results.append(result)
        if world.first:
            print({k: v for k, v in result.items() if k not in ("kernels", "plan")}, flush=True)
            benchmark.write(options.output, {"results": results})
        benchmark.release()

    cases = cases_of(options)
    for case in cases:
        if case.model in options.check:
            check(case, world, device, options)
            benchmark.release()
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
    alone: dict[tuple[str, str, int], float] = {}
    whole: set[tuple[str, str, int, int]] = set()  # where no table is in pieces
    for batch in options.batches:
        for case in cases:
            key = (case.model, case.kind, batch)
            fits = case.model == "kaggle" or memory > TERABYTE_NEEDS or options.cap < 1_000_000
            if fits and key not in alone:
                speed = 0.0
                if world.first:
                    single = measure_case(case, batch, World(), device, options)
                    speed = single["Msamples/s"]
                    report(single)
                alone[key] = world.from_first(partial(float, speed))
            if (*key, case.rows_from) in whole:  # another wire or exchange of nothing
                continue
            result = measure_case(case, batch, world, device, options)
            if result["exchange"] == "-":
                whole.add((*key, case.rows_from))
            if key in alone:
                result["scaling"] = round(result["Msamples/s"] / world.size / alone[key], 3)
            report(result)
    if world.first:
        columns = ["model", "kind", "wire", "exchange", "threshold", "gpus", "ms", "Msamples/s"]
        table = pd.DataFrame(results).reindex(columns=[*columns, "scaling", "communication_share"])
        print(table.to_string(index=False))


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    models, kinds = (list(dict.fromkeys(names)) for names in zip(*SHAPES, strict=True))
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--batches", nargs="+", type=int, default=[65536], help="of each process")
    parser.add_argument("--wires", nargs="+", default=["fp32", "bf16"], help="see ShardingConfig")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--mode", default="auto", help="see dlrm.training.step")
    parser.add_argument(
        "--thresholds", nargs="+", type=int, default=[None], help="rows of sharded tables"
    )
    parser.add_argument(
        "--exchanges", nargs="+", default=["peers", "collective"], help="see ShardingConfig"
    )
    parser.add_argument("--check", nargs="*", choices=models, default=models, help="models")
    parser.add_argument("--traces", help="directory for a trace of each case")
    parser.add_argument("--cap", type=int, default=40_000_000, help="rows of a table at most")
    parser.add_argument("--output", default="benchmarks/distributed.json")
    options = parser.parse_args(argv)
    world = World.from_environment()
    try:
        if world.size == 1:
            raise ValueError("there is one process: start it with torchrun --nproc-per-node 2")
        run(options, world)
    except ValueError as error:
        world.print_error_once(f"error: {error}")
        return 2
    finally:
        world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
