"""Read rows of peers and send them gradients: each unique row crosses a link once.

The look-ups are sorted by holder and row. A *run* is the look-ups of one row within a tile of the
sorted look-ups; a row with more look-ups than fit in a tile has several runs. :func:`read_rows`
fetches the row of a run once, over NVLink if need be, and writes it to all look-ups of the run;
:func:`send_rows` sums the gradients of a run and writes the sum to the memory of the holder, which
merges the runs of all peers in its update. No shape depends on the ids, and nothing waits for the
host.

Bytes over the link: one row per run each way. Bytes in local memory: two rows per look-up each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.update._merge import add_equal
from dlrm.kernels.update.row_sort import SortedRows

TILE = 4096  # elements of a tile
READERS = 528  # programs, four per multiprocessor of an H100: enough to fill links and memory
SENDERS = 528  # the same; of 128 columns an H100 runs up to 660 at a time, and 924 readers


@dataclass(frozen=True, kw_only=True)
class PeerTensor:
    """A tensor of the same shape on every peer; this process's own comes first."""

    local: Tensor
    addresses: Tensor
    """Address of each, ``[n]`` int64 on the device."""
    tensors: list[Tensor]
    """All of them, for PyTorch and its copies; the kernels need only the addresses."""


@dataclass(frozen=True)
class SortedLookups:
    """Look-ups at peers, sorted by holder and row."""

    sorted_rows: SortedRows
    shift: Tensor
    """For each holder, the slot of a look-up in its receive buffer minus its sorted position,
    ``[n]``.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, to copy them."""
        return [self.sorted_rows.rows, self.sorted_rows.order, self.shift]

    def like(self) -> SortedLookups:
        """Uninitialized look-ups of the same number."""
        rows, order, shift = map(torch.empty_like, self.tensors)
        return SortedLookups(SortedRows(rows, order), shift)


@triton.jit
def _tile(keys, tile, n, HEIGHT, RUN: tl.constexpr):
    """Look-ups of a tile: index, mask, key, holder, row there, first of a run, last of one."""
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
    """Pointer to row ``at`` of the peer's tensor."""
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    begin = tl.load(addresses + peer, mask=inside, other=0)
    return tl.multiple_of((begin + at.to(tl.int64) * (WIDTH * size)).to(like.dtype), ALIGN)


@triton.jit
def _read(
    keys, order, weights, out, recv_buffer, shift, like, n, tiles, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch the row of each run for all its look-ups; send its key to the holder."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each = tl.cdiv(tiles, PEERS)
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # from all peers at once
        k, inside, key, peer, row, first, last = _tile(keys, tile, n, HEIGHT, RUN)
        at = _pointer(weights, peer, row, inside, out, D, ALIGN)
        mask = column < D
        value = tl.load(at[:, None] + column, mask=first[:, None] & mask, other=0.0)
        equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
        value, _ = tl.associative_scan((value.to(tl.float32), equal), 0, add_equal)
        entry = tl.load(order + k, mask=inside, other=0)
        to = out + entry[:, None] * D + column
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[:, None] & mask)
        if recv_buffer is not None:
            slot = tl.load(shift + peer, mask=inside, other=0) + k
            to = _pointer(recv_buffer, peer, slot, inside, like, 1, 4)
            tl.store(to, tl.where(last, row, -1).to(tl.int32), mask=inside)


@triton.jit
def _send(
    keys, order, grads, recv_buffer, shift, like, n, tiles, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each run, and write the sum to the memory of its holder."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each = tl.cdiv(tiles, PEERS)
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # to all peers at once
        k, inside, key, peer, _, _, last = _tile(keys, tile, n, HEIGHT, RUN)
        entry = tl.load(order + k, mask=inside, other=0)
        mask = column < D
        grad = tl.load(grads + entry[:, None] * D + column, mask=inside[:, None] & mask, other=0.0)
        equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
        total, _ = tl.associative_scan((grad.to(tl.float32), equal), 0, add_equal)
        slot = tl.load(shift + peer, mask=inside, other=0) + k
        to = _pointer(recv_buffer, peer, slot, inside, like, D, ALIGN)
        live = (inside & last)[:, None] & mask
        tl.store(to[:, None] + column, total.to(like.dtype.element_ty), mask=live)


def _launch(
    sorted_rows: SortedRows, dim: int, block: PeerTensor, programs: int
) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, tiles, and constants for sorted look-ups of rows of ``dim``."""
    block_d = triton.next_power_of_2(dim)
    run = run_length(dim)
    tiles = triton.cdiv(len(sorted_rows.rows), run)
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
    sorted_rows: SortedRows,
    out: Tensor,
    *,
    recv_buffer: PeerTensor | None = None,
    shift: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Fetch rows from their holders.

    Args:
        weights: each peer's rows, ``[H, D]``.
        sorted_rows: the look-ups sorted by key, ``sort_rows(keys, n * H)``; the key of row r of
            peer p is ``p * H + r``.
        out: receives the rows in the order of the look-ups, ``[N, D]``.
        recv_buffer: each peer's buffer for rows that will have gradients, ``[slots]`` int32. Slot
            ``shift[p] + k`` receives the row of sorted look-up k if it is the last of its run, and
            -1 otherwise. None: nothing is sent.
        shift: ``[n]`` int64 on the device.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(out, impl):
        _read_torch(weights, sorted_rows, out, recv_buffer, shift)
        return
    grid, tiles, sizes = _launch(sorted_rows, out.shape[1], weights, READERS)
    if tiles:
        keys, like = (
            (None, None) if recv_buffer is None else (recv_buffer.addresses, recv_buffer.local)
        )
        _read[grid](
            sorted_rows.rows, sorted_rows.order, weights.addresses, out, keys, shift, like,
            len(sorted_rows.rows), tiles, len(weights.local), **sizes,
        )  # fmt: skip


def send_rows(
    grads: Tensor,
    height: int,
    sorted_rows: SortedRows,
    recv_buffer: PeerTensor,
    shift: Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Sum gradients by run and write the sums to the memory of the rows' holders.

    Args:
        grads: gradients of the look-ups, ``[N, D]``.
        height: H, the number of rows of a peer.
        sorted_rows, shift: as in :func:`read_rows`.
        recv_buffer: each peer's buffer for gradients, ``[slots, D]``. The sum of a run goes to the
            slot that received its row in :func:`read_rows`; slots with -1 are not written.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(grads, impl):
        _send_torch(grads, height, sorted_rows, recv_buffer, shift)
        return
    grid, tiles, sizes = _launch(sorted_rows, grads.shape[1], recv_buffer, SENDERS)
    if tiles:
        _send[grid](
            sorted_rows.rows, sorted_rows.order, grads.contiguous(), recv_buffer.addresses, shift,
            recv_buffer.local, len(sorted_rows.rows), tiles, height, **sizes,
        )  # fmt: skip


def _last_of_runs(sorted_rows: SortedRows, dim: int) -> Tensor:
    """Whether a sorted look-up is the last of its run, ``[N]``."""
    keys = sorted_rows.rows
    last = torch.ones_like(keys, dtype=torch.bool)
    last[:-1] = keys[1:] != keys[:-1]
    last[run_length(dim) - 1 :: run_length(dim)] = True
    return last


def _by_holder(sorted_rows: SortedRows, height: int, peers: int) -> list[Tensor]:
    """For each peer, the indices of the sorted look-ups of its rows."""
    holder = sorted_rows.rows // height
    return [(holder == peer).nonzero()[:, 0] for peer in range(peers)]


def _read_torch(
    weights: PeerTensor,
    sorted_rows: SortedRows,
    out: Tensor,
    recv_buffer: PeerTensor | None,
    shift: Tensor | None,
) -> None:
    """:func:`read_rows` in PyTorch."""
    height = len(weights.local)
    rows = sorted_rows.rows % height
    keys = rows.where(_last_of_runs(sorted_rows, out.shape[1]), -1).int()
    for peer, share in enumerate(_by_holder(sorted_rows, height, len(weights.tensors))):
        out[sorted_rows.order[share]] = weights.tensors[peer][rows[share]]
        if recv_buffer is not None and shift is not None:
            recv_buffer.tensors[peer][shift[peer] + share] = keys[share]


def _send_torch(
    grads: Tensor, height: int, sorted_rows: SortedRows, recv_buffer: PeerTensor, shift: Tensor
) -> None:
    """:func:`send_rows` in PyTorch."""
    last = _last_of_runs(sorted_rows, grads.shape[1])
    run = last.cumsum(0) - last.long()
    sums = grads.new_zeros(int(last.sum()), grads.shape[1], dtype=torch.float32)
    sums.index_add_(0, run, grads[sorted_rows.order].float())
    for peer, share in enumerate(_by_holder(sorted_rows, height, len(recv_buffer.tensors))):
        share = share[last[share]]
        recv_buffer.tensors[peer][shift[peer] + share] = sums[run[share]].to(
            recv_buffer.local.dtype
        )
