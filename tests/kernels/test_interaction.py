"""The dot interaction against the plain formula in float64, outputs and gradients."""

import pytest
import torch
from torch.nn import functional

from dlrm.kernels.interaction import dot_interaction, dot_interaction_torch

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
IMPLS = ["triton", "torch"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def exact(bottom, embedded):
    x = torch.cat([bottom[:, None], embedded], dim=1)
    row, column = torch.tril_indices(x.shape[1], x.shape[1], -1)
    return torch.cat([bottom, (x @ x.mT)[:, row, column]], dim=1)


@pytest.fixture
def check(assert_matches):
    """Compares the output and every gradient with float64."""

    def check(bottom, parts, order, impl, multiple=1):
        def padded(bottom, **parts):
            joint = torch.cat(list(parts.values()), dim=1)
            out = exact(bottom, joint if order is None else joint[:, order])
            return functional.pad(out, (0, -out.shape[1] % multiple))

        out, _ = assert_matches(
            lambda bottom, **parts: dot_interaction(
                bottom, list(parts.values()), order=order, multiple=multiple, impl=impl
            ),
            padded,
            {"bottom": bottom, **{f"part_{i}": part for i, part in enumerate(parts)}},
        )
        pairs = sum(part.shape[1] for part in parts)
        assert out.dtype == bottom.dtype
        assert not out[:, bottom.shape[1] + pairs * (pairs + 1) // 2 :].any()

    return check


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtypes", ["fp32 fp32", "bf16 bf16", "bf16 fp32", "fp32 bf16"])
@pytest.mark.parametrize(
    ("batch", "tables", "dim", "multiple"),
    [
        (7, 26, 16, 8),
        (1, 1, 4, 1),
        (5, 3, 20, 1),
        (3, 40, 100, 16),
        (2, 64, 256, 8),
        (2, 300, 4, 8),
    ],
)
def test_matches_float64(device, check, impl, dtypes, batch, tables, dim, multiple):
    dtypes = [DTYPES[name] for name in dtypes.split()]
    if dtypes[0] == torch.bfloat16 and impl == "triton" and not GPU:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices as if they were integers")
    batch *= 300 if GPU and batch > 1 else 1
    bottom = torch.randn(batch, dim, device=device, dtype=dtypes[0]).requires_grad_()
    embedded = torch.randn(batch, tables, dim, device=device, dtype=dtypes[1]).requires_grad_()
    check(bottom, [embedded], None, impl, multiple)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("types", ["fp32 fp32 fp32", "fp32 bf16 fp32 bf16"])
def test_several_groups_in_another_order(device, check, impl, types):
    tables = dict(zip((2, 5, 1, 3), types.split(), strict=False))
    parts = [
        torch.randn(5, count, 12, device=device, dtype=DTYPES[name]).requires_grad_()
        for count, name in tables.items()
    ]
    bottom = torch.randn(5, 12, device=device).requires_grad_()
    order = torch.randperm(sum(tables), device=device)
    check(bottom, parts, torch.stack([order, -order], 1)[:, 0], impl)  # of every other number


def test_reads_its_inputs_in_place(device, check, assert_close):
    buffer = torch.randn(6, 9, 24, device=device)
    embedded = buffer[:, 1:6, :20].requires_grad_()
    bottom = buffer[:, 8, :20].requires_grad_()
    transposed = torch.randn(4, 6, 20, device=device).requires_grad_()
    check(bottom, [embedded], None, "triton")
    out = dot_interaction(bottom, transposed.transpose(0, 1), impl="triton")
    assert_close(out, exact(bottom, transposed.transpose(0, 1)))
    out.sum().backward()
    assert transposed.grad.shape == transposed.shape


def test_gradient_may_be_a_view(device, assert_close):
    bottom = torch.randn(4, 8, device=device).requires_grad_()
    embedded = torch.randn(4, 3, 8, device=device).requires_grad_()
    out = dot_interaction(bottom, embedded, impl="triton")
    (out.t() * torch.ones(14, 4, device=device)).t().sum().backward()
    grads = bottom.grad.clone(), embedded.grad.clone()
    bottom.grad = embedded.grad = None
    dot_interaction_torch(bottom, embedded).sum().backward()
    assert_close(grads[0], bottom.grad, "bottom")
    assert_close(grads[1], embedded.grad, "embedded")


def test_no_samples(device):
    out = dot_interaction(
        torch.empty(0, 8, device=device), torch.empty(0, 3, 8, device=device), impl="triton"
    )
    assert out.shape == (0, 14)


def test_messages():
    with pytest.raises(ValueError, match=r"bottom is \(2, 8\) and embedded \[\(2, 3, 4\)\]"):
        dot_interaction(torch.zeros(2, 8), torch.zeros(2, 3, 4))
    for bottom, embedded in ((torch.zeros(8), [torch.zeros(2, 3, 8)]), (torch.zeros(2, 8), [])):
        with pytest.raises(ValueError, match=r"they must be \[B, D\] and \[B, F, D\]"):
            dot_interaction(bottom, embedded)
    order = torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"order has shape \(2,\), it must be \[3\]"):
        dot_interaction(torch.zeros(2, 8), torch.zeros(2, 3, 8), order=order)


@pytest.mark.gpu
def test_high_precision_setting_is_honoured(assert_close):
    bottom, embedded = torch.randn(50, 16, device="cuda"), torch.randn(50, 26, 16, device="cuda")
    reference = exact(bottom.double().cpu(), embedded.double().cpu()).cuda()[:, 16:]
    assert_close(dot_interaction(bottom, embedded)[:, 16:], reference)
    torch.set_float32_matmul_precision("high")
    try:
        found = dot_interaction(bottom, embedded)[:, 16:].double()
    finally:
        torch.set_float32_matmul_precision("highest")
    error = (found - reference).norm() / reference.norm()
    assert 1e-5 < error < 1e-3
