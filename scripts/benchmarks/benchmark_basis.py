"""Time a basis (codebook) output layer and ``nn.Linear`` on a GPU, forward and backward.

    python scripts/benchmarks/benchmark_basis.py --output benchmarks/basis.json
    python scripts/benchmarks/benchmark_basis.py --cpu --output benchmarks/basis_cpu.json

``--cpu`` times evaluation and training on all cores that the process may use. Reports nothing if
logits or gradients differ from those of the decoded weight in fp32.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.basis_linear import BasisLinear
from dlrm.kernels.lookup.codebook import pack
from dlrm.training import benchmark
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser

INPUTS = 4  # different inputs in rotation
SIZES = list(itertools.product((64, 256, 1024), (20_000, 100_000)))  # of --cpu
CPU_TOKENS = [(1, False), (2, False), (8, False), (32, False), (8, True), (128, True)]
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-3}


def check(layer: BasisLinear, tokens: Tensor, up: Tensor) -> dict[str, float]:
    """Relative RMS errors of logits and gradients against a linear layer in fp32.

    Raises:
        SystemExit: one is larger than rounding explains.
    """
    dense = layer.to_dense().float().requires_grad_()
    bias = layer.bias.detach().float() if layer.bias is not None else None
    exact_input = tokens.detach().float().requires_grad_()
    exact = functional.linear(exact_input, dense, bias)
    exact_grads = torch.autograd.grad(exact, [exact_input, dense], up.float())
    out = layer(tokens)
    grads = torch.autograd.grad(out, [tokens, layer.weight], up)
    # The gradient of the decoded weight, summed over the entries of each centroid.
    codes = layer.codes_of_outputs().t()
    pieces = exact_grads[1].chunk(layer.parts, 1)
    centroids = torch.stack(
        [
            torch.zeros_like(own, dtype=torch.float32).index_add_(0, names, piece)
            for own, names, piece in zip(layer.weight, codes, pieces, strict=True)
        ]
    )
    pairs = {
        "logits": (out, exact),
        "gradient of the input": (grads[0], exact_grads[0]),
        "gradient of the centroids": (grads[1], centroids),
    }
    errors = {
        name: ((ours.float() - theirs).norm() / theirs.norm()).item()
        for name, (ours, theirs) in pairs.items()
    }
    for name, error in errors.items():
        if not error < TOLERANCE[tokens.dtype]:
            raise SystemExit(f"{name} differ by {error:.1e}: nothing is reported")
    return errors


def works(
    layer: nn.Module, inputs: list[Tensor], up: Tensor, *, backward: bool
) -> list[Callable[[], object]]:
    """A forward, or forward and backward, of ``layer`` on each of the inputs."""
    parameters = list(layer.parameters())

    def work(tokens: Tensor) -> object:
        if not backward:
            with torch.no_grad():
                return layer(tokens)
        return torch.autograd.grad(layer(tokens), [tokens, *parameters], up)

    return [partial(work, tokens) for tokens in inputs]


def skewed(layer: BasisLinear) -> None:
    """Give the outputs codes of unequal frequency, that of rank r falling as 1 / r."""
    weights = 1 / torch.arange(1, layer.clusters + 1, device="cuda", dtype=torch.float64)
    codes = torch.multinomial(weights, layer.out_features * layer.parts, replacement=True)
    layer.codes.copy_(pack(codes.view(layer.out_features, layer.parts), layer.bits))


def compare(ours: BasisLinear, tokens: int) -> dict[str, Any]:
    """Times in ms of a basis layer and of a linear layer of the same size."""
    hidden, entries, dtype = ours.in_features, ours.out_features, ours.weight.dtype
    inputs = [
        torch.randn(tokens, hidden, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(INPUTS)
    ]
    up = torch.randn(tokens, entries, device="cuda", dtype=dtype)
    result: dict[str, Any] = {"hidden": hidden, "vocabulary": entries, "tokens": tokens}
    result["errors"] = check(ours, inputs[0], up)
    linear = nn.Linear(hidden, entries, device="cuda", dtype=dtype)
    result["basis_MB"] = sum(ours.footprint().values()) / 1e6
    result["linear_MB"] = sum(p.nbytes for p in linear.parameters()) / 1e6
    for name, backward in (("forward", False), ("forward_backward", True)):
        both = {
            kind: benchmark.captured_milliseconds(works(layer, inputs, up, backward=backward))
            for kind, layer in (("basis", ours), ("linear", linear))
        }
        result |= {f"{kind}_{name}": time for kind, time in both.items()}
        result[f"{name}_times_faster"] = both["linear"] / both["basis"]
    skewed(ours)
    again = works(ours, inputs, up, backward=True)
    result["basis_forward_backward_skewed"] = benchmark.captured_milliseconds(again)
    return result


def on_cpu(threads: int) -> list[dict[str, Any]]:
    """Milliseconds of both layers on the CPU, the fastest of many."""
    torch.set_num_threads(threads)
    results = []
    for hidden, entries in SIZES:
        ours, linear = BasisLinear(hidden, entries), nn.Linear(hidden, entries)
        for tokens, backward in CPU_TOKENS:
            up = torch.randn(tokens, entries)
            inputs = [torch.randn(tokens, hidden, requires_grad=backward)]
            if backward:
                check(ours.train(), inputs[0], up)
            with torch.no_grad():
                logits = functional.linear(inputs[0], ours.eval().to_dense(), ours.bias)
                error = (ours(inputs[0]) - logits).abs().max().item()
            if not error < 1e-4:
                raise SystemExit(f"logits differ by {error:.1e}: nothing is reported")
            ours.train(backward)
            row = {"hidden": hidden, "vocabulary": entries, "tokens": tokens, "backward": backward}
            times: dict[str, float] = {"basis": math.inf, "linear": math.inf}
            for _ in range(25):
                for name, layer in (("basis", ours), ("linear", linear)):
                    (work,) = works(layer, inputs, up, backward=backward)
                    start = time.perf_counter()
                    work()
                    times[name] = min(times[name], 1e3 * (time.perf_counter() - start))
            results.append({**row, **times, "times_faster": times["linear"] / times["basis"]})
            print(json.dumps(results[-1]), flush=True)
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure, print a line per case, and write the JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument(
        "--vocabulary", type=int, nargs="+", default=[50_000, 100_000, 150_000, 200_000]
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--clusters", type=int, default=384)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--cpu", action="store_true", help="time both layers on the CPU")
    if parser.parse_args(argv).cpu:
        rows = [_round(row) for row in on_cpu(cpu_count())]
        if output := parser.parse_args(argv).output:
            about = {"unit": "ms", "dtype": "float32", "parts": 8, "clusters": 384}
            benchmark.write(output, {**about, "results": rows})
        return
    options = benchmark.parse_on_gpu(parser, argv)
    parts, clusters, dtype = options.parts, options.clusters, getattr(torch, options.dtype)
    results = []
    for hidden in options.hidden:
        for entries in options.vocabulary:
            ours = BasisLinear(
                hidden, entries, device="cuda", dtype=dtype, parts=parts, clusters=clusters
            )
            found = compare(ours, options.tokens)
            results.append({k: _round(v) for k, v in found.items()})
            print(json.dumps(results[-1]), flush=True)
    if options.output:
        layer = {"dtype": options.dtype, "parts": parts, "clusters": clusters}
        benchmark.write(options.output, {"unit": "ms", **layer, "results": results})


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
