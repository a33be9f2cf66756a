"""Projected rows against PyTorch in float64, outputs and both gradients."""

import pytest
import torch

from dlrm.kernels.lookup import projected as kernel
from dlrm.kernels.lookup.projected import lookup_projected
from dlrm.kernels.lookup.tables import TableRows
from dlrm.kernels.update.packed import PackedParameter, PackedRows

GPU = torch.cuda.is_available()
SIZES = [3, 1, 20 * (4000 if GPU else 1)]
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    if not GPU:
        monkeypatch.setattr(kernel, "BLOCK", 16)
        monkeypatch.setattr(kernel, "TILES", 2)


def make(short, wide, device, dtype=torch.float32):
    weight = torch.randn(sum(SIZES), short, device=device, dtype=dtype).requires_grad_()
    matrices = torch.randn(len(SIZES), short, wide, device=device, dtype=dtype).requires_grad_()
    starts = torch.tensor([0, *SIZES[:-1]], device=device).cumsum(0)
    return weight, matrices, starts


def draw(batch, device):
    ids = torch.stack([torch.randint(size, (batch,), device=device) for size in SIZES])
    ids[:, -1] = torch.tensor(SIZES, device=device) - 1
    return ids


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("batch", "short", "wide", "index", "dtype", "sparse"),
    [
        (70, 4, 16, torch.int32, torch.float32, True),
        (1, 1, 8, torch.int64, torch.float32, False),
        (37, 17, 33, torch.int64, torch.float32, True),
        (19, 3, 10, torch.int32, torch.bfloat16, True),
        (5, 3, 200, torch.int32, torch.float32, True),
    ],
)
def test_rows_and_gradients(device, assert_matches, impl, batch, short, wide, index, dtype, sparse):
    weight, matrices, starts = make(short, wide, device, dtype)
    ids = draw(batch * (150 if GPU else 1), device)

    def part_of_a_larger_one(out):  # as from an interaction that reads views
        shape = (*out.shape[:2], 2 * wide)
        return torch.randn(shape, device=device, dtype=dtype)[..., :wide]

    factor = 2 if dtype == torch.float32 else 1.25
    out, grads = assert_matches(
        lambda weight, matrices: lookup_projected(
            weight, matrices, TableRows(starts), ids.to(index), sparse=sparse, impl=impl
        ),
        lambda weight, matrices: torch.einsum(
            "fbe,fed->bfd", weight[ids + starts[:, None]], matrices
        ),
        {"weight": weight, "matrices": matrices},
        grad=part_of_a_larger_one,
        factors={"output": factor, "weight": factor, "matrices": 5 * factor},  # it sums samples
    )
    assert out.dtype == dtype
    assert grads["weight"].is_sparse == sparse


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_ids_from_the_last_on_share_its_row(device, assert_close, impl):
    weight, matrices, starts = make(4, 16, device)
    ids = draw(20, device)
    last = torch.tensor(SIZES, device=device) - 1
    out = lookup_projected(weight, matrices, TableRows(starts, last=last), 3 * ids, impl=impl)
    local = (3 * ids).minimum(last[:, None])
    expected = lookup_projected(weight, matrices, TableRows(starts), local, impl=impl)
    assert_close(out, expected)
    grad = torch.randn_like(out)
    grads = [
        torch.autograd.grad(x, weight, grad, retain_graph=True)[0].to_dense()
        for x in (out, expected)
    ]
    assert_close(*grads, "weight")


@pytest.mark.parametrize("wide", [0, 7, 24], ids=["int4", "mixed", "int8"])
@pytest.mark.parametrize("sharing", [False, True])
def test_packed_rows_are_projected_as_what_they_stand_for(device, assert_close, wide, sharing):
    sizes = [3, 1, 20]
    rows = torch.arange(24, device=device)
    weight = PackedParameter(PackedRows.empty(24, 4, wide, device))
    weight.packed.write(rows, torch.randn(24, 4, device=device))
    plain = weight.packed.read(rows).requires_grad_()
    matrices = torch.randn(3, 4, 16, device=device).requires_grad_()
    starts = torch.tensor([0, 3, 4], device=device)
    options = {"last": torch.tensor(sizes, device=device) - 1} if sharing else {}
    if wide == 7:  # the tables begin with 2, 1 and 4 rows of 8 bits
        firsts = torch.tensor([2, 1, 4], device=device)
        starts = torch.tensor([0, 2, 3], device=device)
        options |= {"num_wide": firsts, "narrow_starts": torch.tensor([7, 8, 8], device=device)}
    ids = torch.stack([torch.randint(3 * n if sharing else n, (70,)) for n in sizes]).to(device)
    results = []
    for own, impl in ((weight, "triton"), (plain, "torch")):
        out = lookup_projected(own, matrices, TableRows(starts, **options), ids, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), [own, matrices])))
    for name, mine, theirs in zip(("output", "weight", "matrices"), *results, strict=True):
        if mine.is_sparse:
            mine, theirs = mine.to_dense(), theirs.to_dense()
        assert_close(mine, theirs, name, factor=4)


def test_no_samples(device):
    weight, matrices, starts = make(4, 16, device)
    ids = torch.empty(len(SIZES), 0, dtype=torch.int64, device=device)
    out = lookup_projected(weight, matrices, TableRows(starts), ids, impl="triton")
    assert out.shape == (0, len(SIZES), 16)
    out.sum().backward()
    assert not matrices.grad.any()
