"""Peers that read each other's rows: here all of them on one device, one after another."""

import pytest
import torch

from dlrm.kernels.lookup import peer as kernel
from dlrm.kernels.lookup.peer import (
    PeerTensor,
    announce_rows,
    peer_keys,
    read_rows,
    run_length,
    send_rows,
)
from dlrm.kernels.update.packed import PackedRows
from dlrm.kernels.update.row_sort import sort_rows
from tests.kit import GPU, combinations

SMALL = {kernel: {"TILE": 64, "READERS": 3, "SENDERS": 3}}
IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
HEIGHT = 40


def ring(tensors, rank):
    """Equal tensors of all peers as one of them sees them."""
    turned = [*tensors[rank:], *tensors[:rank]]
    addresses = torch.tensor([t.data_ptr() for t in turned], device=turned[0].device)
    return PeerTensor(local=turned[0], addresses=addresses, tensors=turned)


def draw(peers, looked_up, device):
    """Keys as every peer numbers them, the first row of all often."""
    rows = torch.randint(peers * HEIGHT, (peers, looked_up), device=device)
    rows = torch.where(torch.rand(rows.shape, device=device) < 0.4, 0, rows)
    rank = torch.arange(peers, device=device)[:, None]
    holder = rows // HEIGHT
    return rows, (holder - rank) % peers * HEIGHT + rows % HEIGHT


@combinations(
    sizes=[(1, 7, 4), (2, 61, 5), (3, 130, 16) if GPU else (3, 30, 9)],
    impl=["torch", "triton"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_rows_come_from_their_holders_and_gradients_go_there(
    device, assert_close, sizes, impl, dtype
):
    peers, looked_up, dim = sizes
    tables = torch.randn(peers, HEIGHT, dim, device=device).to(dtype)
    rows, keys = draw(peers, looked_up, device)
    keys_received = [
        torch.full((peers * looked_up,), -1, device=device).int() for _ in range(peers)
    ]
    sums = [torch.full((peers * looked_up, dim), torch.nan, device=device) for _ in range(peers)]
    grads = torch.randn(peers, looked_up, dim, device=device)
    bounds = HEIGHT * torch.arange(peers, device=device)
    for rank in range(peers):
        plan = sort_rows(keys[rank], peers * HEIGHT)
        shift = rank * looked_up - torch.searchsorted(plan.rows, bounds)
        out = torch.full((looked_up, dim), torch.nan, device=device, dtype=dtype)
        for look_ups in ((plan.rows, plan.order), (keys[rank], None)):
            out.fill_(torch.nan)
            read_rows(ring(list(tables), rank), look_ups[0], out, order=look_ups[1], impl=impl)
            assert torch.equal(out, tables.view(-1, dim)[rows[rank]])
        announce_rows(plan, HEIGHT, dim, ring(keys_received, rank), shift, impl=impl)
        send_rows(grads[rank], HEIGHT, plan, ring(sums, rank), shift, impl=impl)
    expected = torch.zeros(peers * HEIGHT, dim, device=device)
    expected.index_add_(0, rows.view(-1), grads.view(-1, dim))
    for peer in range(peers):
        live = keys_received[peer] >= 0
        assert not sums[peer][live].isnan().any()
        assert sums[peer][~live].isnan().all()
        found = torch.zeros(HEIGHT, dim, device=device)
        found.index_add_(0, keys_received[peer][live].long(), sums[peer][live])
        assert_close(found, expected.view(peers, HEIGHT, dim)[peer], f"gradient of peer {peer}")


@IMPLS
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_keys_are_those_of_the_part_that_holds_a_row(device, impl, kind):
    """Of a table in parts, one as a whole, and one by columns, which is looked up twice."""
    end = torch.iinfo(torch.int32).max
    tables = torch.tensor([1, 0, 0], device=device)
    first_rows = torch.tensor([[0, 4, 7], [0, end, end], [0, end, end]], device=device).int()
    shifts = torch.tensor([[100, -4, 43], [10, 0, 0], [60, 0, 0]], device=device).int()
    ids = torch.tensor([[3, 0], [4, 9], [6, 6], [8, 3]], device=device).to(kind)
    found = peer_keys(ids.t(), tables, first_rows, shifts, impl=impl)
    expected = [[100, 13, 63], [52, 14, 64], [2, 16, 66], [103, 18, 68]]
    assert (found.dtype, found.is_contiguous()) == (torch.int32, True)
    assert found.tolist() == expected


@IMPLS
@pytest.mark.parametrize("dim", [16, 5])
def test_packed_rows_are_read_as_they_are_stored(device, impl, dim):
    packed = [PackedRows.empty(HEIGHT, dim, HEIGHT, device) for _ in range(2)]
    every = torch.arange(HEIGHT, device=device)
    for rows in packed:
        rows.write(every, torch.randn(HEIGHT, dim, device=device))
    keys = torch.randint(2 * HEIGHT, (37,), device=device)
    plan = sort_rows(keys, 2 * HEIGHT)
    expected = torch.cat([rows.read(every) for rows in packed])[keys]
    records = ring([rows.data.view(HEIGHT, -1) for rows in packed], 0)
    for own, order in ((plan.rows, plan.order), (keys, None)):
        out = torch.full((37, dim), torch.nan, device=device)
        read_rows(records, own, out, order=order, impl=impl)
        assert torch.equal(out, expected)


@IMPLS
def test_equal_rows_are_sent_once_for_each_tile(device, impl):
    count = 5 * run_length(8) // 2
    plan = sort_rows(torch.zeros(count, dtype=torch.int64, device=device), HEIGHT)
    keys_received = torch.full((count,), -1, device=device).int()
    shift = torch.zeros(1, dtype=int, device=device)
    announce_rows(plan, HEIGHT, 8, ring([keys_received], 0), shift, impl=impl)
    assert (keys_received == 0).nonzero()[:, 0].tolist() == [
        run_length(8) - 1, 2 * run_length(8) - 1, count - 1
    ]  # fmt: skip


@IMPLS
@pytest.mark.parametrize("of", ["a part of the features", "a sum"])
def test_gradients_need_not_be_contiguous(device, assert_close, impl, of):
    rows = torch.randint(HEIGHT, (37,), device=device)
    plan = sort_rows(rows, HEIGHT)
    if of == "a sum":
        grads = torch.ones(1, 1, device=device).expand(37, 8)
    else:
        grads = torch.randn(37, 3, 8, device=device)[:, 1]
    sums = torch.zeros(37, 8, device=device)
    shift = torch.zeros(1, dtype=torch.int64, device=device)
    send_rows(grads, HEIGHT, plan, ring([sums], 0), shift, impl=impl)
    found = torch.zeros(HEIGHT, 8, device=device).index_add_(0, plan.rows.long(), sums)
    expected = torch.zeros(HEIGHT, 8, device=device).index_add_(0, rows, grads)
    assert_close(found, expected)


@IMPLS
def test_no_look_ups_at_all(device, impl):
    plan = sort_rows(torch.zeros(0, dtype=torch.int64, device=device), HEIGHT)
    table, out = torch.randn(HEIGHT, 4, device=device), torch.empty(0, 4, device=device)
    read_rows(ring([table], 0), plan.rows, out, order=plan.order, impl=impl)
    shift = torch.zeros(1, dtype=torch.int64, device=device)
    before = table.clone()
    announce_rows(plan, HEIGHT, 4, ring([shift.int()], 0), shift, impl=impl)
    send_rows(out, HEIGHT, plan, ring([table], 0), shift, impl=impl)
    assert torch.equal(table, before)
