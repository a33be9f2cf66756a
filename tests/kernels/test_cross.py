"""The cross network and its input against the plain formulas in float64, outputs and gradients."""

import pytest
import torch

from dlrm.kernels.cross import CrossWeights, concatenate_vectors, cross_network

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")
IMPLS = ["triton", "torch"]


def exact_cross(first, **weights):
    x, values = first, list(weights.values())
    for down, up, bias in zip(values[::3], values[1::3], values[2::3], strict=True):
        x = first * (x @ down.mT @ up.mT + bias) + x
    return x


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "n", "rank", "layers"), [(70, 24, 5, 3), (1, 8, 8, 1), (3, 600, 16, 2)]
)
def test_layers_match_float64(device, assert_matches, impl, dtype, batch, n, rank, layers):
    if dtype == torch.bfloat16 and not (GPU and impl == "triton"):
        pytest.skip("on a CPU the casts are those of autocast")
    batch *= 100 if GPU and batch > 1 else 1
    inputs = {"first": torch.randn(batch, n, device=device, dtype=dtype)}
    for layer in range(layers):
        inputs[f"down_{layer}"] = torch.randn(rank, n, device=device) * n**-0.5
        inputs[f"up_{layer}"] = torch.randn(n, rank, device=device) * rank**-0.5
        inputs[f"bias_{layer}"] = torch.randn(n, device=device)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}

    def op(first, **weights):
        values = list(weights.values())
        every = zip(values[::3], values[1::3], values[2::3], strict=True)
        return cross_network(first, [CrossWeights(*own) for own in every], impl=impl)

    # The roundings of several layers add up.
    factors = dict.fromkeys([*inputs, "output"], 6 if dtype == torch.bfloat16 else 4)
    out, _ = assert_matches(op, exact_cross, inputs, factors=factors)
    assert out.dtype == dtype


def test_only_with_leave_is_the_gradient_of_the_output_overwritten(device):
    first = torch.randn(5, 24, device=device)
    layers = [
        CrossWeights(*(torch.randn(shape, device=device) for shape in ((3, 24), (24, 3), (24,))))
        for _ in range(3)
    ]
    found = []
    for overwrites in (False, True):
        x = first.clone().requires_grad_()
        grad = torch.ones_like(first)
        cross_network(x, layers, overwrites=overwrites, impl="triton").backward(grad)
        assert bool((grad == 1).all()) is not overwrites
        found.append(x.grad)
    assert torch.equal(*found)


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
        return concatenate_vectors(bottom, [few, many], order=order, impl=impl)

    def exact(bottom, few, many):
        return torch.cat([bottom[:, None], torch.cat([few, many], 1)[:, order]], 1).flatten(1)

    out, _ = assert_matches(op, exact, inputs)
    assert out.dtype == kinds[0]


def test_an_order_that_is_not_of_all_vectors_is_refused():
    with pytest.raises(ValueError, match=r"order has shape \(2,\), it must be \[3\]"):
        concatenate_vectors(torch.zeros(2, 8), [torch.zeros(2, 3, 8)], order=torch.tensor([1, 0]))


def test_vectors_of_another_length_are_refused(device):
    bottom = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"must be \[B, D\] and \[B, F, D\]"):
        concatenate_vectors(bottom, [torch.randn(4, 2, 6, device=device)])


def test_weights_that_a_kernel_would_misread_are_refused(device):
    first, weight = torch.randn(2, 8, device=device), torch.randn(8, 4, device=device)
    layer = CrossWeights(weight.t(), weight, weight.new_zeros(16)[::2])
    with pytest.raises(ValueError, match="must be contiguous"):
        cross_network(first, [layer], impl="triton")
