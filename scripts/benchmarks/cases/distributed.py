"""Samples per second of whole training steps over several processes, batches already in place.

    torchrun --nproc-per-node 2 scripts/benchmarks/run.py distributed --output OUT.json

The Kaggle model (dim 16), that of Criteo Terabyte with ids modulo 40,000,000 (dim 128, 104.5 GB of
tables, MLPerf's MLPs), and MLPerf's DLRM-DCNv2 on the same tables, with 214 look-ups a sample;
tables at full size, ids with log-uniform skew. The first process alone measures the
speed of one GPU in the same call, with as many samples as each has later. Losses that differ from
those of one GPU with the same global batch are an error, not a result; so are replicas that differ
in a bit.

Each result of several GPUs says what a step would take on more of them, as a prediction: see
:func:`predicted_ms`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
import torch.distributed as dist

from dlrm.data.batch import Batch, fixed_bags
from dlrm.distributed.planner import plan_shards
from dlrm.distributed.sharding_plan import WHOLE_ROWS, make_sharding_plan, sharded_from
from dlrm.distributed.world import World
from dlrm.kernels.update.packed import storage
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.sparse_arch.table_plan import KnownIds, make_table_plan
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.step import TrainStep
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import (
    NAMES,
    SHAPES,
    Shape,
    draw_bags,
    draw_batch,
    expected_counts,
    worst_difference,
)

SMALL = "--models kaggle --kinds dense auto --batches 64 --cap 500 --precision fp32 --mode eager"
SMALL += " --exchanges collective --wires fp32 --checked 16"
ROOM = 1.2  # memory of a GPU that holds a model alone, relative to its tables
COMMUNICATES = re.compile("nccl|barrier_kernel|^_read$|^_send$").search  # names of kernels
TOLERANCE = {"fp32": 2e-4, "bf16": 1e-2}
KINDS = [("mlperf", "dense"), ("terabyte", "dense")]
KINDS += [("kaggle", "dense"), ("kaggle", "auto"), ("kaggle", "dynamic"), ("kaggle", "tt")]
ONE_HOT = [16384, 65536]  # samples of each process
BATCHES = {"mlperf": [6912, 8192, 65536], "terabyte": ONE_HOT, "kaggle": ONE_HOT}
PREDICTED = (4, 8)  # GPUs
RECEIVED_MS = 1.17e-7  # for an id that a GPU sorts, without its row; from kernels of four H200
SHOWN = ["model", "kind", "rule", "wire", "exchange", "gpus", "batch_per_gpu", "ms", "Msamples/s"]
SHOWN += ["scaling", "communication_share", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and how its tables are sharded."""

    model: str
    kind: str = "dense"
    rule: str = "sgd"
    wire: str = "fp32"
    exchange: str = "auto"
    threshold: int | None = None
    """As of ``ShardingConfig``."""

    @property
    def shape(self) -> Shape:
        """Tables and layers."""
        return SHAPES[self.model]

    @property
    def rows_from(self) -> int:
        """Rows from which dense tables are sharded."""
        how = {"bags": self.shape.bag_sizes is not None, "linked": self.exchange != "collective"}
        return sharded_from(self.threshold, self.shape.dim, **how)

    def ids_received(self, gpus: int, cap: int, memory: int) -> int:
        """Ids of bags that the busiest of some GPUs, with so much memory, receives for each of its
        samples: those of all GPUs for each part of a table that it holds."""
        sizes: Sequence[int] = self.shape.bag_sizes or ()
        shards = plan_shards(
            self.shape.capped(cap), self.shape.dim, gpus, sharding_types=["auto"] * len(sizes),
            loads=sizes, room=memory // 6, column_wise=self.rule != WHOLE_ROWS,
        )  # fmt: skip
        return gpus * max(sum(sizes[s.table] for s in shards if s.rank == r) for r in range(gpus))

    def recipe(self, cap: int) -> dict[str, Any]:
        """The arguments of the model, its tables of at most ``cap`` rows."""
        rows, dim = self.shape.capped(cap), self.shape.dim
        options: dict[str, Any] = {"largest": 7, "options": {"tt": {"rank": 32}}}
        if self.kind == "auto":  # within a tenth of the bytes, by how often each id occurs
            ids = KnownIds(counts=partial(expected_counts, tuple(rows), 10**8))
            options = {"budget": "10x", "ids": ids}
        plan = make_table_plan(NAMES, rows, dim, self.kind, **options)
        sizes = {"num_dense": 13, "num_embeddings": rows, "embedding_dim": dim, "plan": plan}
        mlps = {"bottom_mlp": [512, 256, 64], "top_mlp": [512, 256]}
        return sizes | mlps | self.shape.options

    def batches(self, cap: int, size: int, seed: int, device: torch.device) -> list[Batch]:
        """Random batches on the device, their ids log-uniform."""
        rows, bags = self.shape.capped(cap), self.shape.bag_sizes
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(draw_batch, rows) if bags is None else partial(draw_bags, rows, bags)
        return [draw(size, device, generator=generator) for _ in range(4)]


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    models, kinds = (list(dict.fromkeys(names)) for names in zip(*KINDS, strict=True))
    add("--models", nargs="+", choices=models, default=models)
    add("--kinds", nargs="+", choices=kinds, default=kinds)
    add("--batches", nargs="+", type=count_arg, help=f"of each process (default: {BATCHES})")
    add("--rules", nargs="+", choices=RULES, default=["sgd"], help="optimizers of the tables")
    add("--wires", nargs="+", default=["fp32"], help="see ShardingConfig")
    add("--precision", default="bf16")
    add("--mode", default="auto", help="see dlrm.training.step")
    add("--thresholds", nargs="+", type=int, default=[None], help="rows of sharded tables")
    add("--exchanges", nargs="+", default=["auto"], help="see ShardingConfig")
    add("--check", nargs="*", choices=models, default=models, help="models")
    add("--checked", type=count_arg, default=2048, help="samples a process when losses are checked")
    add("--cap", type=count_arg, default=40_000_000, help="rows of a table at most")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure all cases."""
    world = World.from_environment()
    try:
        if world.size == 1:
            raise ValueError("there is one process: start it with torchrun --nproc-per-node 2")
        device = torch.device(options.device)
        world.join(device)
        Benchmark(options, world, device, record).run()
    finally:
        world.leave()


class Benchmark:
    """The cases on a device of each process."""

    def __init__(
        self,
        options: argparse.Namespace,
        world: World,
        device: torch.device,
        record: harness.Record,
    ) -> None:
        self.options = options
        self.world = world
        self.device = device
        self.record = record
        self.on_gpu = device.type == "cuda"
        self.memory = torch.cuda.get_device_properties(device).total_memory if self.on_gpu else 0

    def run(self) -> None:
        """Check each case, then measure it."""
        cases = list(self.cases())
        checked: set[Case] = set()
        alone: dict[tuple[str, str, str, int], float] = {}
        whole: set[tuple[Any, ...]] = set()  # where no table is in pieces
        for case, batch in self.sized(cases):
            if case.model in self.options.check and case not in checked:
                checked.add(case)
                self.check(case)
                harness.release()

            key = (case.model, case.kind, case.rule, batch)
            if key not in alone and self.fits(case):
                alone[key] = self.measure_alone(case, batch)
            if (*key, case.rows_from) in whole:  # another wire or exchange of nothing
                continue

            result = self.measure_case(case, batch, self.world)
            if result["exchange"] == "-":
                whole.add((*key, case.rows_from))
            if key in alone:
                scaling = result["Msamples/s"] / self.world.size / alone[key]
                result["scaling"] = round(scaling, 3)
                result["predicted"] = self.predicted(case, result["ms"], scaling, batch)
            self.report(result)

    def cases(self) -> Iterator[Case]:
        """Every exchange at every threshold, for the requested models and kinds."""
        options = self.options
        for model, kind in KINDS:
            if model in options.models and kind in options.kinds:
                names = "threshold", "exchange", "wire", "rule"
                choices = options.thresholds, options.exchanges, options.wires, options.rules
                for values in product(*choices):
                    yield Case(model=model, kind=kind, **dict(zip(names, values, strict=True)))

    def sized(self, cases: Sequence[Case]) -> Iterator[tuple[Case, int]]:
        """Every case with each of its batches, all variants of a model side by side."""
        for model, kind in KINDS:
            same_model = [case for case in cases if (case.model, case.kind) == (model, kind)]
            for batch, case in product(self.options.batches or BATCHES[model], same_model):
                yield case, batch

    def predicted(self, case: Case, ms: float, scaling: float, batch: int) -> dict[str, Any]:
        """Milliseconds and million samples per second of more GPUs."""
        found, here, with_bags = {}, self.world.size, (self.options.cap, self.memory)
        for gpus in (n for n in PREDICTED if n > here):
            ids = case.ids_received(gpus, *with_bags) - case.ids_received(here, *with_bags)
            more = predicted_ms(ms * scaling, ms, here, gpus, batch * ids)
            found[str(gpus)] = {"ms": more, "Msamples/s": gpus * batch / more / 1e3}
        return found

    def fits(self, case: Case) -> bool:
        """Does one GPU hold the model?"""
        weights = sum(case.shape.capped(self.options.cap)) * case.shape.dim
        return not self.on_gpu or self.memory > ROOM * 4 * weights

    def report(self, result: dict[str, Any]) -> None:
        """Add a result to the record of the first process."""
        if self.world.first:
            self.record.add(result, show=SHOWN)
        harness.release()

    def measure_alone(self, case: Case, batch: int) -> float:
        """Million samples per second of the first process alone."""
        speed = 0.0
        if self.world.first:
            single = self.measure_case(case, batch, World())
            speed = single["Msamples/s"]
            self.report(single)
        return self.world.from_first(partial(float, speed))

    def make_step(
        self, case: Case, world: World, cap: int, precision: str
    ) -> tuple[DLRM, TrainStep, str]:
        """A model on the device, its step, and the text of its plan."""
        recipe, bags = case.recipe(cap), case.shape.bag_sizes
        lengths = None if bags is None else lambda: [torch.tensor([size]) for size in bags]

        sharding = make_sharding_plan(
            world,
            NAMES,
            recipe,
            lengths,
            case.rule,
            threshold=case.threshold,
            comm_dtype=case.wire,
            exchange=case.exchange,
        )
        torch.manual_seed(0)
        with self.device:
            model = DLRM(**recipe, sharding=sharding)

        optimizers = [
            RowOptimizer(model.dense_parameters(), "sgd", lr=0.01),
            RowOptimizer(model.sparse_arch.parameters(), case.rule, lr=0.01),
        ]

        reducer = GradientReducer.of(model, optimizers[1], world)
        mode = self.options.mode
        step = TrainStep(model, optimizers, precision=precision, mode=mode, reducer=reducer)
        return model, step, sharding.text if sharding else ""

    def check(self, case: Case) -> None:
        """Compare the losses of eight steps with those of one process, and the replicas' bits.

        Raises:
            ValueError: they differ.
        """
        cap, checked, world = self.options.cap, self.options.checked, self.world
        if case.model != "kaggle":  # of a size that one GPU holds
            cap = min(cap, 1_000_000)
        batches = case.batches(cap, checked * world.size, 1, self.device)
        shares = [share(batch, world.rank, checked) for batch in batches]

        one, step, _ = self.make_step(case, World(), cap, "fp32")
        start = {name: value.clone() for name, value in one.state_dict().items()}
        expected = [float(step(batches[i % 4])["loss"]) for i in range(8)]
        del one, step
        harness.release()

        many, step, _ = self.make_step(case, world, cap, "fp32")
        many.load_state_dict(start)
        del start
        prepared = step.prefetcher(cycle(shares))
        found = [float(step(next(prepared))["loss"]) for _ in range(8)]

        worst = worst_difference(expected, found)
        what = f"{case}: losses differ by {worst}: {expected} and {found}"
        harness.require(worst <= TOLERANCE[case.wire], what)

        local = set(many.sparse_arch.local_parameters())
        for name, parameter in many.named_parameters():
            if parameter not in local:
                values = storage(parameter)[0].detach()
                copies = [torch.empty_like(values) for _ in range(world.size)]
                dist.all_gather(copies, values)
                same = all(torch.equal(copies[0], copy) for copy in copies)
                harness.require(same, f"{case}: the replicas of {name} differ")
        if world.first:
            kept = {name: getattr(case, name) for name in ("model", "kind", "rule", "wire")}
            self.record.add({**kept, "losses_differ_by": worst}, to="checks")

    def measure_case(self, case: Case, batch: int, world: World) -> dict[str, Any]:
        """The step's time on the slowest process, and what it consists of."""
        cap, precision = self.options.cap, self.options.precision
        _, step, text = self.make_step(case, world, cap, precision)

        total = batch * world.size
        drawn = case.batches(cap, batch, 10 + world.rank, self.device)
        prepared = step.prefetcher(cycle([replace(each, total=total) for each in drawn]))

        def train(_: int) -> object:
            return step(next(prepared))

        counts = {"warm_up": 12, "steps": 40} if self.on_gpu else {"warm_up": 2, "steps": 3}

        # The slowest process counts.
        times = [harness.milliseconds(train, self.device, **counts)]
        if world.size > 1:
            everyone: list[Any] = [None] * world.size
            dist.all_gather_object(everyone, times[0])
            times = everyone
        extra = self.profiled(train, world, statistics.median(times)) if self.on_gpu else {}

        return {
            "model": case.model,
            "kind": case.kind,
            "rule": case.rule,
            "by": "auto" if text else "-",
            "wire": case.wire if text else "-",
            "exchange": text.partition("exchange by ")[2] or "-",
            "threshold": case.rows_from,
            "gpus": world.size,
            "batch_per_gpu": batch,
            "mode": step.mode,
            "precision": precision,
            "ms": max(times),
            "Msamples/s": total / max(times) / 1e3,
            **extra,
            **({"plan": text.splitlines()} if text else {}),
        }

    def profiled(self, train: Any, world: World, ms: float) -> dict[str, Any]:
        """Time of the kernels of a step, the part that communicates (or waits for others), and the
        memory in use.
        """
        found = harness.kernel_milliseconds(train, ready=world.wait)
        kernels = found["kernels"]
        communication = sum(spent for name, spent in kernels.items() if COMMUNICATES(name))
        free, memory = torch.cuda.mem_get_info()  # the allocator knows no symmetric memory
        return {
            **found,
            "kernels": {name[:90]: spent for name, spent in list(kernels.items())[:14]},
            "communication_ms": communication,
            "communication_share": round(communication / ms, 3),
            "gpu_GB": (memory - free) / 1e9,
        }


def predicted_ms(alone: float, ms: float, gpus: int, more: int, ids: int = 0) -> float:
    """The time of a step on more GPUs of one host, predicted from that on one and on a few.

    The difference of these is taken to be communication. Of ``n`` GPUs, each sends the
    share ``(n - 1) / n`` of its vectors, and in a ring twice that of its gradients: on eight it
    sends 1.75 times the bytes of two. The ``ids`` are those that one receives in addition.
    """
    return alone + (ms - alone) * (1 - 1 / more) / (1 - 1 / gpus) + RECEIVED_MS * ids


def share(batch: Batch, rank: int, size: int) -> Batch:
    """The samples of a process in a batch of all, ``size`` of each."""
    mine = slice(size * rank, size * (rank + 1))
    part = replace(
        batch,
        dense=batch.dense[:, mine].clone(),
        labels=batch.labels[mine].clone(),
        total=batch.size,
    )
    if batch.bag_sizes is None:
        return replace(part, ids=batch.ids[:, mine].clone())

    offsets, bounds = fixed_bags(batch.bag_sizes, size, batch.ids.device)
    tables = batch.ids.split([length * batch.size for length in batch.bag_sizes])
    ids = [
        table.view(batch.size, length)[mine].flatten()
        for table, length in zip(tables, batch.bag_sizes, strict=True)
    ]
    return replace(part, ids=torch.cat(ids), offsets=offsets, bounds=bounds)
