"""Time a look-up with its update under every rule, at the shape that FBGEMM publishes.

    python scripts/benchmarks/benchmark_rules.py --output benchmarks/rules_h200.json

One table of 24 million rows in fp32 and 1,048,576 look-ups of it from a power law of exponent 1.05:
forward, sort and update, captured as a CUDA graph, next to the least time in which the bytes can be
moved. FBGEMM takes 0.96 ms with SGD and 1.35 ms with Adam at dim 128 on an H100 (published).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels.lookup.tables import TableRows, gather_rows, lookup_tables
from dlrm.kernels.update.row_sort import sort_rows
from dlrm.kernels.update.rules import RULES, Rule, make_rule
from dlrm.kernels.update.sparse import update_rows
from dlrm.training import benchmark
from dlrm.utils.program import Parser, count_arg, exit_status

INPUTS = 4  # different batches in rotation
SORT_BYTES = 4 * 2 * (4 + 8)  # of a look-up: 4 passes over a key and an index, read and written
TYPES = {"int32": torch.int32, "int64": torch.int64}


def states_of(rule: Rule, weight: Tensor) -> list[Tensor]:
    """The state of a rule for a table, zeros."""
    widths = (1 if per_row else weight.shape[1] for per_row in rule.states.values())
    return [torch.zeros(len(weight), width, device=weight.device) for width in widths]


def floors(rule: Rule, dim: int, lookups: int, distinct: float, id_bytes: int) -> dict[str, float]:
    """The least bytes of each part: every distinct row once, every vector and gradient once."""
    row = 4 * dim
    state = sum(4 if per_row else row for per_row in rule.states.values())
    return {
        "forward": lookups * (id_bytes + row) + distinct * row,
        "sort": lookups * SORT_BYTES,
        "update": lookups * (12 + row) + distinct * 2 * (row + state),
    }


def whole(weight: Tensor, start: Tensor, ids: Tensor, grad: Tensor, update: Any) -> None:
    """Forward, backward and update through autograd, the sort included."""
    lookup_tables(weight, TableRows(start), ids).backward(grad)
    gradient = weight.grad
    assert gradient is not None
    update(weight.detach(), gradient._indices()[0], gradient._values())
    weight.grad = None


class Setup:
    """A table of one dim, and batches of look-ups with ids of one type and their gradients."""

    def __init__(self, weight: Tensor, drawn: list[Tensor], dtype: torch.dtype) -> None:
        self.weight, self.batches = weight, [ids.to(dtype) for ids in drawn]
        lookups, dim = drawn[0].numel(), weight.shape[1]
        self.grads = [torch.randn(lookups, 1, dim, device="cuda") for _ in drawn]
        flat = [ids[0].long() for ids in drawn]
        self.sorted_rows = [sort_rows(rows, len(weight)) for rows in flat]
        self.distinct = sum(rows.unique().numel() for rows in flat) / len(flat)
        self.start = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.lr = torch.tensor(0.01, device="cuda")
        out = torch.empty_like(self.grads[0])
        timed, own = benchmark.captured_milliseconds, weight.detach()
        self.shared = {  # by all rules
            "forward_ms": timed(
                [partial(gather_rows, own, TableRows(self.start), ids, out) for ids in self.batches]
            ),
            "sort_ms": timed([partial(sort_rows, rows, len(weight)) for rows in flat]),
        }

    def update_milliseconds(self, rule: Rule) -> float:
        """Milliseconds of the update, which does not depend on the type of the ids."""
        update = partial(update_rows, rule, states=states_of(rule, self.weight), lr=self.lr)
        own, plans = self.weight.detach(), zip(self.sorted_rows, self.grads, strict=True)
        return benchmark.captured_milliseconds(
            [partial(update, own, plan.rows, grad[:, 0], sorted_rows=plan) for plan, grad in plans]
        )

    def measure(self, rule: Rule, update_ms: float, bandwidth: float) -> dict[str, Any]:
        """Milliseconds of the parts and of the whole, and by how much it exceeds its bytes."""
        weight, lookups = self.weight, self.batches[0].numel()
        update = partial(update_rows, rule, states=states_of(rule, weight), lr=self.lr)
        pairs = list(zip(self.batches, self.grads, strict=True))
        times = {
            **self.shared,
            "update_ms": update_ms,
            "all_ms": benchmark.captured_milliseconds(
                [partial(whole, weight, self.start, *pair, update) for pair in pairs]
            ),
        }
        id_bytes = self.batches[0].element_size()
        needed = floors(rule, weight.shape[1], lookups, self.distinct, id_bytes)
        floor = sum(needed.values()) / bandwidth * 1e3
        return {
            "distinct": round(self.distinct / lookups, 3),
            **{name: round(ms, 4) for name, ms in times.items()},
            **{f"{name}_floor_ms": round(b / bandwidth * 1e3, 4) for name, b in needed.items()},
            "floor_ms": round(floor, 4),
            "times_floor": round(times["all_ms"] / floor, 2),
            "update_times_floor": round(update_ms / needed["update"] * bandwidth / 1e3, 2),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--dims", type=count_arg, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--ids", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rows", type=count_arg, default=24_000_000, help="of the table")
    parser.add_argument("--lookups", type=count_arg, default=1 << 20)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = benchmark.parse_on_gpu(parser, argv)
    return exit_status(lambda: measure_all(options))


def measure_all(options: Any) -> None:
    """Measure every case, and write after each dim."""
    torch.manual_seed(0)
    bandwidth = benchmark.copy_bandwidth()
    results: list[dict[str, Any]] = []
    for dim in options.dims:
        weight = torch.empty(options.rows, dim, device="cuda").normal_(std=0.01).requires_grad_()
        drawn = [benchmark.power_law(options.rows, options.lookups)[None] for _ in range(INPUTS)]
        updates: dict[str, float] = {}
        for kind in options.ids:
            setup = Setup(weight, drawn, TYPES[kind])
            for name in options.rules:
                rule = make_rule(name)
                if name not in updates:
                    updates[name] = setup.update_milliseconds(rule)
                found = setup.measure(rule, updates[name], bandwidth)
                results.append({"dim": dim, "rule": name, "ids": kind, **found})
                print(json.dumps(results[-1]), flush=True)
        del weight, setup
        benchmark.release()
        if options.output:
            about = {
                "rows": options.rows,
                "lookups": options.lookups,
                "exponent": benchmark.EXPONENT,
            }
            about |= {"copy_bandwidth_bytes_per_second": round(bandwidth)}
            benchmark.write(options.output, {**about, "results": results})


if __name__ == "__main__":
    sys.exit(main())
