"""Time rows in pages: host memory through the link, and peers' memory.

    python scripts/benchmarks/run.py pages --output benchmarks/pages_h100.json

On one GPU: look-ups in pinned host memory by a kernel that follows page addresses, compared with
``index_select`` and a copy through pinned tensors, and with plain copies, the limit of the link.
With two GPUs also: look-ups across both by address, by the portable path, and of a local table. A
result that differs from plain indexing is an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm.kernels.lookup.paged import Pages, pages_of
from dlrm.kernels.lookup.tables import lookup
from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness

NEEDS_GPU = True
SMALL = "--table-rows 131072"
ROWS, DIM = 131_072, 128  # of a transfer, fp32
BYTES = ROWS * DIM * 4
INPUTS = 4  # different ids in rotation
PAGE = 65_536


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--table-rows", type=count_arg, nargs="+", default=[ROWS, 2**20, 2**23])


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure transfers.

    Raises:
        ValueError: a table has fewer rows than are moved, or there is no GPU at all.
    """
    if min(options.table_rows) < ROWS:
        raise ValueError(f"--table-rows must be at least {ROWS}, the rows that are moved")
    if not torch.cuda.is_available():
        raise ValueError("pages need a CUDA GPU, with --small too")
    torch.manual_seed(0)
    buffer = torch.empty(ROWS, DIM, device="cuda")
    record.note(unit="GB/s", rows=ROWS, dim=DIM, link=link(buffer))

    for size in options.table_rows:
        for order in ("random", "ascending"):
            record.add(host_lookups(size, order), to="host")

    if torch.cuda.device_count() > 1:
        record.note(peers=peer_lookups())


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
