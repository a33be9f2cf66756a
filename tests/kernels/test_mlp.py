"""MLPs whose layers are single launches, compared with PyTorch's operations."""

import pytest
import torch

from dlrm.kernels.mlp import mlp, mlp_torch
from dlrm.model import MLP

SIZES = {"one": [5, 3], "narrow": [13, 40, 8, 1], "wide": [64, 300, 130], "aligned": [16, 32, 8]}


def parameters(sizes, device, dtype=torch.float32):
    """Weights and biases by name, as of a model."""
    layers = MLP(sizes).to(device, dtype)
    return {name.replace(".", "_"): p for name, p in layers.named_parameters()}


def arguments(x, named):
    """The arguments of the op from an input and named parameters."""
    return x, [*named.values()][::2], [*named.values()][1::2]


@pytest.fixture(params=["highest", "high"])
def precision(request):
    """Of the products of fp32 matrices; TF32 has a thousand times the error."""
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("final_relu", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_output_and_gradients(
    device, sizes, final_relu, precision, assert_matches, nan_in_new_memory
):
    torch.manual_seed(0)
    named = parameters(sizes, device)
    x = torch.randn(70, sizes[0], device=device, requires_grad=True)

    def run(op, **options):
        return lambda x, **named: op(*arguments(x, named), final_relu=final_relu, **options)

    inputs = {"x": x, **named}
    factor = 4 if precision == "highest" or device.type == "cpu" else 30_000
    factors = dict.fromkeys(["output", *inputs], factor)
    assert_matches(run(mlp, impl="triton"), run(mlp_torch), inputs, factors=factors)


def test_under_autocast(device, assert_close, nan_in_new_memory):
    """Products in bf16, gradients in fp32."""
    if device.type == "cpu":
        pytest.skip("for products in Triton's interpreter, which has none in bf16")
    torch.manual_seed(0)
    named = parameters([13, 64, 32, 8], device)
    x = torch.randn(300, 13, device=device)
    results = []
    for op, options in ((mlp, {"impl": "triton"}), (mlp_torch, {})):
        with torch.autocast(device.type, torch.bfloat16):
            out = op(*arguments(x, named), **options)
        grads = torch.autograd.grad(out.float().square().sum(), list(named.values()))
        results.append((out, *grads))
    for name, found, expected in zip(["output", *named], *results, strict=True):
        assert found.dtype == (torch.bfloat16 if name == "output" else torch.float32)
        assert_close(found, expected, name, dtype=torch.bfloat16, factor=8)


def test_columns_beyond_the_weight_and_any_layout(device, assert_close):
    named = parameters([5, 16, 3], device)
    x = torch.randn(5, 40, device=device)  # a row per feature, as in a batch
    padded = torch.cat([x, torch.zeros(3, 40, device=device)])
    expected = mlp_torch(*arguments(x.t(), named))
    for given in (x.t(), padded.t(), padded.t().contiguous()):
        assert_close(mlp(*arguments(given, named), impl="triton"), expected)
    assert mlp(*arguments(x.t()[:0], named), impl="triton").shape == (0, 3)


@pytest.mark.parametrize("reads", ["after", "hook", "added", "grad"])
def test_gradients_are_ready_wherever_they_are_read(device, reads):
    """Those of weights are computed on a stream of their own: whatever reads them waits for it."""
    torch.manual_seed(0)
    named = parameters([64, 512, 512, 256], device)
    x = torch.randn(4096 if device.type == "cuda" else 70, 64, device=device)
    given, seen = list(named.values()), {}
    expected = torch.autograd.grad(mlp_torch(*arguments(x, named)).square().mean(), given)
    if reads == "hook":
        for p in given:
            p.register_post_accumulate_grad_hook(lambda p: seen.update({p: p.grad.clone()}))

    for _ in range(3):
        loss = mlp(*arguments(x, named), impl="triton").square().mean()
        if reads == "grad":
            found = torch.autograd.grad(loss, given)
        else:
            loss.backward(retain_graph=reads == "added")
            if reads == "added":
                loss.backward()
            found = [seen.get(p, p.grad).clone() for p in given]
        for own, right in zip(found, expected, strict=True):
            right = 2 * right if reads == "added" else right
            torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))
        for p in given:
            p.grad = None


def test_frozen_weights_have_no_gradient(device):
    named = parameters([8, 16, 4], device)
    named["0_weight"].requires_grad_(False)
    mlp(*arguments(torch.randn(9, 8, device=device), named), impl="triton").sum().backward()
    assert [name for name, p in named.items() if p.grad is None] == ["0_weight"]


def test_dropped_units_have_no_gradient(device):
    named = parameters([8, 64, 1], device)
    x = torch.randn(500, 8, device=device)
    with torch.no_grad():
        named["0_bias"].fill_(20.0)  # every unit is active
        named["2_weight"].fill_(1.0)
        named["2_bias"].zero_()
    x.requires_grad_()
    out = mlp(*arguments(x, named), final_relu=False, dropout=0.25, impl="triton")
    out.sum().backward()
    kept = named["0_bias"].grad / (500 / 0.75)  # of each unit, the share of samples
    assert kept.mean().item() == pytest.approx(0.75, abs=0.02)
    hidden = mlp_torch(*arguments(x, {"w": named["0_weight"], "b": named["0_bias"]}))
    assert out.mean().item() == pytest.approx(hidden.sum(1).mean().item(), rel=0.03)
