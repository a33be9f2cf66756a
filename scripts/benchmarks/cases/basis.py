"""Time a basis (codebook) output layer and ``nn.Linear``, forward and backward.

    python scripts/benchmarks/run.py basis --output benchmarks/basis_h100.json
    python scripts/benchmarks/run.py basis --device cpu --output benchmarks/basis_cpu.json

On a CPU: evaluation and training on all cores that the process may use. Logits or gradients that
differ from those of the decoded weight in fp32 are an error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.basis_linear import BasisLinear
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness

SMALL = "--hidden 64 --vocabulary 1000 --tokens 16 --clusters 40 --repeats 1"
INPUTS = 4  # different inputs in rotation
GPU_SIZES = (2048, 4096), (50_000, 100_000, 150_000, 200_000)
CPU_SIZES = (64, 256, 1024), (20_000, 100_000)
CPU_TOKENS = [(1, False), (2, False), (8, False), (32, False), (8, True), (128, True)]
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-3}


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--hidden", type=count_arg, nargs="+", help="inputs (default: 2048 4096; CPU: 64 256 1024)")
    add("--vocabulary", type=count_arg, nargs="+", help="outputs (default: from 20,000 to 200,000)")
    add("--tokens", type=count_arg, default=128, help="on a GPU; on a CPU from 1 to 128")
    add("--parts", type=count_arg, default=8)
    add("--clusters", type=count_arg, default=384)
    add("--dtype", default="float16", choices=["float16", "bfloat16", "float32"], help="on a GPU")
    add("--repeats", type=count_arg, default=25, help="of each time on a CPU")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every size."""
    on_gpu = options.device != "cpu"
    dtype = getattr(torch, options.dtype) if on_gpu else torch.float32
    torch.set_num_threads(cpu_count())
    layer = {"parts": options.parts, "clusters": options.clusters}
    record.note(unit="ms", dtype=str(dtype).removeprefix("torch."), **layer)

    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    for hidden in options.hidden or sizes[0]:
        for entries in options.vocabulary or sizes[1]:
            shared = {"device": options.device, "dtype": dtype, **layer}
            ours = BasisLinear(hidden, entries, **shared)
            if on_gpu:
                record.add(compare(ours, options.tokens))
                continue
            for tokens, backward in CPU_TOKENS:
                record.add(compare_on_cpu(ours, tokens, backward, options.repeats))


def compare(ours: BasisLinear, tokens: int) -> dict[str, Any]:
    """Times in ms of a basis layer and of a linear layer of the same size, on a GPU."""
    hidden, entries, dtype = ours.in_features, ours.out_features, ours.weight.dtype
    device = ours.weight.device
    inputs = [
        torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        for _ in range(INPUTS)
    ]
    up = torch.randn(tokens, entries, device=device, dtype=dtype)
    result: dict[str, Any] = {"hidden": hidden, "vocabulary": entries, "tokens": tokens}

    result["errors"] = check(ours, inputs[0], up)
    linear = nn.Linear(hidden, entries, device=device, dtype=dtype)
    result["basis_MB"] = sum(ours.footprint().values()) / 1e6
    result["linear_MB"] = sum(p.nbytes for p in linear.parameters()) / 1e6

    for name, backward in (("forward", False), ("forward_backward", True)):
        both = {
            kind: harness.captured_milliseconds(works(layer, inputs, up, backward=backward))
            for kind, layer in (("basis", ours), ("linear", linear))
        }
        result |= {f"{kind}_{name}": time for kind, time in both.items()}
        result[f"{name}_times_faster"] = both["linear"] / both["basis"]
    return result


def compare_on_cpu(ours: BasisLinear, tokens: int, backward: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of both layers on the CPU, the fastest of many."""
    hidden, entries = ours.in_features, ours.out_features
    up = torch.randn(tokens, entries)
    inputs = [torch.randn(tokens, hidden, requires_grad=backward)]
    if backward:
        check(ours.train(), inputs[0], up)
    with torch.no_grad():
        logits = functional.linear(inputs[0], ours.eval().to_dense(), ours.bias)
        error = (ours(inputs[0]) - logits).abs().max().item()

    harness.require(error < 1e-4, f"logits differ by {error:.1e}")

    ours.train(backward)
    layers: dict[str, nn.Module] = {"basis": ours, "linear": nn.Linear(hidden, entries)}
    times = dict.fromkeys(layers, math.inf)
    for _, (name, layer) in itertools.product(range(repeats), layers.items()):
        (work,) = works(layer, inputs, up, backward=backward)
        start = time.perf_counter()
        work()
        times[name] = min(times[name], 1e3 * (time.perf_counter() - start))

    row = {"hidden": hidden, "vocabulary": entries, "tokens": tokens, "backward": backward}
    return {**row, **times, "times_faster": times["linear"] / times["basis"]}


def check(layer: BasisLinear, tokens: Tensor, up: Tensor) -> dict[str, float]:
    """Relative RMS errors of logits and gradients against a linear layer in fp32.

    Raises:
        ValueError: one is larger than rounding explains.
    """
    dense = layer.to_dense().float().requires_grad_()
    bias = layer.bias.detach().float() if layer.bias is not None else None
    exact_input = tokens.detach().float().requires_grad_()
    exact = functional.linear(exact_input, dense, bias)

    input_grad, weight_grad = torch.autograd.grad(exact, [exact_input, dense], up.float())
    out = layer(tokens)
    grads = torch.autograd.grad(out, [tokens, layer.weight], up)

    # The gradient of the decoded weight, summed over the entries of each centroid.
    codes = layer.codes_of_outputs().t()
    pieces = weight_grad.chunk(layer.parts, 1)
    centroids = torch.stack(
        [
            torch.zeros_like(part, dtype=torch.float32).index_add_(0, names, piece)
            for part, names, piece in zip(layer.weight, codes, pieces, strict=True)
        ]
    )

    errors = {
        "logits": harness.relative_error(out, exact),
        "gradient of the input": harness.relative_error(grads[0], input_grad),
        "gradient of the centroids": harness.relative_error(grads[1], centroids),
    }
    for name, error in errors.items():
        harness.require(error < TOLERANCE[tokens.dtype], f"{name} differ by {error:.1e}")
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
