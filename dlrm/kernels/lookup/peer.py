"""Read rows that lie with peers, and send them gradients: each distinct row crosses a link once.

The look-ups are sorted by holder and row. A *run* is what equal rows there are within a tile of
the sorted look-ups; a row that is looked up more often than a tile is long has several runs.
:func:`read_rows` fetches the row of a run once, over NVLink if need be, and writes it to all
look-ups of the run; :func:`send_rows` sums the gradients of a run and writes the sum into the
memory of the holder, which merges the runs of all peers as it updates. No shape depends on the ids
and nothing waits for the host.

Bytes over the link: a row a run each way. Bytes in local memory: two rows a look-up each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm.kernels import use_triton
from dlrm.kernels.update.row_sort import SortedRows
from dlrm.kernels.update.sparse import add_equal

TILE = 4096  # elements of a tile
READERS = 528  # programs, four for each multiprocessor of an H100: they fill links and memory
SENDERS = 528  # likewise; of rows of 128 elements an H100 runs up to 660 at a time, and 924 readers


@dataclass(frozen=True, kw_only=True)
class PeerTensor:
    """A tensor of equal shape with every peer, this process's own first."""

    local: Tensor
    addresses: Tensor
    """Where each begins, ``[n]`` int64 on the device."""
    tensors: list[Tensor]
    """All of them, for PyTorch; the kernels need the addresses alone."""


@dataclass(frozen=True)
class SortedLookups:
    """Look-ups at peers, sorted by holder and row."""

    sorted_rows: SortedRows
    shift: Tensor
    """For each holder, the distance from the sorted places to the slots in its receive buffer,
    ``[n]``.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """All that there is to copy."""
        return [self.sorted_rows.rows, self.sorted_rows.order, self.shift]

    def like(self) -> SortedLookups:
        """Room for as many look-ups."""
        rows, order, shift = map(torch.empty_like, self.tensors)
        return SortedLookups(SortedRows(rows, order), shift)


@triton.jit
def _tile(keys, tile, n, HEIGHT, RUN: tl.constexpr):
    """Sorted look-ups of a tile: where, holder, row there, first of a run, last of one."""
    at = tl.arange(0, RUN)
    k = tile * RUN + at
    inside = k < n
    key = tl.load(keys + k, mask=inside, other=-1)
    before = tl.load(keys + k - 1, mask=inside & (at > 0), other=-1)
    after = tl.load(keys + k + 1, mask=(k + 1 < n) & (at < RUN - 1), other=-1)
    peer = key // HEIGHT
    return k, inside, key, peer, key - peer * HEIGHT, inside & (key != before), key != after


@triton.jit
def _pointer(addresses, peer, at, inside, like, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Where row ``at`` of a peer's block begins."""
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    begin = tl.load(addresses + peer, mask=inside, other=0)
    return tl.multiple_of((begin + at.to(tl.int64) * (WIDTH * size)).to(like.dtype), ALIGN)


@triton.jit
def _read(
    keys, order, weights, out, inbox, shift, like, n, tiles, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch a row per run for all its look-ups; tell its holder which rows will have gradients."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each = tl.cdiv(tiles, PEERS)
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # from all peers at a time
        k, inside, key, peer, row, first, last = _tile(keys, tile, n, HEIGHT, RUN)
        at = _pointer(weights, peer, row, inside, out, D, ALIGN)
        mask = column < D
        value = tl.load(at[:, None] + column, mask=first[:, None] & mask, other=0.0)
        equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
        value, _ = tl.associative_scan((value.to(tl.float32), equal), 0, add_equal)
        entry = tl.load(order + k, mask=inside, other=0)
        to = out + entry[:, None] * D + column
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[:, None] & mask)
        if inbox is not None:
            slot = tl.load(shift + peer, mask=inside, other=0) + k
            to = _pointer(inbox, peer, slot, inside, like, 1, 4)
            tl.store(to, tl.where(last, row, -1).to(tl.int32), mask=inside)


@triton.jit
def _send(
    keys, order, grads, inbox, shift, like, n, tiles, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a run, and write the sum where its holder merges it."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each = tl.cdiv(tiles, PEERS)
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # to all peers at a time
        k, inside, key, peer, _, _, last = _tile(keys, tile, n, HEIGHT, RUN)
        entry = tl.load(order + k, mask=inside, other=0)
        mask = column < D
        grad = tl.load(grads + entry[:, None] * D + column, mask=inside[:, None] & mask, other=0.0)
        equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
        total, _ = tl.associative_scan((grad.to(tl.float32), equal), 0, add_equal)
        slot = tl.load(shift + peer, mask=inside, other=0) + k
        to = _pointer(inbox, peer, slot, inside, like, D, ALIGN)
        live = (inside & last)[:, None] & mask
        tl.store(to[:, None] + column, total.to(like.dtype.element_ty), mask=live)


def _launch(
    plan: SortedRows, dim: int, block: PeerTensor, programs: int
) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, tiles, and constants for sorted look-ups of rows of ``dim``."""
    block_d = triton.next_power_of_2(dim)
    run = run_length(dim)
    tiles = triton.cdiv(len(plan.rows), run)
    peers = len(block.addresses)
    return (
        (min(programs, triton.cdiv(tiles, peers) * peers),),
        tiles,
        {
            "PEERS": peers,
            "D": dim,
            "ALIGN": gcd(16, dim * block.local.element_size()),
            "RUN": run,
            "BLOCK_D": block_d,
            "num_warps": max(1, run * block_d // 2048),
        },
    )


def run_length(dim: int) -> int:
    """Look-ups in a tile, for rows of ``dim``."""
    return max(4, min(256, TILE // triton.next_power_of_2(dim)))


def read_rows(
    weights: PeerTensor,
    plan: SortedRows,
    out: Tensor,
    *,
    inbox: PeerTensor | None = None,
    shift: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Fetch rows from their holders.

    Args:
        weights: each peer's rows, ``[H, D]``.
        plan: the look-ups sorted by key, ``prepare(keys, n * H)``; the key of row r of peer p is
            ``p * H + r``.
        out: gets the rows in the order of the look-ups, ``[N, D]``.
        inbox: each peer's memory for keys, ``[slots]`` int32: it gets the row of look-up k at slot
            ``shift[p] + k``, if that is the last of its run, else -1. None: it need not know.
        shift: ``[n]`` int64 on the device.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(out, impl):
        _read_torch(weights, plan, out, inbox, shift)
        return
    grid, tiles, sizes = _launch(plan, out.shape[1], weights, READERS)
    if tiles:
        keys, like = (None, None) if inbox is None else (inbox.addresses, inbox.local)
        _read[grid](
            plan.rows, plan.order, weights.addresses, out, keys, shift, like, len(plan.rows),
            tiles, len(weights.local), **sizes,
        )  # fmt: skip


def send_rows(
    grads: Tensor,
    height: int,
    plan: SortedRows,
    inbox: PeerTensor,
    shift: Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Sum gradients by run and write the sums into the memory of the rows' holders.

    Args:
        grads: of the look-ups, ``[N, D]``.
        height: H, the rows of a peer.
        plan, shift: as of :func:`read_rows`.
        inbox: each peer's memory for gradients, ``[slots, D]``; a run's sum goes to the slot where
            :func:`read_rows` has put its key, and slots with key -1 stay as they are.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(grads, impl):
        _send_torch(grads, height, plan, inbox, shift)
        return
    grid, tiles, sizes = _launch(plan, grads.shape[1], inbox, SENDERS)
    if tiles:
        _send[grid](
            plan.rows, plan.order, grads.contiguous(), inbox.addresses, shift, inbox.local,
            len(plan.rows), tiles, height, **sizes,
        )  # fmt: skip


def _last_of_runs(plan: SortedRows, dim: int) -> Tensor:
    """Whether a sorted look-up is the last of its run, ``[N]``."""
    keys = plan.rows
    last = torch.ones_like(keys, dtype=torch.bool)
    last[:-1] = keys[1:] != keys[:-1]
    last[run_length(dim) - 1 :: run_length(dim)] = True
    return last


def _shares(plan: SortedRows, height: int, peers: int) -> list[Tensor]:
    """For each peer the sorted look-ups of its rows, as places in the order."""
    holder = plan.rows // height
    return [(holder == peer).nonzero()[:, 0] for peer in range(peers)]


def _read_torch(
    weights: PeerTensor,
    plan: SortedRows,
    out: Tensor,
    inbox: PeerTensor | None,
    shift: Tensor | None,
) -> None:
    """:func:`read_rows` in PyTorch."""
    height = len(weights.local)
    rows = plan.rows % height
    told = rows.where(_last_of_runs(plan, out.shape[1]), -1).int()
    for peer, share in enumerate(_shares(plan, height, len(weights.tensors))):
        out[plan.order[share]] = weights.tensors[peer][rows[share]]
        if inbox is not None and shift is not None:
            inbox.tensors[peer][shift[peer] + share] = told[share]


def _send_torch(
    grads: Tensor, height: int, plan: SortedRows, inbox: PeerTensor, shift: Tensor
) -> None:
    """:func:`send_rows` in PyTorch."""
    last = _last_of_runs(plan, grads.shape[1])
    run = last.cumsum(0) - last.long()
    sums = grads.new_zeros(int(last.sum()), grads.shape[1], dtype=torch.float32)
    sums.index_add_(0, run, grads[plan.order].float())
    for peer, share in enumerate(_shares(plan, height, len(inbox.tensors))):
        share = share[last[share]]
        inbox.tensors[peer][shift[peer] + share] = sums[run[share]].to(inbox.local.dtype)
