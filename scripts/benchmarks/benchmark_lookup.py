"""Time dense table-batched look-ups on a GPU: forward, sort, update, and the whole step.

    python scripts/benchmarks/benchmark_lookup.py --output benchmarks/lookup.json

All 26 Kaggle tables, captured as a CUDA graph and eager, uniform and skewed ids, compared with
``nn.EmbeddingBag``, one joint ``nn.Embedding``, published figures of FBGEMM, and the least time in
which the bytes can be moved. Reports nothing if a result differs from PyTorch's in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.kernels.lookup.tables import TableRows, gather_rows, lookup_tables
from dlrm.kernels.update.row_sort import SortedRows, sort_rows
from dlrm.kernels.update.rules import RULES
from dlrm.kernels.update.sparse import update_rows, update_rows_torch
from dlrm.training import benchmark
from dlrm.utils.program import Parser

INPUTS = 4  # different batches in rotation
FBGEMM_MS = {(16, 2048): 1.02, (16, 65536): 1.2, (64, 65536): 1.5}
"""Forward, backward and update of FBGEMM 1.6's table-batched embedding bags, fp32, on the same
tables and an H100 80 GB with PyTorch 2.11; SGD and row-wise Adagrad alike (dim 64: 1.5 to 2.2)."""


class Setup:
    """Tables of one dim and the batches of one size and skew that are looked up in them."""

    def __init__(self, rows: Sequence[int], dim: int, dtype: torch.dtype, weight: Tensor) -> None:
        self.rows, self.dim, self.weight = rows, dim, weight
        self.starts = torch.tensor([0, *rows[:-1]], device="cuda").cumsum(0)
        self.lr = torch.tensor(0.01, device="cuda")

    def draw(self, batch: int, skew: str) -> None:
        """New ids ``[F, B]`` int32, and gradients for them."""
        skewed = skew == "skewed"
        self.ids = [
            benchmark.draw_ids(self.rows, batch, "cuda", skewed=skewed) for _ in range(INPUTS)
        ]
        shape = (batch, len(self.rows), self.dim)
        self.grads = [
            torch.randn(shape, device="cuda").to(self.weight.dtype) for _ in range(INPUTS)
        ]
        self.flat = [(ids + self.starts[:, None]).t().flatten() for ids in self.ids]
        self.out = torch.empty(shape, device="cuda", dtype=self.weight.dtype)


def states_of(rule: str, weight: Tensor) -> list[Tensor]:
    """The rule's state for a table."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(len(weight), *shape, device=weight.device)

    dim = weight.shape[1]
    if rule == "adam":
        return [zeros(dim), zeros(dim), zeros().int()]
    if rule == "sgd":
        return []
    return [zeros(dim) if rule == "adagrad" else zeros()]


def whole(setup: Setup, ids: Tensor, grad: Tensor, rule: str, states: list[Tensor]) -> None:
    """Forward, backward and update through autograd, the sort included."""
    out = lookup_tables(setup.weight, TableRows(setup.starts), ids)
    out.backward(grad)
    gradient = setup.weight.grad
    assert gradient is not None
    rows, values = gradient._indices()[0], gradient._values()
    update_rows(rule, setup.weight.data, rows, values, states, lr=setup.lr)
    setup.weight.grad = None


def check(setup: Setup, rule: str) -> float:
    """Relative RMS error of what a whole step moves, against PyTorch in float64.

    Raises:
        SystemExit: it is larger than rounding explains.
    """
    ids, grad = setup.ids[0], setup.grads[0]
    rows, local = setup.flat[0].unique(return_inverse=True)
    # Steps timed before have moved frequent rows so far from 0 that a step is lost in rounding.
    setup.weight.data[rows] = torch.randn_like(setup.weight.data[rows])
    before = setup.weight.detach()[rows].double()
    exact = before.clone()
    states, exact_states = states_of(rule, setup.weight), states_of(rule, exact)
    exact_states = [s.double() if s.is_floating_point() else s for s in exact_states]
    flat_grad = grad.view(-1, setup.dim).double()
    update_rows_torch(rule, exact, local, flat_grad, exact_states, lr=setup.lr.double())
    out = lookup_tables(setup.weight, TableRows(setup.starts), ids)
    if not torch.equal(out.view(-1, setup.dim), setup.weight[setup.flat[0]]):
        raise SystemExit("the look-up differs from indexing: nothing is reported")
    whole(setup, ids, grad, rule, states)
    moved = setup.weight.detach()[rows].double() - before
    error = ((moved - (exact - before)).norm() / (exact - before).norm()).item()
    if not error < (1e-4 if setup.weight.dtype == torch.float32 else 1e-1):
        raise SystemExit(f"{rule} differs from PyTorch by {error:.1e}: nothing is reported")
    return error


def floors(setup: Setup, rule: str, bandwidth: float) -> dict[str, float]:
    """Least ms for the bytes: every distinct row, id, output and gradient once (no sort)."""
    entries = setup.flat[0].numel()
    distinct = sum(flat.unique().numel() for flat in setup.flat) / INPUTS
    row = setup.dim * setup.weight.element_size()
    state = {"sgd": 0, "adagrad": 4 * setup.dim, "rowwise_adagrad": 4, "adam": 8 * setup.dim + 4}
    forward = entries * (4 + row) + distinct * row
    update = entries * (4 + row) + distinct * 2 * (row + state[rule])
    return {
        "distinct": round(distinct / entries, 3),
        "forward_floor": forward / bandwidth * 1e3,
        "update_floor": update / bandwidth * 1e3,
    }


def ours(setup: Setup, rule: str) -> dict[str, float]:
    """Times of the parts and of the whole, in ms."""
    states = states_of(rule, setup.weight)
    plans = [sort_rows(flat, len(setup.weight)) for flat in setup.flat]
    grads = [grad.view(-1, setup.dim) for grad in setup.grads]
    flat = torch.empty_like(setup.flat[0])
    weight = setup.weight.detach()

    def update(plan: SortedRows, grad: Tensor) -> None:
        update_rows(rule, weight, plan.rows, grad, states, lr=setup.lr, sorted_rows=plan)

    gather = partial(gather_rows, weight, TableRows(setup.starts))
    steps = [
        partial(whole, setup, ids, grad, rule, states)
        for ids, grad in zip(setup.ids, setup.grads, strict=True)
    ]
    return {
        "forward": benchmark.captured_milliseconds(
            [partial(gather, ids, setup.out, flat) for ids in setup.ids]
        ),
        "sort": benchmark.captured_milliseconds(
            [partial(sort_rows, rows, len(weight)) for rows in setup.flat]
        ),
        "update": benchmark.captured_milliseconds(
            [partial(update, plan, grad) for plan, grad in zip(plans, grads, strict=True)]
        ),
        "all": benchmark.captured_milliseconds(steps),
        "all_eager": eager(steps),
    }


def eager(works: Sequence[Callable[[], object]]) -> float:
    """Median ms of one of ``works`` called from Python in turn, launches included."""
    return benchmark.gpu_milliseconds(lambda i: works[i % len(works)](), steps=20)


def peers(setup: Setup) -> dict[str, float]:
    """PyTorch with SGD, eager: one nn.EmbeddingBag a table, and one joint nn.Embedding; in ms."""
    optimizer = torch.optim.SGD([setup.weight], lr=0.01)
    batch = setup.ids[0].shape[1]
    offsets = torch.arange(batch, device="cuda")
    bags = [nn.EmbeddingBag(1, setup.dim, mode="sum", sparse=True) for _ in setup.rows]
    for bag, table in zip(bags, setup.weight.detach().split(list(setup.rows)), strict=True):
        bag.weight = nn.Parameter(table)
    bag_optimizer = torch.optim.SGD([bag.weight for bag in bags], lr=0.01)

    def separate(ids: Tensor, grad: Tensor) -> None:
        pooled = [bag(one, offsets.int()) for bag, one in zip(bags, ids, strict=True)]
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="embedding dims")
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 16384, 65536])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["sgd", "rowwise_adagrad"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--max-rows", type=int, help="cap the rows of a table (small GPUs)")
    parser.add_argument("--no-peers", action="store_true", help="leave out PyTorch's look-ups")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = benchmark.parse_on_gpu(parser, argv)
    torch.manual_seed(0)
    rows = [min(v, options.max_rows or v) for v in KAGGLE_CARDINALITIES]
    bandwidth = benchmark.copy_bandwidth()
    results: list[dict[str, Any]] = []
    for dim in options.dims:
        for name in options.dtypes:
            dtype = getattr(torch, name)
            weight = torch.empty(sum(rows), dim, device="cuda", dtype=dtype)
            weight = nn.Parameter(weight.normal_(std=0.01))
            setup = Setup(rows, dim, dtype, weight)
            for batch in options.batches:
                for skew in ("uniform", "skewed"):
                    setup.draw(batch, skew)
                    shared = {"dim": dim, "dtype": name, "batch": batch, "ids": skew}
                    if not options.no_peers:
                        shared |= peers(setup)
                    for rule in options.rules:
                        result = {**shared, "rule": rule, "error": check(setup, rule)}
                        result |= floors(setup, rule, bandwidth) | ours(setup, rule)
                        if (dim, batch) in FBGEMM_MS:
                            result["fbgemm"] = FBGEMM_MS[dim, batch]
                        results.append({k: _round(v) for k, v in result.items()})
                        print(json.dumps(results[-1]), flush=True)
            del weight, setup
    record = {
        "copy_bandwidth_bytes_per_second": round(bandwidth),
        "unit": "ms",
        "tables": f"Kaggle, {sum(rows):,} rows",
        "results": results,
    }
    if options.output:
        benchmark.write(options.output, record)


def _round(value: Any) -> Any:
    if not isinstance(value, float) or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))


if __name__ == "__main__":
    main()
