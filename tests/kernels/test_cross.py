"""The cross network and its input against the plain formulas in float64, outputs and gradients."""

import pytest
import torch

from dlrm.kernels.cross import CrossWeights, cross_network

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
IMPLS = ["triton", "torch"]


def exact_cross(bottom, embedded, **weights):
    first, values = torch.cat([bottom[:, None], embedded], 1).flatten(1), list(weights.values())
    x = first
    for down, up, bias in zip(values[::3], values[1::3], values[2::3], strict=True):
        x = first * (x @ down.mT @ up.mT + bias) + x
    return x


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "dim", "tables", "rank", "layers"),
    [(70, 8, 2, 5, 3), (1, 4, 1, 8, 1), (3, 100, 5, 16, 2)],
)
def test_layers_match_float64(
    device, assert_matches, impl, dtype, batch, dim, tables, rank, layers
):
    if dtype == torch.bfloat16 and not (GPU and impl == "triton"):
        pytest.skip("on a CPU the casts are those of autocast")
    batch *= 100 if GPU and batch > 1 else 1
    n = (tables + 1) * dim
    inputs = {
        "bottom": torch.randn(batch, dim, device=device, dtype=dtype),
        "embedded": torch.randn(batch, tables, dim, device=device, dtype=dtype),
    }
    for layer in range(layers):
        inputs[f"down_{layer}"] = torch.randn(rank, n, device=device) * n**-0.5
        inputs[f"up_{layer}"] = torch.randn(n, rank, device=device) * rank**-0.5
        inputs[f"bias_{layer}"] = torch.randn(n, device=device)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}

    def op(bottom, embedded, **weights):
        values = list(weights.values())
        every = zip(values[::3], values[1::3], values[2::3], strict=True)
        every = [CrossWeights(*own) for own in every]
        return cross_network(bottom, [embedded], every, impl=impl)

    # The roundings of several layers add up.
    factors = dict.fromkeys([*inputs, "output"], 4 if dtype == torch.float32 else 6)
    out, _ = assert_matches(op, exact_cross, inputs, factors=factors)
    assert out.dtype == dtype


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("types", [("fp32", "fp32", "fp32"), ("bf16", "bf16", "fp32")])
def test_vectors_of_several_groups_lie_in_order(device, assert_matches, impl, types):
    kinds = [{"fp32": torch.float32, "bf16": torch.bfloat16}[name] for name in types]
    order = torch.randperm(7, device=device)
    shapes = (5, 12), (5, 2, 12), (5, 5, 12)
    names = "bottom", "few", "many"
    inputs = {
        name: torch.randn(shape, device=device, dtype=kind).requires_grad_()
        for name, shape, kind in zip(names, shapes, kinds, strict=True)
    }

    def op(bottom, few, many):
        return cross_network(bottom, [few, many], [], order=order, impl=impl)

    def exact(bottom, few, many):
        return torch.cat([bottom[:, None], torch.cat([few, many], 1)[:, order]], 1).flatten(1)

    out, _ = assert_matches(op, exact, inputs)
    assert out.dtype == kinds[0]


def test_an_order_that_is_not_of_all_vectors_is_refused():
    with pytest.raises(ValueError, match=r"order has shape \(2,\), it must be \[3\]"):
        cross_network(torch.zeros(2, 8), [torch.zeros(2, 3, 8)], [], order=torch.tensor([1, 0]))


def test_vectors_of_another_length_are_refused(device):
    bottom = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"must be \[B, D\] and \[B, F, D\]"):
        cross_network(bottom, [torch.randn(4, 2, 6, device=device)], [])


def test_weights_that_a_kernel_would_misread_are_refused(device):
    bottom, part = torch.randn(2, 4, device=device), torch.randn(2, 1, 4, device=device)
    weight = torch.randn(8, 4, device=device)
    layer = CrossWeights(weight.t(), weight, weight.new_zeros(16)[::2])
    with pytest.raises(ValueError, match="must be contiguous"):
        cross_network(bottom, [part], [layer], impl="triton")
