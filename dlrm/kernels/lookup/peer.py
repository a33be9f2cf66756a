"""Read rows of peers and send them gradients: each unique row crosses a link once.

The look-ups are sorted by holder and row. A *run* is the look-ups of one row within a tile of the
sorted look-ups; a row with more look-ups than fit in a tile has several runs. :func:`read_rows`
fetches the row of a run once, over NVLink if need be, and writes it to all look-ups of the run;
:func:`announce_rows` tells the holders which rows will have gradients; :func:`send_rows` sums the
gradients of a run and writes the sum to the memory of the holder, which merges the runs of all
peers in its update. No shape depends on the ids, and nothing waits for the host. Rows can also be
read before the look-ups are sorted: those of hot rows then cross a link more often.

Bytes over the link: one row per run each way. Bytes in local memory: two rows per look-up each way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.update._merge import add_equal
from dlrm.kernels.update._packed import load_packed
from dlrm.kernels.update.packed import PackedRows
from dlrm.kernels.update.row_sort import SortedRows

TILE = 4096  # elements of a tile
READERS = 528  # programs, four per multiprocessor of an H100: enough to fill links and memory
SENDERS = 528  # the same; of 128 columns an H100 runs up to 660 at a time, and 924 readers
BLOCK = 512  # look-ups whose keys a program computes


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
def _keys(
    ids, tables, first_rows, shifts, keys, n, stride_f, stride_b,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys of the look-ups of some samples."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = at < n, at % SLOTS
    table = tl.load(tables + slot)
    row = tl.load(ids + table * stride_f + at // SLOTS * stride_b, mask=inside, other=0)
    shift = tl.load(shifts + slot * PARTS)
    for part in tl.static_range(1, PARTS):
        first = tl.load(first_rows + slot * PARTS + part)
        shift = tl.where(row >= first, tl.load(shifts + slot * PARTS + part), shift)
    tl.store(keys + at, (row + shift).to(keys.dtype.element_ty), mask=inside)


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
    keys, order, weights, rows, out, n, tiles, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch the row of each run for all its look-ups, or without an order of each look-up."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each = tl.cdiv(tiles, PEERS)
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # from all peers at once
        k, inside, key, peer, row, first, _ = _tile(keys, tile, n, HEIGHT, RUN)
        at = _pointer(weights, peer, row, inside, rows, STRIDE, ALIGN)
        mask = column < D
        live = inside if order is None else first
        if STRIDE == D:
            value = tl.load(at[:, None] + column, mask=live[:, None] & mask, other=0.0)
            value = value.to(tl.float32)
        else:
            value, scale = load_packed(at, 0, 0, live, column, D, 8)
            value *= scale[:, None]
        if order is None:
            entry = k
        else:  # equal keys are neighbors
            equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
            value, _ = tl.associative_scan((value, equal), 0, add_equal)
            entry = tl.load(order + k, mask=inside, other=0)
        to = out + entry[:, None].to(tl.int64) * D + column
        tl.store(to, value.to(out.dtype.element_ty), mask=inside[:, None] & mask)


@triton.jit
def _announce(keys, recv_buffer, shift, like, n, HEIGHT, RUN: tl.constexpr):
    """Send the row of each run to its holder."""
    k, inside, _, peer, row, _, last = _tile(keys, tl.program_id(0), n, HEIGHT, RUN)
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
    lookups: int, dim: int, block: PeerTensor, programs: int
) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, tiles, and constants for look-ups of rows of ``dim``."""
    block_d = triton.next_power_of_2(dim)
    run = run_length(dim)
    tiles = triton.cdiv(lookups, run)
    peers = len(block.addresses)
    return (
        (min(programs, triton.cdiv(tiles, peers) * peers),),
        tiles,
        {
            "PEERS": peers,
            "D": dim,
            "ALIGN": gcd(16, block.local.shape[1] * block.local.element_size()),
            "RUN": run,
            "BLOCK_D": block_d,
            "num_warps": max(1, run * block_d // 2048),
        },
    )


def run_length(dim: int) -> int:
    """Look-ups in a tile, for rows of ``dim``."""
    return max(4, min(256, TILE // triton.next_power_of_2(dim)))


def peer_keys(
    ids: Tensor, tables: Tensor, first_rows: Tensor, shifts: Tensor, *, impl: str | None = None
) -> Tensor:
    """The keys of look-ups of tables that peers hold parts of.

    Args:
        ids: ``[F, B]``.
        tables: of each of the S look-ups of a sample, ``[S]`` int64.
        first_rows: first row of each part of these tables, ascending, ``[S, P]``; more than any row
            for none.
        shifts: what is added to a row of each part, ``[S, P]``, of the type of the keys.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, S]``.
    """
    (slots, parts), batch = shifts.shape, ids.shape[1]
    if not use_triton(ids, impl):
        rows = ids.index_select(0, tables).to(shifts.dtype)
        part = torch.searchsorted(first_rows, rows, right=True) - 1
        return (rows + shifts.gather(1, part)).t().contiguous()
    keys = shifts.new_empty(batch, slots)
    if keys.numel():
        _keys[(triton.cdiv(keys.numel(), BLOCK),)](
            ids, tables, first_rows, shifts, keys, keys.numel(), *ids.stride(),
            SLOTS=slots, PARTS=parts, BLOCK=BLOCK,
        )  # fmt: skip
    return keys


def read_rows(
    weights: PeerTensor,
    keys: Tensor,
    out: Tensor,
    *,
    order: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Fetch rows from their holders.

    Args:
        weights: each peer's rows, ``[H, D]``, or records of int8 rows,
            ``[H, record_bytes(D, 8)]``.
        keys: of the look-ups, ``[N]``; that of row r of peer p is ``p * H + r``.
        out: receives the rows, ``[N, D]``.
        order: of sorted keys, whose rows are fetched once for each run, where the row of each goes;
            None: the keys are in the order of the rows, and not sorted.
        impl: see :mod:`dlrm.kernels`.
    """
    dim = out.shape[1]
    if not use_triton(out, impl):
        for peer, share in enumerate(_by_holder(keys, len(weights.local), len(weights.tensors))):
            held, rows = weights.tensors[peer], keys[share] % len(weights.local)
            if held.dtype == torch.uint8:
                packed = PackedRows(data=held.view(-1), num_rows=len(held), dim=dim, wide=len(held))
                found = packed.read(rows)
            else:
                found = held[rows]
            out[share if order is None else order[share]] = found
        return
    grid, tiles, sizes = _launch(len(keys), dim, weights, READERS)
    if tiles:
        _read[grid](
            keys, order, weights.addresses, weights.local, out, len(keys), tiles,
            len(weights.local), STRIDE=weights.local.shape[1], **sizes,
        )  # fmt: skip


def announce_rows(
    sorted_rows: SortedRows,
    height: int,
    dim: int,
    recv_buffer: PeerTensor,
    shift: Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Tell the holders which rows will have gradients.

    Args:
        sorted_rows: the look-ups sorted by key, ``sort_rows(keys, n * H)``.
        height: H, the number of rows of a peer.
        dim: length of a row.
        recv_buffer: each peer's buffer for rows, ``[slots]`` int32. Slot ``shift[p] + k`` receives
            the row of sorted look-up k if it is the last of its run, and -1 otherwise.
        shift: ``[n]`` int64 on the device.
        impl: see :mod:`dlrm.kernels`.
    """
    keys, run = sorted_rows.rows, run_length(dim)
    if not use_triton(keys, impl):
        rows = (keys % height).where(_last_of_runs(keys, dim), -1).int()
        for peer, share in enumerate(_by_holder(keys, height, len(recv_buffer.tensors))):
            recv_buffer.tensors[peer][shift[peer] + share] = rows[share]
    elif len(keys):
        _announce[(triton.cdiv(len(keys), run),)](
            keys, recv_buffer.addresses, shift, recv_buffer.local, len(keys), height, RUN=run
        )


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
        sorted_rows, shift: as in :func:`announce_rows`.
        recv_buffer: each peer's buffer for gradients, ``[slots, D]``. The sum of a run goes to the
            slot that received its row in :func:`announce_rows`; slots with -1 are not written.
        impl: see :mod:`dlrm.kernels`.
    """
    if not use_triton(grads, impl):
        _send_torch(grads, height, sorted_rows, recv_buffer, shift)
        return
    grid, tiles, sizes = _launch(len(sorted_rows.rows), grads.shape[1], recv_buffer, SENDERS)
    if tiles:
        _send[grid](
            sorted_rows.rows, sorted_rows.order, grads.contiguous(), recv_buffer.addresses, shift,
            recv_buffer.local, len(sorted_rows.rows), tiles, height, **sizes,
        )  # fmt: skip


def _last_of_runs(keys: Tensor, dim: int) -> Tensor:
    """Whether a sorted look-up is the last of its run, ``[N]``."""
    last = torch.ones_like(keys, dtype=torch.bool)
    last[:-1] = keys[1:] != keys[:-1]
    last[run_length(dim) - 1 :: run_length(dim)] = True
    return last


def _by_holder(keys: Tensor, height: int, peers: int) -> list[Tensor]:
    """For each peer, the indices of the look-ups of its rows."""
    holder = keys // height
    return [(holder == peer).nonzero()[:, 0] for peer in range(peers)]


def _send_torch(
    grads: Tensor, height: int, sorted_rows: SortedRows, recv_buffer: PeerTensor, shift: Tensor
) -> None:
    """:func:`send_rows` in PyTorch."""
    keys = sorted_rows.rows
    last = _last_of_runs(keys, grads.shape[1])
    run = last.cumsum(0) - last.long()
    sums = grads.new_zeros(int(last.sum()), grads.shape[1], dtype=torch.float32)
    sums.index_add_(0, run, grads[sorted_rows.order].float())
    for peer, share in enumerate(_by_holder(keys, height, len(recv_buffer.tensors))):
        share = share[last[share]]
        recv_buffer.tensors[peer][shift[peer] + share] = sums[run[share]].to(
            recv_buffer.local.dtype
        )
