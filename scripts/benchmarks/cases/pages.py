"""Time rows in pages: host memory through the link, peers' memory, and whole paged tables.

    python scripts/benchmarks/run.py pages --output benchmarks/pages_h100.json

On one GPU: look-ups in pinned host memory by a kernel that follows page addresses, compared with
``index_select`` and a copy through pinned tensors, and with plain copies, the limit of the link.
With two GPUs also: look-ups across both by address, by the portable path, and of a local table. On
either: look-up, backward and update of all 26 Kaggle tables, dense and paged. A result that differs
from plain indexing or from the dense tables is an error.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings import Embedding, build
from dlrm.kernels.lookup.paged import Pages, pages_of
from dlrm.kernels.lookup.tables import lookup
from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.optim import RowOptimizer
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import draw_ids

NEEDS_GPU = True
SMALL = "--table-rows 131072 --batch 300 --max-rows 1000"
ROWS, DIM = 131_072, 128  # of a transfer, fp32
BYTES = ROWS * DIM * 4
INPUTS = 4  # different ids in rotation
PAGE = 65_536
TOLERANCE = 1e-5  # relative RMS of what a step moves


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--table-rows", type=count_arg, nargs="+", default=[ROWS, 2**20, 2**23])
    add("--batch", type=count_arg, default=16_384, help="samples of a step")
    add("--max-rows", type=count_arg, help="cap the rows of a Kaggle table (small GPUs)")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure transfers, then steps.

    Raises:
        ValueError: a table has fewer rows than are moved, or there is no GPU at all.
    """
    if min(options.table_rows) < ROWS:
        raise ValueError(f"--table-rows must be at least {ROWS}, the rows that are moved")
    if not torch.cuda.is_available():
        raise ValueError("pages need a CUDA GPU, with --small too")
    torch.manual_seed(0)
    buffer = torch.empty(ROWS, DIM, device="cuda")
    record.note(unit="GB/s, ms", rows=ROWS, dim=DIM, link=link(buffer))

    for size in options.table_rows:
        for order in ("random", "ascending"):
            record.add(host_lookups(size, order), to="host")

    placements: dict[str, dict[str, Any]] = {
        "one GPU": {"devices": ["cuda:0"]},
        "GPU and host 1:1": {"devices": ["cuda:0", "host"]},
        "host": {"devices": ["host"]},
    }
    if torch.cuda.device_count() > 1:
        record.note(peers=peer_lookups())
        placements["two GPUs"] = {"devices": ["cuda:0", "cuda:1"]}
        placements["a replica on each"] = {"devices": ["cuda:0+cuda:1"]}
    found = steps(placements, options.batch, options.max_rows)
    record.note(steps={"batch": options.batch, **found})


def rate(milliseconds: float) -> float:
    """GB/s of a transfer."""
    return round(BYTES / milliseconds / 1e6, 1)


def gpu_rate(run: Callable[[int], object], steps: int = 20) -> float:
    """GB/s of a transfer by events, launches included."""
    return rate(harness.gpu_milliseconds(run, warm_up=4, steps=steps))


def wall_rate(run: Callable[[int], object]) -> float:
    """GB/s of a transfer that involves the CPU."""

    def waited(index: int) -> None:
        run(index)
        torch.cuda.synchronize()

    return rate(harness.cpu_milliseconds(waited, warm_up=2, steps=6))


def concatenated(blocks: Sequence[Tensor]) -> Pages:
    """Blocks of whole pages, one after another, read by the first GPU."""
    counts = [-(-len(block) // PAGE) for block in blocks]
    group = torch.arange(len(blocks)).repeat_interleave(torch.tensor(counts))
    first = torch.cat([PAGE * torch.arange(count) for count in counts])
    return pages_of([[block] for block in blocks], PAGE, group, first, "cuda:0")


def host_lookups(size: int, order: str) -> dict[str, Any]:
    """Look-ups of distinct rows of a table of ``size`` rows in host memory."""
    host, table = mapped_tensor((size, DIM), device="cuda")
    table.normal_()
    pages = concatenated([table])
    ids = [torch.randperm(size, device="cuda")[:ROWS] for _ in range(INPUTS)]
    if order == "ascending":
        ids = [rows.sort()[0] for rows in ids]
    harness.require(
        torch.equal(lookup(pages, ids[0]).cpu(), host[ids[0].cpu()]),
        "the look-up differs from indexing",
    )
    staging = torch.empty(ROWS, DIM, pin_memory=True)
    on_cpu = [rows.cpu() for rows in ids]

    def select(index: int) -> None:
        torch.index_select(host, 0, on_cpu[index % INPUTS], out=staging)
        staging.to("cuda", non_blocking=True)

    return {
        "table_rows": size,
        "order": order,
        "gather": gpu_rate(lambda i: lookup(pages, ids[i % INPUTS])),
        "index_select_and_copy": wall_rate(select),
    }


def link(buffer: Tensor) -> dict[str, float]:
    """GB/s of plain copies between pinned memory and the GPU."""
    staging = torch.empty(ROWS, DIM, pin_memory=True)
    return {
        "to_gpu": gpu_rate(lambda _: buffer.copy_(staging, non_blocking=True)),
        "to_host": gpu_rate(lambda _: staging.copy_(buffer, non_blocking=True)),
    }


def peer_lookups(size: int = 2**21) -> dict[str, Any]:
    """GB/s of look-ups of rows that lie on this GPU, half of them on a peer, and all of them."""
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    half = size // 2
    blocks = [torch.randn(half, DIM, device=device) for device in devices]

    both = concatenated(blocks)
    harness.require(both.addresses is not None, "GPUs without access to each other")
    away = concatenated(blocks[1:])
    home = concatenated([torch.cat([b.to(devices[0]) for b in blocks])])

    ids = [torch.randint(size, (ROWS,), device="cuda") for _ in range(INPUTS)]
    inner = [rows % half for rows in ids]
    expected = home.weights[0][ids[0]]
    for impl in ("triton", "torch"):
        harness.require(
            torch.equal(lookup(both, ids[0], impl=impl), expected),
            f"impl {impl} differs from indexing",
        )

    buffers = [torch.empty(ROWS, DIM, device=device) for device in devices]

    def by_address(pages: Pages, rows: Sequence[Tensor]) -> float:
        return gpu_rate(lambda i: lookup(pages, rows[i % INPUTS]))

    return {
        "copy_from_peer": gpu_rate(lambda _: buffers[0].copy_(buffers[1], non_blocking=True)),
        "all_local": by_address(home, ids),
        "half_on_peer": by_address(both, ids),
        "all_on_peer": by_address(away, inner),
        "half_on_peer_portable": wall_rate(lambda i: lookup(both, ids[i % INPUTS], impl="torch")),
        "half_on_peer_by_wall_clock": wall_rate(lambda i: lookup(both, ids[i % INPUTS])),
    }


class Step:
    """Look-up, backward and SGD of all tables, for one kind and placement."""

    def __init__(self, tables: Sequence[Tensor], kind: str, options: dict[str, Any]) -> None:
        with torch.device("cuda"):
            self.group: Embedding = build(
                kind, [len(t) for t in tables], tables[0].shape[1], check_ids=False, **options
            )
        self.group.load_dense(tables)
        self.optimizer = RowOptimizer(self.group.parameters(), "sgd", lr=0.01)

    def __call__(self, ids: Tensor, grad: Tensor) -> None:
        """One step."""
        self.group(ids).backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps(options: dict[str, dict[str, Any]], batch: int, cap: int | None) -> dict[str, Any]:
    """Milliseconds of a step of the Kaggle tables, dense and paged in several ways."""
    rows = [min(rows, cap or rows) for rows in KAGGLE_CARDINALITIES]
    tables = [torch.randn(size, 16, device="cuda") for size in rows]
    ids = torch.stack([draw_ids(rows, batch, "cuda") for _ in range(INPUTS)])

    grads = torch.randn(INPUTS, batch, len(rows), 16, device="cuda")
    probe = ids[0]
    before = torch.stack([table[probe[i]] for i, table in enumerate(tables)], 1)

    expected, results = torch.empty(0), {}
    for name, given in {"dense": {}, **options}.items():
        step = Step(tables, "paged" if given else "dense", given)
        step(ids[0], grads[0])
        moved = step.group(probe).detach() - before
        if name == "dense":
            expected = moved

        error = harness.relative_error(moved, expected)
        harness.require(error < TOLERANCE, f"{name} differs from dense tables by {error:.1e}")

        def run(index: int, step: Step = step) -> None:
            step(ids[index % INPUTS], grads[index % INPUTS])

        result = {"eager": harness.gpu_milliseconds(run, steps=20), "error": error}
        if "cuda:1" not in str(given):  # a graph is of one GPU
            works = [lambda i=i, run=run: run(i) for i in range(INPUTS)]
            result["captured"] = harness.captured_milliseconds(works)
        results[name] = harness.rounded(result) | given
        print(name, results[name], flush=True)
        del step, run
        gc.collect()
    return results
