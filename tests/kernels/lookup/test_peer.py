"""Peers that read each other's rows: here all of them on one device, one after another."""

import pytest
import torch

from dlrm.kernels.lookup import peer as kernel
from dlrm.kernels.lookup.peer import (
    PeerKeys,
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

SMALL = {kernel: {"TILE": 64, "PROGRAMS": 3, "BLOCK": 16}}
IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
SORTED = pytest.mark.parametrize("sort", [False, True])
HEIGHT = 40


def ring(tensors, rank=0):
    """Equal tensors of all peers as one of them sees them."""
    turned = [*tensors[rank:], *tensors[:rank]]
    addresses = torch.tensor([t.data_ptr() for t in turned], device=turned[0].device)
    return PeerTensor(local=turned[0], addresses=addresses, tensors=turned)


def look_up(keys, sort, places=None, peers=1):
    """The look-ups of keys; their gradients go to places in any order, by default in this one."""
    if places is None:
        places = torch.arange(len(keys), device=keys.device)
    found = sort_rows(keys, peers * HEIGHT) if sort else None
    return PeerKeys(
        keys=found.rows if sort else keys,
        places=places.int(),
        order=found.order if sort else None,
        height=HEIGHT,
    )


@combinations(
    sizes=[(1, 7, 1, 4), (2, 61, 3, 5), (3, 65, 2, 16) if GPU else (3, 15, 2, 9)],
    sort=[False, True],
    impl=["torch", "triton"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_rows_come_from_their_holders_and_gradients_go_there(
    device, assert_close, sizes, sort, impl, dtype
):
    """The first row of all is looked up often."""
    peers, batch, slots, dim = sizes
    count = batch * slots
    tables = torch.randn(peers, HEIGHT, dim, device=device).to(dtype)
    rows = torch.randint(peers * HEIGHT, (peers, slots, batch), device=device)
    rows = torch.where(torch.rand(rows.shape, device=device) < 0.4, 0, rows)
    announced = [torch.full((peers * count,), -1, device=device).int() for _ in range(peers)]
    sent = [torch.full((peers * count, dim), torch.nan, device=device) for _ in range(peers)]
    grads = torch.randn(peers, batch, slots, dim, device=device)
    for rank in range(peers):
        keys = (rows[rank] // HEIGHT - rank) % peers * HEIGHT + rows[rank] % HEIGHT
        places = torch.randperm(count, device=device) + rank * count
        lookups = look_up(keys.flatten(), sort, places, peers)
        out = torch.full((batch, slots, dim), torch.nan, device=device, dtype=dtype)
        read_rows(ring(list(tables), rank), lookups, out, impl=impl)
        assert torch.equal(out, tables.view(-1, dim)[rows[rank].t()])
        announce_rows(lookups, dim, ring(announced, rank), impl=impl)
        send_rows(grads[rank], lookups, ring(sent, rank), impl=impl)
    expected = torch.zeros(peers * HEIGHT, dim, device=device)
    expected.index_add_(0, rows.view(-1), grads.transpose(1, 2).reshape(-1, dim))
    for peer in range(peers):
        live = announced[peer] >= 0
        assert not sent[peer][live].isnan().any()
        assert sent[peer][~live].isnan().all()
        found = torch.zeros(HEIGHT, dim, device=device)
        found.index_add_(0, announced[peer][live].long(), sent[peer][live])
        assert_close(found, expected.view(peers, HEIGHT, dim)[peer], f"gradient of peer {peer}")


@IMPLS
@SORTED
@pytest.mark.parametrize(("kind", "height"), [(torch.int32, 30), (torch.int64, 2**30)])
def test_a_look_up_is_of_the_part_that_holds_its_row(device, impl, sort, kind, height):
    """Of a table in parts, one as a whole, and one by columns, which is looked up twice."""
    end = [torch.iinfo(torch.int64).max, 0, 0]
    tables = torch.tensor([1, 0, 0], device=device)
    parts = torch.tensor(
        [
            [[0, 100, 2], [4, -4, 0], [7, 43, 1]],
            [[0, 10, 5], end, end],
            [[0, 60, 3], end, end],
        ],
        device=device,
    )
    ids = torch.tensor([[3, 0], [4, 9], [6, 6], [8, 3]], device=device).to(kind)
    found = peer_keys(ids.t(), tables, parts, height, 4, sort=sort, impl=impl)
    keys = found.keys
    if sort:
        assert keys.tolist() == sorted(keys.tolist())
        keys = torch.empty_like(keys).index_copy_(0, found.order.long(), keys)
    else:
        assert found.order is None
    assert (keys.dtype, found.places.dtype, found.height) == (kind, torch.int32, height)
    assert keys.view(3, 4).tolist() == [[100, 52, 2, 103], [13, 14, 16, 18], [63, 64, 66, 68]]
    assert found.places.view(3, 4).tolist() == [[8, 5, 2, 11], [20, 21, 22, 23], [12, 13, 14, 15]]


@IMPLS
@SORTED
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_packed_rows_are_read_as_they_are_stored(device, impl, sort, dim):
    packed = [PackedRows.empty(HEIGHT, dim, HEIGHT, device) for _ in range(2)]
    every = torch.arange(HEIGHT, device=device)
    for rows in packed:
        rows.write(every, torch.randn(HEIGHT, dim, device=device))
    keys = torch.randint(2 * HEIGHT, (37,), device=device)
    expected = torch.cat([rows.read(every) for rows in packed])[keys]
    records = ring([rows.data.view(HEIGHT, -1) for rows in packed])
    out = torch.full((37, 1, dim), torch.nan, device=device)
    read_rows(records, look_up(keys, sort, peers=2), out, impl=impl)
    assert torch.equal(out[:, 0], expected)


def test_gradients_of_sorted_equal_rows_are_sent_once_for_each_tile(device):
    run, dim = run_length(8), 8
    count = 5 * run // 2
    lookups = look_up(torch.zeros(count, dtype=torch.int64, device=device), sort=True)
    announced = torch.full((count,), -1, device=device).int()
    announce_rows(lookups, dim, ring([announced]), impl="triton")
    assert (announced == 0).nonzero()[:, 0].tolist() == [run - 1, 2 * run - 1, count - 1]
    sent = torch.zeros(count, dim, device=device)
    send_rows(torch.ones(count, 1, dim, device=device), lookups, ring([sent]), impl="triton")
    assert sent[announced == 0, 0].tolist() == [run, run, count - 2 * run]
    assert not sent[announced < 0].any()


@IMPLS
@SORTED
@pytest.mark.parametrize("of", ["a part of the features", "a sum"])
def test_gradients_need_not_be_contiguous(device, assert_close, impl, sort, of):
    keys = torch.randint(HEIGHT, (37,), device=device)
    if of == "a sum":
        grads = torch.ones(1, 1, 1, device=device).expand(37, 1, 8)
    else:
        grads = torch.randn(37, 3, 8, device=device)[:, 1:2]
    sent = torch.zeros(37, 8, device=device)
    send_rows(grads, look_up(keys, sort), ring([sent]), impl=impl)
    found, expected = torch.zeros(2, HEIGHT, 8, device=device)
    found.index_add_(0, keys, sent)
    expected.index_add_(0, keys, grads[:, 0])
    assert_close(found, expected)


@IMPLS
@SORTED
def test_no_look_ups_at_all(device, impl, sort):
    tables = torch.arange(2, device=device)
    parts = torch.zeros(2, 1, 3, dtype=torch.int64, device=device)
    ids = torch.empty(2, 0, dtype=torch.int64, device=device)
    lookups = peer_keys(ids, tables, parts, HEIGHT, 1, sort=sort, impl=impl)
    table, out = torch.randn(HEIGHT, 4, device=device), torch.empty(0, 2, 4, device=device)
    before = table.clone()
    read_rows(ring([table]), lookups, out, impl=impl)
    announce_rows(lookups, 4, ring([table[:, 0].int()]), impl=impl)
    send_rows(out, lookups, ring([table]), impl=impl)
    assert torch.equal(table, before)
