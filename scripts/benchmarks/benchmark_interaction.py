"""Time the dot interaction on a GPU, forward and backward, compared with PyTorch's and a bound.

    python scripts/benchmarks/benchmark_interaction.py --output benchmarks/interaction.json

Captured as a CUDA graph. The bound is the least time in which the bytes can be moved. Reports
nothing if a result differs from PyTorch's in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels.interaction import dot_interaction, dot_interaction_torch
from dlrm.training import benchmark
from dlrm.utils.program import Parser

INPUTS = 2  # batches in rotation, each larger than the cache at the sizes that matter
TYPES = {  # bottom vector and products, embeddings
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}


class Inputs:
    """Vectors of one batch, and a gradient of their interaction."""

    def __init__(self, batch: int, tables: int, dim: int, types: str) -> None:
        dtype, embedded = TYPES[types]
        width = dim + tables * (tables + 1) // 2
        self.bottom = torch.randn(batch, dim, device="cuda", dtype=dtype).requires_grad_()
        self.embedded = torch.randn(batch, tables, dim, device="cuda").to(embedded)
        self.embedded.requires_grad_()
        self.grad = torch.randn(batch, width, device="cuda", dtype=dtype)

    def bytes(self) -> dict[str, int]:
        """Bytes that forward and backward must move."""
        inputs = self.bottom.nbytes + self.embedded.nbytes
        return {"forward": inputs + self.grad.nbytes, "backward": 2 * inputs + self.grad.nbytes}


def check(batch: Inputs, types: str) -> float:
    """Largest relative RMS error of output and gradients, on the first samples.

    Raises:
        SystemExit: it is larger than rounding explains.
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
    pairs = zip(*results, strict=True)
    error = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
    if not error < (1e-6 if types == "float32" else 8e-3):
        raise SystemExit(f"{types} differs from PyTorch by {error:.1e}: nothing is reported")
    return error


def times(op: Callable[..., Tensor], batches: Sequence[Inputs]) -> dict[str, float]:
    """Captured times of forward, and of forward and backward less the forward, in ms."""

    def both(batch: Inputs) -> None:
        batch.bottom.grad = batch.embedded.grad = None
        op(batch.bottom, batch.embedded).backward(batch.grad)

    forward = benchmark.captured_milliseconds(
        [partial(op, x.bottom.detach(), x.embedded.detach()) for x in batches]
    )
    whole = benchmark.captured_milliseconds([partial(both, batch) for batch in batches])
    return {"forward": forward, "backward": whole - forward}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = Parser(__doc__)
    parser.add_argument("--tables", type=int, default=26, help="number of tables F")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="embedding dims")
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 16384, 65536])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = benchmark.parse_on_gpu(parser, argv)
    torch.manual_seed(0)
    bandwidth = benchmark.copy_bandwidth()
    results: list[dict[str, Any]] = []
    for dim in options.dims:
        for size in options.batches:
            for types in options.types:
                batches = [Inputs(size, options.tables, dim, types) for _ in range(INPUTS)]
                error = check(batches[0], types)
                floor = {k: n / bandwidth * 1e3 for k, n in batches[0].bytes().items()}
                own, peer = times(dot_interaction, batches), times(dot_interaction_torch, batches)
                result: dict[str, Any] = {"dim": dim, "batch": size, "types": types}
                for part in ("forward", "backward"):
                    result |= {
                        part: round(own[part], 5),
                        f"{part}_floor": round(floor[part], 5),
                        f"{part}_torch": round(peer[part], 5),
                    }
                results.append({**result, "error": float(f"{error:.2g}")})
                print(json.dumps(results[-1]), flush=True)
    record = {
        "copy_bandwidth_bytes_per_second": round(bandwidth),
        "unit": "ms",
        "tables": options.tables,
        "results": results,
    }
    if options.output:
        benchmark.write(options.output, record)


if __name__ == "__main__":
    main()
