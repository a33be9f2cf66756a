"""Composed rows against PyTorch in float64, outputs and both gradients."""

import pytest
import torch

from dlrm.kernels.lookup import quotient_remainder as kernel
from dlrm.kernels.lookup.quotient_remainder import lookup_quotient, lookup_quotient_torch

GPU = torch.cuda.is_available()
SIZES = [3, 1, 20 * (4000 if GPU else 1), 70]
COLLISIONS = 7
DIMS = {"multiply": (10, 10), "add": (16, 16), "concat": (5, 4)}
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    if not GPU:
        monkeypatch.setattr(kernel, "TILE", 64)


def make(operation, device, dtype=torch.float32):
    """Both weights and where their tables begin."""
    rows = [-(-size // COLLISIONS) for size in SIZES], [min(size, COLLISIONS) for size in SIZES]
    starts = tuple(torch.tensor([0, *part[:-1]], device=device).cumsum(0) for part in rows)
    weights = [
        torch.randn(sum(part), dim, device=device, dtype=dtype).requires_grad_()
        for part, dim in zip(rows, DIMS[operation], strict=True)
    ]
    return weights, starts


def draw(batch, device):
    ids = torch.stack([torch.randint(size, (batch,), device=device) for size in SIZES])
    ids[:, -1] = torch.tensor(SIZES, device=device) - 1
    return ids


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("operation", DIMS)
@pytest.mark.parametrize(
    ("batch", "index", "dtype", "sparse"),
    [
        (33, torch.int32, torch.float32, True),
        (1, torch.int64, torch.float32, False),
        (12, torch.int32, torch.bfloat16, True),
    ],
)
def test_rows_and_gradients(device, assert_matches, impl, operation, batch, index, dtype, sparse):
    (quotient, remainder), starts = make(operation, device, dtype)
    ids = draw(batch * (500 if GPU else 1), device)
    out, grads = assert_matches(
        lambda quotient, remainder: lookup_quotient(
            quotient, remainder, starts, ids.to(index), COLLISIONS,
            operation=operation, sparse=sparse, impl=impl,
        ),
        lambda quotient, remainder: lookup_quotient_torch(
            quotient, remainder, starts, ids, COLLISIONS, operation=operation, sparse=False
        ),
        {"quotient": quotient, "remainder": remainder},
    )  # fmt: skip
    assert out.dtype == dtype
    assert all(grad.is_sparse == sparse for grad in grads.values())


def test_one_weight_may_be_frozen(device):
    (quotient, remainder), starts = make("multiply", device)
    remainder.requires_grad_(False)
    out = lookup_quotient(quotient, remainder, starts, draw(5, device), COLLISIONS, impl="triton")
    out.sum().backward()
    assert quotient.grad is not None
    assert remainder.grad is None


@pytest.mark.parametrize("operation", ["multiply", "add", "concat"])
def test_gradients_add_up_after_a_batch_of_none(operation, device):
    tables = [torch.ones(rows, 2, device=device, requires_grad=True) for rows in (5, 4)]
    starts = (torch.tensor([0], device=device),) * 2
    for ids in ([], [0, 5, 19]):
        given = torch.tensor([ids], dtype=torch.int64, device=device)
        out = lookup_quotient(*tables, starts, given, 4, operation=operation, impl="triton")
        out.sum().backward()
    found = [table.grad.to_dense()[:, 0].tolist() for table in tables]
    assert found == [[1, 1, 0, 0, 1], [1, 1, 0, 1]]


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_gradients_of_one_lookup_have_rows_of_their_own_length(impl, device):
    """PyTorch takes the stride of their values for it, and adds so much to a row of the table."""
    quotient, remainder = (torch.randn(3, n, device=device, requires_grad=True) for n in (17, 16))
    starts = (torch.zeros(1, dtype=torch.int64, device=device),) * 2
    ids = torch.tensor([[2]], device=device)
    lookup_quotient(
        quotient, remainder, starts, ids, 3, operation="concat", impl=impl
    ).sum().backward()
    assert quotient.grad._values().stride() == (17, 1)
    assert remainder.grad._values().stride() == (16, 1)


def test_no_samples(device):
    weights, starts = make("multiply", device)
    ids = torch.empty(len(SIZES), 0, dtype=torch.int64, device=device)
    out = lookup_quotient(*weights, starts, ids, COLLISIONS, impl="triton")
    assert out.shape == (0, len(SIZES), 10)
    out.sum().backward()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("operation", DIMS)
def test_gradients_scaled_in_place_are_scaled_once(operation, impl, device):
    weights, starts = make(operation, device)
    out = lookup_quotient(
        *weights, starts, draw(9, device), COLLISIONS, operation=operation, impl=impl
    )
    out.square().sum().backward()
    before = [weight.grad._values().clone() for weight in weights]
    for weight in weights:
        weight.grad.mul_(0.5)
    for weight, values in zip(weights, before, strict=True):
        assert torch.equal(weight.grad._values(), 0.5 * values)
