"""The update of many parameters at once against plain PyTorch and torch.optim."""

import pytest
import torch

from dlrm.kernels import whole
from dlrm.kernels.whole import RULES, update_whole
from dlrm.optim import RowOptimizer

SHAPES = [(5, 3), (7,), (1, 2500), (), (3, 2, 4), (0, 4), (1300,)]


def make(rule, device, shapes=SHAPES, dtype=torch.float32):
    parameters = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    optimizer = RowOptimizer([p.requires_grad_() for p in parameters], rule, lr=0.1)
    sums = [optimizer.state[p]["sum"] for p in parameters] if rule != "sgd" else []
    return parameters, sums


def run(rule, parameters, sums, grads, impl):
    parameters, sums = ([t.detach().clone() for t in tensors] for tensors in (parameters, sums))
    lr = torch.tensor(0.1, device=parameters[0].device)
    for grad in grads:
        update_whole(rule, parameters, grad, sums, lr=lr, eps=1e-3, impl=impl)
    return parameters + sums


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_and_state_equal_pytorch(rule, device):
    parameters, sums = make(rule, device)
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(3)]
    got = run(rule, parameters, sums, grads, "triton")
    want = run(rule, parameters, sums, grads, "torch")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert not any(torch.equal(a, p) for a, p in zip(got, parameters, strict=False) if p.numel())


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_more_parameters_than_one_launch_takes(rule, device, monkeypatch):
    monkeypatch.setattr(whole, "TENSORS", 2)
    parameters, sums = make(rule, device, [(2, 3)] * 5)
    grads = [[torch.randn_like(p) for p in parameters]]
    got = run(rule, parameters, sums, grads, "triton")
    for a, b in zip(got, run(rule, parameters, sums, grads, "torch"), strict=True):
        torch.testing.assert_close(a, b)


def test_adagrad_follows_torch(device):
    parameters, sums = make("adagrad", device, [(4, 6)])
    theirs = parameters[0].detach().clone().requires_grad_()
    optimizer = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-3)
    grads = [[torch.randn_like(theirs)] for _ in range(3)]
    for (grad,) in grads:
        theirs.grad = grad
        optimizer.step()
    torch.testing.assert_close(run("adagrad", parameters, sums, grads, "triton")[0], theirs.data)


def test_a_gradient_may_lie_transposed(device):
    parameters, sums = make("sgd", device, [(4, 6)])
    grads = [[torch.randn(6, 4, device=device).t()]]
    got = run("sgd", parameters, sums, grads, "triton")
    torch.testing.assert_close(got, run("sgd", parameters, sums, grads, "torch"))


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
@pytest.mark.parametrize("rule", RULES)
def test_bf16_beside_fp32(rule, device):
    parameters, sums = make(rule, device, [(5, 300)])
    narrow, narrow_sums = make(rule, device, [(40, 8)], torch.bfloat16)
    parameters, sums = parameters + narrow, sums + narrow_sums
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(3)]
    got = run(rule, parameters, sums, grads, "triton")
    for a, b in zip(got, run(rule, parameters, sums, grads, "torch"), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_errors_name_what_is_missing(device):
    parameters, sums = make("adagrad", device, [(2, 2), (3,)])
    lr = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match="did you mean 'adagrad'"):
        update_whole("adagrat", parameters, parameters, sums, lr=lr)
    with pytest.raises(
        ValueError, match="2 parameters have 1 gradients .* adagrad takes 2"
    ):
        update_whole("adagrad", parameters, parameters[:1], sums, lr=lr)
