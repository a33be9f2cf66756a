"""Time the dot interaction on a GPU, forward and backward, compared with PyTorch's and a bound.

    python scripts/benchmarks/run.py interaction --output benchmarks/interaction_h100.json

Captured as a CUDA graph. The bound is the least time in which the bytes can be moved. A result that
differs from PyTorch's in float64 is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dlrm.kernels.interaction import dot_interaction, dot_interaction_torch
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness

NEEDS_GPU = True
SMALL = "--dims 16 --batches 30 --tables 3 --types float32"
INPUTS = 2  # batches in rotation, each larger than the cache at the sizes that matter
TYPES = {  # bottom vector and products, embeddings
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--tables", type=count_arg, default=26, help="number of tables F")
    add("--dims", type=count_arg, nargs="+", default=[16, 64], help="embedding dims")
    add("--batches", type=count_arg, nargs="+", default=[2048, 16384, 65536])
    add("--types", nargs="+", choices=TYPES, default=list(TYPES))


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every case."""
    torch.manual_seed(0)
    bandwidth = harness.copy_bandwidth()
    about = {"copy_bandwidth_bytes_per_second": round(bandwidth), "unit": "ms"}
    record.note(**about, tables=options.tables)

    for dim, size, types in product(options.dims, options.batches, options.types):
        given = (size, options.tables, dim, types, options.device)
        batches = [Inputs(*given) for _ in range(INPUTS)]
        error = check(batches[0], types)
        floor = {part: moved / bandwidth * 1e3 for part, moved in batches[0].bytes().items()}
        ours, peer = times(dot_interaction, batches), times(dot_interaction_torch, batches)
        row: dict[str, object] = {"dim": dim, "batch": size, "types": types}
        for part in ("forward", "backward"):
            row |= {part: ours[part], f"{part}_floor": floor[part], f"{part}_torch": peer[part]}
        record.add(row | {"error": error})


class Inputs:
    """Vectors of one batch, and a gradient of their interaction."""

    def __init__(self, batch: int, tables: int, dim: int, types: str, device: str) -> None:
        dtype, embedded = TYPES[types]
        width = dim + tables * (tables + 1) // 2
        self.bottom = torch.randn(batch, dim, device=device, dtype=dtype).requires_grad_()
        self.embedded = torch.randn(batch, tables, dim, device=device).to(embedded)
        self.embedded.requires_grad_()
        self.grad = torch.randn(batch, width, device=device, dtype=dtype)

    def bytes(self) -> dict[str, int]:
        """Bytes that forward and backward must move."""
        inputs = self.bottom.nbytes + self.embedded.nbytes
        return {"forward": inputs + self.grad.nbytes, "backward": 2 * inputs + self.grad.nbytes}


def check(batch: Inputs, types: str) -> float:
    """Largest relative RMS error of output and gradients, on the first samples.

    Raises:
        ValueError: it is larger than rounding explains.
    """
    few = slice(0, 512)
    inputs = [x.detach()[few].requires_grad_() for x in (batch.bottom, batch.embedded)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for op, x, grad in (
        (dot_interaction, inputs, batch.grad[few]),
        (dot_interaction_torch, doubles, batch.grad[few].double()),
    ):
        out = op(*x)
        results.append((out, *torch.autograd.grad(out, x, grad)))

    error = max(harness.relative_error(*pair) for pair in zip(*results, strict=True))
    right = error < (1e-6 if types == "float32" else 8e-3)
    harness.require(right, f"{types} differs from PyTorch by {error:.1e}")
    return error


def times(op: Callable[..., Tensor], batches: Sequence[Inputs]) -> dict[str, float]:
    """Captured times of forward, and of forward and backward less the forward, in ms."""

    def both(batch: Inputs) -> None:
        batch.bottom.grad = batch.embedded.grad = None
        op(batch.bottom, batch.embedded).backward(batch.grad)

    forward = harness.captured_milliseconds(
        [partial(op, batch.bottom.detach(), batch.embedded.detach()) for batch in batches]
    )
    whole = harness.captured_milliseconds([partial(both, batch) for batch in batches])
    return {"forward": forward, "backward": whole - forward}
