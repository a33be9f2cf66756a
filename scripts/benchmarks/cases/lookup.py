"""Time dense table-batched look-ups on a GPU: forward, sort, update, and the whole step.

    python scripts/benchmarks/run.py lookup --output benchmarks/lookup_h100.json
    python scripts/benchmarks/run.py lookup --one-table --output benchmarks/rules_h200.json

All 26 Kaggle tables, captured as a CUDA graph and eager, uniform and skewed ids, compared with
``nn.EmbeddingBag``, one joint ``nn.Embedding``, published figures of FBGEMM, and the least time in
which the bytes can be moved. A result that differs from PyTorch's in float64 is an error.

With ``--one-table``: every optimizer at the shape that FBGEMM publishes, one table of 24 million
rows in fp32 and 1,048,576 look-ups from a power law of exponent 1.05, captured. FBGEMM takes 0.96
ms with SGD and 1.35 ms with Adam at dim 128 on an H100.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.kernels.lookup.source import Weight
from dlrm.kernels.lookup.tables import TableRows, gather_rows, lookup_tables
from dlrm.kernels.update.row_sort import SortedRows, sort_rows
from dlrm.kernels.update.rules import RULES, Rule, make_rule
from dlrm.kernels.update.sparse import update_rows, update_rows_torch
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import EXPONENT, draw_ids, power_law

NEEDS_GPU = True
SMALL = "--dims 16 --batches 30 --lookups 50 --max-rows 100 --rules sgd adam"
INPUTS = 4  # different batches in rotation
SORT_BYTES = 4 * 2 * (4 + 8)  # of a look-up: 4 passes over a key and an index, read and written
TYPES = {"int32": torch.int32, "int64": torch.int64}
FBGEMM_MS = {(16, 2048): 1.02, (16, 65536): 1.2, (64, 65536): 1.5}
"""Forward, backward and update of FBGEMM 1.6's table-batched embedding bags, fp32, on the same
tables and an H100 80 GB with PyTorch 2.11; SGD and row-wise Adagrad alike (dim 64: 1.5 to 2.2)."""


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--one-table", action="store_true", help="every optimizer, at FBGEMM's shape")
    add("--dims", type=count_arg, nargs="+", help="(default: 16 64; of one table 16 to 256)")
    add("--rules", nargs="+", choices=RULES, help="(default: sgd rowwise_adagrad; of one: all)")
    add("--batches", type=count_arg, nargs="+", default=[2048, 16384, 65536])
    add("--lookups", type=count_arg, default=1 << 20, help="of one table")
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    add("--max-rows", type=count_arg, help="cap the rows of a table (small GPUs)")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure all tables or one."""
    torch.manual_seed(0)
    bandwidth = harness.copy_bandwidth()
    record.note(copy_bandwidth_bytes_per_second=round(bandwidth))
    if options.one_table:
        measure_one_table(options, record, bandwidth)
    else:
        measure_tables(options, record, bandwidth)


def measure_tables(options: argparse.Namespace, record: harness.Record, bandwidth: float) -> None:
    """All Kaggle tables, beside other look-ups."""
    rows = [min(table, options.max_rows or table) for table in KAGGLE_CARDINALITIES]
    record.note(unit="ms", tables=f"Kaggle, {sum(rows):,} rows")
    for dim, dtype in product(options.dims or [16, 64], options.dtypes):
        setup = Setup(rows, dim, getattr(torch, dtype), options.device)
        for batch, skew in product(options.batches, ("uniform", "skewed")):
            draw = partial(draw_ids, rows, batch, options.device, skewed=skew == "skewed")
            setup.use([draw() for _ in range(INPUTS)])

            shared: dict[str, Any] = {"dim": dim, "dtype": dtype, "batch": batch, "ids": skew}
            shared |= peers(setup)
            for name in options.rules or ["sgd", "rowwise_adagrad"]:
                rule = make_rule(name)
                row = shared | {"rule": name, "error": check(setup, rule)}
                row["distinct"] = setup.distinct / setup.lookups

                floors = setup.floors(rule, bandwidth)
                row |= {f"{part}_floor": floors[part] for part in ("forward", "update")}
                row |= setup.parts() | {"update": setup.update_milliseconds(rule)}
                steps = setup.steps(rule)
                row |= {"all": harness.captured_milliseconds(steps), "all_eager": eager(steps)}
                if (dim, batch) in FBGEMM_MS:
                    row["fbgemm"] = FBGEMM_MS[dim, batch]

                record.add(row)
        del setup


def measure_one_table(
    options: argparse.Namespace, record: harness.Record, bandwidth: float
) -> None:
    """Every optimizer, with ids of either type."""
    rows = options.max_rows or 24_000_000
    record.note(rows=rows, lookups=options.lookups, exponent=EXPONENT)
    for dim in options.dims or [16, 32, 64, 128, 256]:
        setup = Setup([rows], dim, torch.float32, options.device)

        drawn = [power_law(rows, options.lookups, options.device)[None] for _ in range(INPUTS)]

        updates: dict[str, float] = {}
        for kind in TYPES:
            setup.use([ids.to(TYPES[kind]) for ids in drawn])
            shared = {f"{part}_ms": ms for part, ms in setup.parts().items()}
            for name in options.rules or list(RULES):
                rule = make_rule(name)
                updates[name] = update = updates.get(name) or setup.update_milliseconds(rule)

                floors = setup.floors(rule, bandwidth)
                whole = harness.captured_milliseconds(setup.steps(rule))

                row = {"dim": dim, "rule": name, "ids": kind}
                row |= {"distinct": setup.distinct / setup.lookups, **shared}
                row |= {"update_ms": update, "all_ms": whole}
                row |= {f"{part}_floor_ms": floor for part, floor in floors.items()}
                row |= {"floor_ms": sum(floors.values())}
                row |= {"times_floor": whole / sum(floors.values())}
                record.add(row | {"update_times_floor": update / floors["update"]})
        del setup
        harness.release()


class Setup:
    """Tables of one dim, and batches of look-ups in them with their gradients."""

    def __init__(self, rows: Sequence[int], dim: int, dtype: torch.dtype, device: str) -> None:
        self.rows = rows
        self.dim = dim
        self.device = device
        weight = torch.empty(sum(rows), dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight.normal_(std=0.01))
        self.starts = torch.tensor([0, *rows[:-1]], device=device).cumsum(0)
        self.lr = torch.tensor(0.01, device=device)

    def use(self, ids: Sequence[Tensor]) -> None:
        """Look up these batches ``[F, B]``."""
        self.ids = ids
        self.lookups = ids[0].numel()
        shape = (ids[0].shape[1], len(self.rows), self.dim)
        dtype = self.weight.dtype
        self.grads = [torch.randn(shape, device=self.device).to(dtype) for _ in ids]
        self.flat = [(batch.long() + self.starts[:, None]).t().flatten() for batch in ids]
        self.plans = [sort_rows(flat, len(self.weight)) for flat in self.flat]
        self.distinct = sum(flat.unique().numel() for flat in self.flat) / len(ids)

    def states(self, rule: Rule, rows: int | None = None) -> list[Tensor]:
        """The state of a rule for the tables, or for so many rows: zeros."""
        count = rows or len(self.weight)
        widths = (1 if per_row else self.dim for per_row in rule.states.values())
        return [torch.zeros(count, width, device=self.device) for width in widths]

    def floors(self, rule: Rule, bandwidth: float) -> dict[str, float]:
        """Least ms for the bytes: every distinct row, id, output and gradient once."""
        row = self.dim * self.weight.element_size()
        state = sum(4 if per_row else 4 * self.dim for per_row in rule.states.values())
        moved = {
            "forward": self.lookups * (self.ids[0].element_size() + row) + self.distinct * row,
            "sort": self.lookups * SORT_BYTES,
            "update": self.lookups * (12 + row) + self.distinct * 2 * (row + state),
        }
        return {part: size / bandwidth * 1e3 for part, size in moved.items()}

    def parts(self) -> dict[str, float]:
        """Milliseconds of what all rules share."""
        weight, flat = self.weight.detach(), torch.empty_like(self.flat[0])
        out = torch.empty_like(self.grads[0])
        gather = partial(gather_rows, Weight(weight), TableRows(self.starts))
        return {
            "forward": harness.captured_milliseconds(
                [partial(gather, ids, out, flat) for ids in self.ids]
            ),
            "sort": harness.captured_milliseconds(
                [partial(sort_rows, rows, len(weight)) for rows in self.flat]
            ),
        }

    def update_milliseconds(self, rule: Rule) -> float:
        """Milliseconds of the update, with the look-ups sorted."""
        states, weight = self.states(rule), self.weight.detach()

        def update(plan: SortedRows, grad: Tensor) -> None:
            update_rows(rule, weight, plan.rows, grad, states, lr=self.lr, sorted_rows=plan)

        grads = [grad.view(-1, self.dim) for grad in self.grads]
        pairs = zip(self.plans, grads, strict=True)
        return harness.captured_milliseconds([partial(update, *pair) for pair in pairs])

    def steps(self, rule: Rule) -> list[Callable[[], None]]:
        """Forward, backward and update of each batch through autograd, the sort included."""
        states = self.states(rule)
        pairs = zip(self.ids, self.grads, strict=True)
        return [partial(self.step, ids, grad, rule, states) for ids, grad in pairs]

    def step(self, ids: Tensor, grad: Tensor, rule: Rule, states: list[Tensor]) -> None:
        """One of :meth:`steps`."""
        lookup_tables(self.weight, TableRows(self.starts), ids).backward(grad)
        gradient = self.weight.grad
        assert gradient is not None
        rows, values = gradient._indices()[0], gradient._values()
        update_rows(rule, self.weight.data, rows, values, states, lr=self.lr)
        self.weight.grad = None


def check(setup: Setup, rule: Rule) -> float:
    """Relative RMS error of what a whole step moves, against PyTorch in float64.

    Raises:
        ValueError: it is larger than rounding explains.
    """
    ids, grad = setup.ids[0], setup.grads[0]
    rows, local = setup.flat[0].unique(return_inverse=True)
    # Steps timed before have moved frequent rows so far from 0 that a step is lost in rounding.
    setup.weight.data[rows] = torch.randn_like(setup.weight.data[rows])
    before = setup.weight.detach()[rows].double()
    out = lookup_tables(setup.weight, TableRows(setup.starts), ids)
    right = torch.equal(out.view(-1, setup.dim), setup.weight[setup.flat[0]])
    harness.require(right, "the look-up differs from indexing")

    exact = before.clone()
    states = [s.double() if s.is_floating_point() else s for s in setup.states(rule, len(rows))]
    exact_grad = grad.view(-1, setup.dim).double()
    update_rows_torch(rule, exact, local, exact_grad, states, lr=setup.lr.double())
    setup.step(ids, grad, rule, setup.states(rule))
    moved = setup.weight.detach()[rows].double() - before
    error = harness.relative_error(moved, exact - before)
    allowed = 1e-4 if setup.weight.dtype == torch.float32 else 1e-1
    harness.require(error < allowed, f"{rule.name} differs from PyTorch by {error:.1e}")
    return error


def peers(setup: Setup) -> dict[str, float]:
    """PyTorch with SGD, eager: one nn.EmbeddingBag a table, and one joint nn.Embedding; in ms."""
    optimizer = torch.optim.SGD([setup.weight], lr=0.01)
    offsets = torch.arange(setup.ids[0].shape[1], device=setup.device).int()
    bags = [nn.EmbeddingBag(1, setup.dim, mode="sum", sparse=True) for _ in setup.rows]
    for bag, table in zip(bags, setup.weight.detach().split(list(setup.rows)), strict=True):
        bag.weight = nn.Parameter(table)
    bag_optimizer = torch.optim.SGD([bag.weight for bag in bags], lr=0.01)

    def separate(ids: Tensor, grad: Tensor) -> None:
        pooled = [bag(one, offsets) for bag, one in zip(bags, ids, strict=True)]
        torch.stack(pooled, dim=1).backward(grad)
        bag_optimizer.step()
        bag_optimizer.zero_grad()

    def joint(ids: Tensor, grad: Tensor) -> None:
        rows = (ids + setup.starts[:, None]).t()
        functional.embedding(rows, setup.weight, sparse=True).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    pairs = list(zip(setup.ids, setup.grads, strict=True))
    times: dict[str, Callable[..., None]] = {"embedding_bags": separate, "joint_embedding": joint}
    return {name: eager([partial(work, *pair) for pair in pairs]) for name, work in times.items()}


def eager(works: Sequence[Callable[[], object]]) -> float:
    """Median ms of one of ``works`` called from Python in turn, launches included."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = lambda index: works[index % len(works)]()  # noqa: E731
    return harness.milliseconds(run, device, warm_up=len(works), steps=20)
