"""Time the tensor-train look-up on a GPU: forward, and forward + backward + SGD.

    python scripts/benchmarks/run.py tt --output benchmarks/tt_h100.json

Captured as a CUDA graph and eager, uniform and skewed ids, in each precision, compared with plain
PyTorch with the same cores, a dense ``nn.EmbeddingBag`` with sparse SGD and as many rows, published
figures of the reference kernel, and two lower bounds: the necessary arithmetic and the necessary
bytes. Rows or gradients that differ from PyTorch's in float64 are an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.common.factorization import factorize_rows
from dlrm.kernels.tt import TTShape, tt_bags, tt_vectors, tt_vectors_torch
from dlrm.optim import RowOptimizer
from dlrm.utils.bags import Bags
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import draw_ids

NEEDS_GPU = True
SMALL = "--cases bags 4-cores 7x2048 --variants tf32 --rows 1000 --lookups 40"
INPUTS = 8  # different batches in rotation
RATE = 1e-6
TOLERANCE = {"ieee": 1e-4, "tf32": 5e-3, "bf16": 5e-2}  # relative RMS of rows and gradients
VARIANTS = ("tf32", "tf32 deterministic", "ieee", "bf16")
TENSOR_CORES = {"ieee": 67e12, "tf32": 495e12, "bf16": 990e12}  # FLOP/s of an H100 SXM, dense


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tables and the size of a batch."""

    rows: tuple[int, ...]
    """Rows of each table."""
    q: tuple[int, ...]
    rank: int
    lookups: int
    """Of each table."""
    bag: int = 1
    """Look-ups of a bag."""
    reference_ms: float | None = None
    """Forward + backward + fused SGD of the TT-Rec authors' CUDA kernel on an H100, uniform ids."""


LARGEST = tuple(sorted(KAGGLE_CARDINALITIES)[:-8:-1])  # 99.6% of the rows of the 26 tables
ONE = (11_000_000,)  # p = 200, 220, 250
CASES = {
    "bags": Case(rows=ONE, q=(4, 4, 4), rank=32, lookups=10240, bag=20, reference_ms=1.97),
    "dim16": Case(rows=ONE, q=(2, 2, 4), rank=32, lookups=65536, reference_ms=9.5),
    "dim64": Case(rows=ONE, q=(4, 4, 4), rank=32, lookups=65536, reference_ms=10.1),
    "dim128-rank64": Case(rows=ONE, q=(4, 4, 8), rank=64, lookups=65536, reference_ms=17.1),
    "4-cores": Case(rows=ONE, q=(2, 2, 2, 2), rank=32, lookups=65536),
    # The shapes of EL-Rec's artifact (Wang et al., SC 2022).
    **{
        f"dim{prod(q)}-rank128-{batch}": Case(rows=ONE, q=q, rank=128, lookups=batch)
        for q, batch in product(((2, 2, 4), (4, 4, 4)), (1024, 2048, 4096))
    },
    "7x2048": Case(rows=LARGEST, q=(2, 2, 4), rank=32, lookups=2048),
    "7x16384": Case(rows=LARGEST, q=(2, 2, 4), rank=32, lookups=16384),
    "7x65536": Case(rows=LARGEST, q=(2, 2, 4), rank=32, lookups=65536),
}


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--cases", nargs="+", choices=(names := list(CASES)), default=names)
    what = "precision of products, or of all that is kept (bf16)"
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help=what)
    add("--rows", type=count_arg, help="cap the rows of a table (small GPUs)")
    add("--lookups", type=count_arg, help="cap the look-ups of a table")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every case."""
    on_gpu = options.device != "cpu"
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())  # autograd and capture on one stream
    bandwidth = harness.copy_bandwidth()
    what = "TT look-up, forward + backward + SGD; step_ms and forward_ms are replays of a CUDA"
    record.note(what=f"{what} graph", copy_bytes_per_second=round(bandwidth))

    choices = product(options.cases, ("uniform", "skewed"), options.variants)
    for name, skew, variant in choices:
        case = CASES[name]
        rows = tuple(min(size, options.rows or size) for size in case.rows)
        lookups = min(case.lookups, options.lookups or case.lookups)
        case = replace(case, rows=rows, lookups=lookups)
        found = measure_one(case, skew, variant, options.device, bandwidth)
        record.add({"case": name, "ids": skew, "variant": variant, **found})


def measure_one(
    case: Case, skew: str, variant: str, device: str, bandwidth: float
) -> dict[str, Any]:
    """The times of one case.

    Raises:
        ValueError: a result differs from PyTorch's by more than rounding explains.
    """
    torch.manual_seed(0)
    setup = Setup(case, skew, variant, device)
    error = setup.check()
    what = f"{case}, {variant} differs from PyTorch by {error:.1e}"
    harness.require(error < TOLERANCE[setup.precision], what)
    result = {
        "error": error,
        "forward_ms": replayed_milliseconds(setup.forward),
        "step_ms": replayed_milliseconds(setup.step),
        "step_eager_ms": harness.milliseconds(setup.step, device),
        **setup.floors(bandwidth),
    }
    if case.reference_ms and skew == "uniform":
        result["reference_ms"] = case.reference_ms
        result["times_reference"] = case.reference_ms / result["step_ms"]
    return result | (peers(setup) if variant == "tf32" else {})


class Setup:
    """Cores, and batches of one case and skew."""

    def __init__(self, case: Case, skew: str, variant: str, device: str) -> None:
        self.case = case
        self.device = device
        self.precision = precision = variant.split()[0]
        self.options: dict[str, Any] = {"deterministic": "deterministic" in variant}
        if precision != "bf16":
            self.options["precision"] = precision

        d, tables = len(case.q), len(case.rows)
        ranks = (1, *[case.rank] * (d - 1), 1)
        p = torch.tensor([factorize_rows(rows, d) for rows in case.rows], device=device)
        self.shape = TTShape(p, case.q, ranks)
        self.tables = torch.arange(tables, device=device)[:, None]

        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.cores = []
        for k, q in enumerate(case.q):
            shape = int(p[:, k].sum()), ranks[k] * q * ranks[k + 1]
            core = torch.randn(shape, device=device) / ranks[k + 1] ** 0.5
            self.cores.append(core.to(dtype).requires_grad_())

        self.optimizer = RowOptimizer(self.cores, "sgd", lr=RATE)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.dim = prod(case.q)
        skewed = skew == "skewed"
        self.ids = [
            draw_ids(case.rows, case.lookups, device, skewed=skewed).long() for _ in range(INPUTS)
        ]

        self.offsets = torch.arange(0, tables * case.lookups + 1, case.bag, device=device)
        batch = case.lookups // case.bag
        self.grads = [
            torch.randn(batch, tables, self.dim, device=device, dtype=dtype).transpose(0, 1)
            for _ in range(INPUTS)
        ]

    def forward(self, index: int) -> Tensor:
        """The pooled rows of a batch, ``[F, bags, D]``."""
        shared = (self.cores, self.shape)
        ids = self.ids[index % INPUTS]
        if self.case.bag == 1:
            return tt_vectors(*shared, self.tables, ids, **self.options)
        return tt_bags(*shared, Bags(ids.view(-1), self.offsets), **self.options)

    def step(self, index: int) -> None:
        """Forward, backward and SGD."""
        self.forward(index).backward(self.grads[index % INPUTS])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def exact(self, cores: Sequence[Tensor], index: int = 0) -> Tensor:
        """The pooled rows in plain PyTorch."""
        rows = tt_vectors_torch(cores, self.shape, self.tables, self.ids[index % INPUTS])
        return rows.unflatten(1, (-1, self.case.bag)).sum(2)

    def exact_step(self, index: int) -> None:
        """Forward, backward and SGD in plain PyTorch."""
        grads = torch.autograd.grad(
            self.exact(self.cores, index), self.cores, self.grads[index % INPUTS]
        )
        with torch.no_grad():
            for core, grad in zip(self.cores, grads, strict=True):
                core.sub_(self.lr * grad)

    def check(self) -> float:
        """Largest relative RMS error of the rows, and of what a step at rate 1 takes off a core."""
        before = [core.detach().clone() for core in self.cores]
        exact_cores = [core.double().requires_grad_() for core in before]
        exact = self.exact(exact_cores)
        exact_grads = torch.autograd.grad(exact, exact_cores, self.grads[0].double())
        pairs = [(self.forward(0).detach(), exact.detach())]
        self.lr.fill_(1.0)
        self.step(0)
        self.lr.fill_(RATE)
        with torch.no_grad():
            for core, old, grad in zip(self.cores, before, exact_grads, strict=True):
                pairs.append((old.double() - core, grad))
                core.copy_(old)
        return max(float((got - want).norm() / want.norm()) for got, want in pairs)

    def floors(self, bandwidth: float) -> dict[str, float]:
        """Least microseconds of the parts of a step by arithmetic and by bytes, averaged.

        Arithmetic: every pair of leading slices in use is multiplied once forward and twice
        backward, and so is every distinct id by its last slice. Bytes: forward ids, cores and rows
        once; backward ids, gradients of rows, cores, and their gradients in fp32; the update reads
        these and reads and writes the cores. Both count what three cores need; four cores, which
        share more, may be below it.
        """
        case = self.case
        left = case.q[0] * case.rank * case.q[1] * case.rank
        right = case.q[0] * case.q[1] * case.rank * prod(case.q[2:])

        distinct = pairs = 0
        last = self.shape.p[:, 2:].prod(1)
        for ids in self.ids:
            for table, row in enumerate(ids):
                distinct += row.unique().numel() / INPUTS
                pairs += (row // last[table]).unique().numel() / INPUTS
        once = 2 * (pairs * left + distinct * right) / TENSOR_CORES[self.precision]

        lookups, size = self.ids[0].numel(), self.cores[0].element_size()
        weights = sum(core.numel() for core in self.cores)
        moved = 8 * lookups + size * (self.grads[0].numel() + weights)

        gradients = 4 * weights
        backward = moved + gradients
        update = gradients + 2 * size * weights

        return {
            "distinct": distinct / lookups,
            "floor_forward_arithmetic_us": once * 1e6,
            "floor_forward_bytes_us": moved / bandwidth * 1e6,
            "floor_step_arithmetic_us": 3 * once * 1e6,
            "floor_step_bytes_us": (moved + backward + update) / bandwidth * 1e6,
        }


def replayed_milliseconds(run: Callable[[int], object]) -> float:
    """Median milliseconds of ``run`` as a replayed CUDA graph, one graph for each input.

    Captured on the current stream: a backward pass runs where the forward pass before it ran.
    """
    if not torch.cuda.is_available():
        return harness.cpu_milliseconds(run, warm_up=1, steps=2)
    for index in range(INPUTS):
        run(index)
    graphs = []
    for index in range(INPUTS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run(index)
        graphs.append(graph)

    def replay_all(_: int) -> None:
        for graph in graphs:
            graph.replay()

    return harness.gpu_milliseconds(replay_all, warm_up=3, steps=20) / INPUTS


def peers(setup: Setup) -> dict[str, float]:
    """Milliseconds of a step in plain PyTorch, and of a dense table of as many rows; eager."""
    counts = {"warm_up": 1, "steps": 4}
    times = {"torch_eager_ms": harness.milliseconds(setup.exact_step, setup.device, **counts)}
    case, device = setup.case, setup.device
    if len(case.rows) > 1:
        return times

    bag = nn.EmbeddingBag(case.rows[0], setup.dim, mode="sum", sparse=True, device=device)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1e-6)

    def step(index: int) -> None:
        ids = setup.ids[index % INPUTS].view(-1, case.bag)
        bag(ids).backward(setup.grads[index % INPUTS][0].to(bag.weight.dtype))
        optimizer.step()
        optimizer.zero_grad()

    return times | {"dense_eager_ms": harness.milliseconds(step, device)}
