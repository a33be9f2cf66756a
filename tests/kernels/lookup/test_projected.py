"""Widened rows against PyTorch in float64, outputs and both gradients."""

import pytest
import torch

from dlrm.kernels.lookup import projected as kernel
from dlrm.kernels.lookup.projected import lookup_projected

GPU = torch.cuda.is_available()
SIZES = [3, 1, 20 * (4000 if GPU else 1)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative RMS


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    if not GPU:
        monkeypatch.setattr(kernel, "BLOCK", 16)
        monkeypatch.setattr(kernel, "TILES", 2)


def rms(value, reference):
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()


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
def test_rows_and_gradients(device, impl, batch, short, wide, index, dtype, sparse):
    weight, matrices, starts = make(short, wide, device, dtype)
    ids = draw(batch * (150 if GPU else 1), device)
    exact = [x.detach().double().requires_grad_() for x in (weight, matrices)]
    out = lookup_projected(weight, matrices, starts, ids.to(index), sparse=sparse, impl=impl)
    reference = torch.einsum("fbe,fed->bfd", exact[0][ids + starts[:, None]], exact[1])
    assert out.dtype == dtype
    assert rms(out, reference) < TOLERANCE[dtype]
    # The gradient arrives as a part of a larger one, as from an interaction that reads views.
    grad = torch.randn(*out.shape[:2], 2 * wide, device=device, dtype=dtype)[..., :wide]
    out.backward(grad)
    reference.backward(grad.double())
    assert weight.grad.is_sparse == sparse
    found = weight.grad
    if sparse:
        values = found._values().double()
        found = torch.zeros_like(exact[0]).index_add_(0, found._indices()[0], values)
    assert rms(found, exact[0].grad) < TOLERANCE[dtype]
    assert rms(matrices.grad, exact[1].grad) < 5 * TOLERANCE[dtype]  # a sum over all samples


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_ids_from_the_last_on_share_its_row(device, impl):
    weight, matrices, starts = make(4, 16, device)
    ids = draw(20, device)
    last = torch.tensor(SIZES, device=device) - 1
    out = lookup_projected(weight, matrices, starts, 3 * ids, last=last, impl=impl)
    local = (3 * ids).minimum(last[:, None])
    expected = lookup_projected(weight, matrices, starts, local, impl=impl)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    grads = [
        torch.autograd.grad(x, weight, grad, retain_graph=True)[0].to_dense()
        for x in (out, expected)
    ]
    torch.testing.assert_close(*grads)


def test_no_samples(device):
    weight, matrices, starts = make(4, 16, device)
    ids = torch.empty(len(SIZES), 0, dtype=torch.int64, device=device)
    out = lookup_projected(weight, matrices, starts, ids, impl="triton")
    assert out.shape == (0, len(SIZES), 16)
    out.sum().backward()
    assert not matrices.grad.any()
