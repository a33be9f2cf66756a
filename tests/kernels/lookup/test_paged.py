"""Pages by address and by group, against plain indexing; on a GPU also in pinned host memory."""

import pytest
import torch

from dlrm.kernels.lookup import paged, tables
from dlrm.kernels.lookup.paged import pages_of
from dlrm.kernels.lookup.tables import lookup
from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.kernels.update.sparse import update_rows
from tests.kit import GPU, captured

SMALL = {tables: {"TILE": 64}}
IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])


def memory(rows, dim, dtype, device, host=False):
    """A block: in pinned host memory where there is a GPU and ``host``."""
    if host and GPU:
        return mapped_tensor((rows, dim), dtype, device)[1]
    return torch.empty(rows, dim, dtype=dtype, device=device)


def scattered(rows, page_size, dim, device, dtype=torch.float32, groups=(1, 2, 1)):
    """A table ``[rows, dim]`` and the same as pages dealt out to groups.

    ``groups`` has the number of replicas of each; the second lies in host memory.
    """
    table = torch.randn(rows, dim, device=device).to(dtype)
    pages = -(-rows // page_size)
    group = torch.randint(len(groups), (pages,))
    group[: len(groups)] = torch.arange(len(groups))[:pages]
    first = torch.zeros(pages, dtype=torch.int64)
    blocks = []
    for index, replicas in enumerate(groups):
        own = (group == index).nonzero()[:, 0].tolist()
        held = [table[page * page_size : (page + 1) * page_size] for page in own]
        at = 0
        for page in own:
            first[page] = at
            at += min(page_size, rows - page * page_size)
        blocks.append([])
        for _ in range(replicas):
            block = memory(at, dim, dtype, device, host=index == 1)
            block.copy_(torch.cat(held) if held else table[:0])
            blocks[-1].append(block.requires_grad_())
    return table, pages_of(blocks, page_size, group, first, device)


def in_order(block, page_size, device):
    """One block as pages that lie one after another."""
    first = torch.arange(0, len(block), page_size)
    return pages_of([[block]], page_size, torch.zeros_like(first), first, device)


@IMPLS
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(8, torch.float32), (5, torch.float32), (12, torch.bfloat16), (3, torch.bfloat16)],
)
def test_a_lookup_follows_the_pages(device, impl, index, dim, dtype):
    table, pages = scattered(53, 4, dim, device, dtype)
    rows = torch.randint(53, (7, 11), device=device, dtype=index)
    rows[0, :2] = torch.tensor([0, 52])
    out = lookup(pages, rows, impl=impl)
    assert out.shape == (7, 11, dim)
    assert torch.equal(out, table[rows.long()])


@IMPLS
@pytest.mark.parametrize("page_size", [1, 7, 53, 100])
def test_pages_of_any_size(device, impl, page_size):
    table, pages = scattered(53, page_size, 4, device, groups=(1,) if page_size > 50 else (1, 1))
    rows = torch.arange(53, device=device)
    assert torch.equal(lookup(pages, rows, impl=impl), table)


@IMPLS
@pytest.mark.parametrize("sparse", [True, False])
def test_the_gradient_reaches_every_block_and_replica(device, impl, sparse):
    table, pages = scattered(53, 4, 6, device)
    rows = torch.randint(53, (90,), device=device)
    out = lookup(pages, rows, sparse=sparse, impl=impl)
    grad = torch.randn_like(out)
    out.backward(grad)
    whole = torch.zeros_like(table).index_add_(0, rows, grad)
    owner = pages.group.repeat_interleave(4)[:53]
    local = (pages.first[:, None] + torch.arange(4, device=device)).flatten()[:53]
    for index, replicas in enumerate(pages.groups):
        own = owner == index
        for block in replicas:
            assert block.grad.is_sparse == sparse
            found = block.grad.to_dense()[local[own]]
            torch.testing.assert_close(found, whole[own])
        if sparse and len(replicas) > 1:
            first, second = (block.grad for block in replicas)
            assert torch.equal(first._indices(), second._indices())
            assert torch.equal(first._values(), second._values())
            before = second._values().clone()
            first.mul_(0.5)  # clipping scales every gradient in place
            assert torch.equal(second._values(), before)


@IMPLS
def test_a_single_block_has_one_entry_per_lookup(device, impl):
    _, pages = scattered(21, 4, 8, device, groups=(1,))
    rows = torch.randint(21, (3, 5), device=device)
    out = lookup(pages, rows, impl=impl)
    out.backward(torch.randn_like(out))
    ((block,),) = pages.groups
    assert block.grad._indices()[0].tolist() == rows.flatten().tolist()


def test_a_captured_gradient_has_every_lookup_in_every_group(device, monkeypatch):
    """Those of other groups as row -1 with zeros, so that a norm does not count them twice."""
    table, pages = scattered(53, 4, 6, device)
    monkeypatch.setattr(paged, "_capturing", lambda tensor: True)
    rows = torch.randint(53, (90,), device=device)
    out = lookup(pages, rows, impl="triton")
    assert torch.equal(out, table[rows])
    grad = torch.randn_like(out)
    out.backward(grad)
    owner = pages.group[rows // 4]
    for index, replicas in enumerate(pages.groups):
        own = owner == index
        local = torch.where(own, pages.first[rows // 4] + rows % 4, -1)
        values = grad * own[:, None]
        for block in replicas:
            assert torch.equal(block.grad._indices()[0], local)
            assert torch.equal(block.grad._values(), values)
        weight = block.detach().clone()
        lr = torch.tensor(1.0, device=device)
        update_rows("sgd", weight, local, values, lr=lr, impl="triton")
        expected = block.detach().index_add(0, local[own], grad[own], alpha=-1)
        torch.testing.assert_close(weight, expected)


def test_replicas_share_the_lookups(device):
    """Once the replicas differ, each half of equal look-ups tells where it was read."""
    _, pages = scattered(8, 4, 4, device, groups=(2,))
    with torch.no_grad():
        for value, block in enumerate(pages.groups[0]):
            block.fill_(value)
    for impl in ("triton", "torch"):
        out = lookup(pages, torch.full((10,), 3, device=device), impl=impl)
        assert sorted(out[:, 0].tolist()) == [0.0] * 5 + [1.0] * 5


def test_blocks_need_not_begin_on_16_bytes(device):
    table = torch.randn(41, 4, device=device)
    flat = torch.zeros(41 * 4 + 1, device=device)
    block = flat[1:].view(41, 4)
    block.copy_(table)
    rows = torch.randint(41, (33,), device=device)
    pages = in_order(block, 10, device)
    assert torch.equal(lookup(pages, rows, impl="triton"), table[rows])


def test_messages(device):
    block = torch.zeros(6, 4, device=device)
    where = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be contiguous, of one type and of one dim"):
        pages_of([[block], [block.double()]], 4, where, where, device)
    with pytest.raises(ValueError, match="must be contiguous, of one type and of one dim"):
        pages_of([[block[:, :2]]], 4, where, where, device)


def test_pages_out_of_reach_take_the_portable_path():
    block = torch.randn(6, 4)
    pages = in_order(block, 4, "cpu")
    object.__setattr__(pages, "addresses", None)
    rows = torch.tensor([5, 0])
    assert torch.equal(lookup(pages, rows), block[rows])
    with pytest.raises(ValueError, match="not all pages have an address on this device"):
        lookup(pages, rows, impl="triton")


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones(device):
    """A graph with pages in GPU and host memory, replayed on new ids, updates as the eager step."""
    table, pages = scattered(400, 16, 16, device, groups=(1, 1))
    rows = torch.randint(400, (3, 256), device=device)
    static, grad = rows[0].clone(), torch.randn(256, 16, device=device)
    lr = torch.tensor(0.1, device=device)

    def step():
        lookup(pages, static).backward(grad)
        for block in pages.weights:
            entries, values = block.grad._indices()[0], block.grad._values()
            update_rows("sgd", block.data, entries, values, lr=lr)
            block.grad = None

    replay, _ = captured(step)
    for index in range(1, 3):
        static.copy_(rows[index])
        replay()
    for some in rows:
        table.index_add_(0, some, grad, alpha=-0.1)
    found = lookup(pages, torch.arange(400, device=device)).detach()
    torch.testing.assert_close(found, table)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_memory_as_a_tensor_of_the_gpu(dtype):
    cpu, gpu = mapped_tensor((1000, 5), dtype)
    assert (cpu.device.type, gpu.device.type) == ("cpu", "cuda")
    assert cpu.data_ptr() == gpu.data_ptr()
    assert not gpu.any()
    gpu.copy_(torch.randn(1000, 5, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(cpu, gpu.cpu())
    cpu.fill_(3)
    assert (gpu == 3).all()
