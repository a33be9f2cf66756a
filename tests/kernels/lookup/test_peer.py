"""Peers that read each other's rows: here all of them on one device, one after another."""

import pytest
import torch

from dlrm.kernels.lookup import peer as kernel
from dlrm.kernels.lookup.peer import PeerTensor, read_rows, run_length, send_rows
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
        read_rows(ring(list(tables), rank), plan, out, impl=impl)
        assert torch.equal(out, tables.view(-1, dim)[rows[rank]])
        out.fill_(torch.nan)
        recv_buffer = ring(keys_received, rank)
        read_rows(
            ring(list(tables), rank), plan, out, recv_buffer=recv_buffer, shift=shift, impl=impl
        )
        assert torch.equal(out, tables.view(-1, dim)[rows[rank]])
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
def test_equal_rows_are_read_and_sent_once_for_each_tile(device, impl):
    count = 5 * run_length(8) // 2
    plan = sort_rows(torch.zeros(count, dtype=torch.int64, device=device), HEIGHT)
    keys_received = torch.full((count,), -1, device=device).int()
    out, shift = torch.empty(count, 8, device=device), torch.zeros(1, dtype=int, device=device)
    table = torch.randn(HEIGHT, 8, device=device)
    read_rows(
        ring([table], 0), plan, out, recv_buffer=ring([keys_received], 0), shift=shift, impl=impl
    )
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
    read_rows(ring([table], 0), plan, out, impl=impl)
    shift = torch.zeros(1, dtype=torch.int64, device=device)
    before = table.clone()
    send_rows(out, HEIGHT, plan, ring([table], 0), shift, impl=impl)
    assert torch.equal(table, before)
