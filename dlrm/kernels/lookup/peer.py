"""Read rows of peers and send them gradients.

The look-ups of a batch are numbered table after table. :func:`peer_keys` says which row of which
peer each one reads, and where in that peer's memory its gradient goes; :func:`read_rows` fetches
the rows, over NVLink if need be; :func:`announce_rows` tells the holders which rows will have
gradients; :func:`send_rows` writes the gradients to the memory of the holders, which merge those of
equal rows in their update. No shape depends on the ids, and nothing waits for the host.

Look-ups of wide rows are sorted by holder and row before. A *run* is those of one row within a
tile; their gradients are summed, so that a link carries one. For narrow rows, the sort takes longer
than the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.update._merge import add_equal
from dlrm.kernels.update.packed import PackedRows
from dlrm.kernels.update.row_sort import sort_rows

TILE = 4096  # elements of a tile
PROGRAMS = 528  # at most, four per multiprocessor of an H100: enough to fill links and memory
BLOCK = 512  # look-ups whose keys a program computes
WIDE = 64  # columns from which look-ups are sorted


@dataclass(frozen=True, kw_only=True)
class PeerTensor:
    """A tensor of the same shape on every peer; this process's own comes first."""

    local: Tensor
    addresses: Tensor
    """Address of each, ``[n]`` int64 on the device."""
    tensors: list[Tensor]
    """All of them, for PyTorch and its copies; the kernels need only the addresses."""


@dataclass(frozen=True, kw_only=True)
class PeerKeys:
    """Where the look-ups of a batch find their rows."""

    keys: Tensor
    """``[S * B]``; that of row r of peer p is ``p * height + r``."""
    places: Tensor
    """Where in the holder's memory the gradient of each look-up goes, ``[S * B]`` int32."""
    order: Tensor | None
    """Of sorted keys, the look-up of each; None: the keys are in the order of the look-ups."""
    height: int
    """Number of rows of a peer."""

    def by_holder(self, peers: int) -> list[tuple[Tensor, Tensor]]:
        """For each peer, the look-ups of its rows, and these rows."""
        shares = [(self.keys // self.height == p).nonzero()[:, 0] for p in range(peers)]
        return [
            (share if self.order is None else self.order[share], self.keys[share] % self.height)
            for share in shares
        ]


@triton.jit
def _keys(
    ids, tables, parts, keys, places, n, batch, stride_f, stride_b,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys of look-ups, and the places of their gradients."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, slot, sample = at < n, at // batch, at % batch
    table = tl.load(tables + slot, mask=inside, other=0)
    row = tl.load(ids + table * stride_f + sample * stride_b, mask=inside, other=0).to(tl.int64)
    part = parts + slot * (3 * PARTS)
    shift = tl.load(part + 1, mask=inside, other=0)
    section = tl.load(part + 2, mask=inside, other=0)
    for _ in tl.static_range(1, PARTS):
        part += 3
        here = inside & (row >= tl.load(part, mask=inside, other=0))
        shift = tl.where(here, tl.load(part + 1, mask=here, other=0), shift)
        section = tl.where(here, tl.load(part + 2, mask=here, other=0), section)
    tl.store(keys + at, (row + shift).to(keys.dtype.element_ty), mask=inside)
    tl.store(places + at, (section * batch + sample).to(tl.int32), mask=inside)


@triton.jit
def _tile(keys, order, tile, n, HEIGHT, RUN: tl.constexpr):
    """Look-ups of a tile: number, mask, key, holder, row there, last of equal ones in the tile."""
    at = tile * RUN + tl.arange(0, RUN)
    inside = at < n
    key = tl.load(keys + at, mask=inside, other=0)
    last = inside
    if order is not None:
        more = inside & (at + 1 < n) & (tl.arange(0, RUN) < RUN - 1)
        last &= key != tl.load(keys + at + 1, mask=more, other=-1)
        at = tl.load(order + at, mask=inside, other=0)
    peer = key // HEIGHT
    return at, inside, key, peer, key - peer * HEIGHT, last


@triton.jit
def _pointer(addresses, peer, at, inside, like, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer to row ``at`` of the peer's tensor."""
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    begin = tl.load(addresses + peer, mask=inside, other=0)
    return tl.multiple_of((begin + at.to(tl.int64) * (WIDTH * size)).to(like.dtype), ALIGN)


@triton.jit
def _read(
    keys, order, weights, rows, out, n, batch, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fetch the row of each look-up."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each, slots = tl.cdiv(n, RUN * PEERS), n // batch
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # from all peers at once
        k, inside, _, peer, row, _ = _tile(keys, order, tile, n, HEIGHT, RUN)
        at = _pointer(weights, peer, row, inside, rows, STRIDE, ALIGN)
        mask = inside[:, None] & (column < D)
        if STRIDE == D:
            value = tl.load(at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        else:  # two bytes at a time
            pair = tl.arange(0, BLOCK_D // 2)[None, :]
            half = at.to(tl.pointer_type(tl.uint16))
            two = tl.load(half[:, None] + pair, mask=inside[:, None] & (2 * pair < D), other=0)
            two = two.to(tl.int32)
            scale = tl.load((half + (D + 1) // 2).to(tl.pointer_type(tl.bfloat16)), mask=inside)
            value = tl.interleave(two & 255, two >> 8).to(tl.float32) - 128.0
            value *= scale.to(tl.float32)[:, None]
        entry = (k % batch).to(tl.int64) * slots + k // batch
        tl.store(out + entry[:, None] * D + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _announce(keys, order, places, received, like, n, HEIGHT, RUN: tl.constexpr):
    """Send the row of each look-up, or run, to its holder."""
    k, _, _, peer, row, last = _tile(keys, order, tl.program_id(0), n, HEIGHT, RUN)
    place = tl.load(places + k, mask=last, other=0)
    to = _pointer(received, peer, place, last, like, 1, 4)
    tl.store(to, row.to(tl.int32), mask=last)


@triton.jit
def _send(
    keys, order, places, grads, received, like, n, batch, HEIGHT,
    PEERS: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each look-up, or the sum of a run, to the memory of the holder."""
    column = tl.arange(0, BLOCK_D)[None, :]
    each, slots = tl.cdiv(n, RUN * PEERS), n // batch
    for index in range(tl.program_id(0), each * PEERS, tl.num_programs(0)):
        tile = index % PEERS * each + index // PEERS  # to all peers at once
        k, inside, key, peer, _, last = _tile(keys, order, tile, n, HEIGHT, RUN)
        entry = (k % batch).to(tl.int64) * slots + k // batch
        mask = inside[:, None] & (column < D)
        grad = tl.load(grads + entry[:, None] * D + column, mask=mask, other=0.0)
        if order is not None:
            equal = tl.broadcast_to(key[:, None], (RUN, BLOCK_D))
            grad, _ = tl.associative_scan((grad.to(tl.float32), equal), 0, add_equal)
        place = tl.load(places + k, mask=last, other=0)
        to = _pointer(received, peer, place, last, like, D, ALIGN)
        live = last[:, None] & (column < D)
        tl.store(to[:, None] + column, grad.to(like.dtype.element_ty), mask=live)


def _launch(lookups: PeerKeys, dim: int, block: PeerTensor) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants for look-ups of rows of ``dim``."""
    block_d = max(2, triton.next_power_of_2(dim))
    run, peers = run_length(dim), len(block.addresses)
    tiles = triton.cdiv(len(lookups.keys), run)
    return (min(PROGRAMS, triton.cdiv(tiles, peers) * peers),), {
        "PEERS": peers,
        "D": dim,
        "ALIGN": gcd(16, block.local.shape[1] * block.local.element_size()),
        "RUN": run,
        "BLOCK_D": block_d,
        "num_warps": max(1, run * block_d // 2048),
    }


def run_length(dim: int) -> int:
    """Look-ups in a tile, for rows of ``dim``."""
    return max(4, min(256, TILE // triton.next_power_of_2(dim)))


def peer_keys(
    ids: Tensor,
    tables: Tensor,
    parts: Tensor,
    height: int,
    peers: int,
    *,
    sort: bool,
    impl: str | None = None,
) -> PeerKeys:
    """The keys of look-ups of tables that peers hold parts of.

    Args:
        ids: ``[F, B]``.
        tables: of each of the S look-ups of a sample, ``[S]`` int64.
        parts: parts of these tables, ``[S, P, 3]`` int64: the first row, ascending, more than any
            row for none; what is added to a row for its key; the section of the holder's memory,
            in which each sample has a place.
        height: number of rows of a peer.
        peers: number of peers.
        sort: whether to sort them.
        impl: see :mod:`dlrm.kernels`.
    """
    (slots, most, _), batch = parts.shape, ids.shape[1]
    dtype = torch.int32 if peers * height < 2**31 else torch.int64

    if use_triton(ids, impl):
        keys = torch.empty(slots * batch, dtype=dtype, device=ids.device)
        places = torch.empty_like(keys, dtype=torch.int32)
        if len(keys):
            _keys[(triton.cdiv(len(keys), BLOCK),)](
                ids, tables, parts, keys, places, len(keys), batch, *ids.stride(),
                PARTS=most, BLOCK=BLOCK,
            )  # fmt: skip
    else:
        rows = ids.index_select(0, tables).long()
        part = torch.searchsorted(parts[:, :, 0].contiguous(), rows, right=True) - 1
        shift, section = (parts[:, :, column].gather(1, part) for column in (1, 2))
        keys = (rows + shift).to(dtype).view(-1)
        samples = torch.arange(batch, device=ids.device)
        places = (section * batch + samples).int().view(-1)

    if not sort:
        return PeerKeys(keys=keys, places=places, order=None, height=height)
    found = sort_rows(keys, peers * height)
    return PeerKeys(keys=found.rows, places=places, order=found.order, height=height)


def read_rows(
    weights: PeerTensor, lookups: PeerKeys, out: Tensor, *, impl: str | None = None
) -> None:
    """Fetch rows from their holders.

    Args:
        weights: each peer's rows, ``[H, D]``, or records of int8 rows,
            ``[H, record_bytes(D, 8)]``.
        lookups: the S look-ups of each sample.
        out: receives the rows, ``[B, S, D]``.
        impl: see :mod:`dlrm.kernels`.
    """
    batch, _, dim = out.shape
    if not use_triton(out, impl):
        by_table = out.transpose(0, 1)
        shares = lookups.by_holder(len(weights.tensors))
        for held, (share, rows) in zip(weights.tensors, shares, strict=True):
            if held.dtype == torch.uint8:
                packed = PackedRows(data=held.view(-1), num_rows=len(held), dim=dim, wide=len(held))
                found = packed.read(rows)
            else:
                found = held[rows]
            by_table[share // batch, share % batch] = found
        return
    grid, sizes = _launch(lookups, dim, weights)
    if batch:
        _read[grid](
            lookups.keys, lookups.order, weights.addresses, weights.local, out, len(lookups.keys),
            batch, lookups.height, STRIDE=weights.local.shape[1], **sizes,
        )  # fmt: skip


def announce_rows(
    lookups: PeerKeys, dim: int, received: PeerTensor, *, impl: str | None = None
) -> None:
    """Tell the holders which rows will have gradients.

    Args:
        lookups: all look-ups.
        dim: length of a row.
        received: each peer's memory for rows, ``[places]`` int32.
        impl: see :mod:`dlrm.kernels`.
    """
    keys, run = lookups.keys, run_length(dim)
    if not use_triton(keys, impl):
        shares = lookups.by_holder(len(received.tensors))
        for memory, (share, rows) in zip(received.tensors, shares, strict=True):
            memory[lookups.places[share].long()] = rows.int()
    elif len(keys):
        _announce[(triton.cdiv(len(keys), run),)](
            keys, lookups.order, lookups.places, received.addresses, received.local, len(keys),
            lookups.height, RUN=run,
        )  # fmt: skip


def send_rows(
    grads: Tensor, lookups: PeerKeys, received: PeerTensor, *, impl: str | None = None
) -> None:
    """Write gradients to the memory of the rows' holders.

    Args:
        grads: gradients of the look-ups, ``[B, S, D]``.
        lookups: all look-ups.
        received: each peer's memory for gradients, ``[places, D]``. Places to which no row was
            announced are not written.
        impl: see :mod:`dlrm.kernels`.
    """
    batch, _, dim = grads.shape
    if not use_triton(grads, impl):
        by_table = grads.transpose(0, 1)
        shares = lookups.by_holder(len(received.tensors))
        for memory, (share, _) in zip(received.tensors, shares, strict=True):
            own = by_table[share // batch, share % batch]
            memory[lookups.places[share].long()] = own.to(memory.dtype)
        return
    grid, sizes = _launch(lookups, dim, received)
    if batch:
        _send[grid](
            lookups.keys, lookups.order, lookups.places, grads.contiguous(), received.addresses,
            received.local, len(lookups.keys), batch, lookups.height, **sizes,
        )  # fmt: skip
