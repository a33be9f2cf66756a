import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from dlrm.embeddings import basis_linear
from dlrm.embeddings.basis import Basis
from dlrm.embeddings.basis_linear import BasisLinear
from dlrm.embeddings.common.fitting import kmeans
from dlrm.kernels.lookup.codebook import unpack


def clustered(rows, dim, clusters=6, noise=0.01):
    """Rows near a few centres."""
    return torch.randn(clusters, dim)[torch.randint(clusters, (rows,))] + noise * torch.randn(
        rows, dim
    )


def test_kmeans_finds_what_is_there():
    points = clustered(5000, 3)
    centroids, codes = kmeans(points, 6)
    assert (points - centroids[codes]).square().mean() < 2 * 0.01**2
    means = torch.stack([points[codes == name].mean(0) for name in range(6)])
    torch.testing.assert_close(centroids, means)
    nearest = torch.cdist(points, centroids).argmin(1)
    assert (nearest == codes).float().mean() > 0.99


def test_kmeans_beats_random_centroids():
    points = torch.randn(4000, 4)
    centroids, codes = kmeans(points, 32)
    found = (points - centroids[codes]).square().sum()
    drawn = torch.cdist(points, points[:32]).square().min(1).values.sum()
    assert found < 0.8 * drawn


def test_kmeans_of_few_distinct_points_is_exact():
    distinct = torch.randn(7, 3)
    points = distinct[torch.randint(7, (20_000,))]  # more than it learns from
    centroids, codes = kmeans(points, 12)
    torch.testing.assert_close(centroids[codes], points, rtol=1e-4, atol=1e-6)


def test_rows_are_put_together_from_the_centroids_that_codes_name():
    group = Basis([40, 300], 6, parts=3, clusters=50)
    assert group.weight.shape == (3 * (40 + 50), 2)
    assert group.codes.shape == (340, 3)  # 18 bits
    codes = unpack(group.codes, 3, 6)
    assert codes[:40].max() < 40
    assert 40 < codes[40:].max() < 50
    centroids = group.weight[3 * 40 :].view(3, 50, 2)
    expected = torch.cat([centroids[part][codes[40:, part]] for part in range(3)], 1)
    assert torch.equal(group.to_dense(1), expected)


def test_codes_take_no_more_bits_than_they_need():
    group = Basis([1000], 16, parts=8, clusters=384)
    assert group.codes.shape == (1000, 9)
    assert group.footprint() == [{"weights": 384 * 16 * 4, "codes": 9000}]
    assert Basis([100], 16, parts=8, clusters=384).codes.shape == (100, 7), "100 ids, 7 bits"


def test_a_trained_table_is_learnt():
    weights = [clustered(3000, 8), clustered(200, 8)]
    group = Basis.from_dense(weights, parts=2, clusters=6)
    for table, weight in enumerate(weights):
        error = (group.to_dense(table) - weight).square().mean()
        assert error < 3 * 0.01**2
    finer = Basis.from_dense([torch.randn(3000, 8)], parts=4, clusters=256)
    assert not torch.equal(finer.codes[0], finer.codes[1])


def test_codes_are_frozen_and_saved():
    group = Basis([50, 60], 8, clusters=5)
    assert [name for name, _ in group.named_parameters()] == ["weight"]
    assert set(group.state_dict()) == {"weight", "codes"}


@pytest.mark.parametrize("shape", [(7, 24), (2, 3, 24), (24,)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_equals_a_linear_layer_with_the_decoded_weight(shape, bias, device):
    layer = BasisLinear(24, 50, bias, parts=3, clusters=7).to(device)
    tokens = torch.randn(shape, device=device, requires_grad=True)
    weight = layer.to_dense()
    assert weight.shape == (50, 24)
    expected = functional.linear(tokens, weight, layer.bias)
    torch.testing.assert_close(layer(tokens), expected)


def test_gradients_of_the_layer_equal_those_through_the_decoded_weight(device):
    layer = BasisLinear(24, 50, parts=3, clusters=7).to(device)
    tokens = torch.randn(9, 24, device=device, requires_grad=True)
    up = torch.randn(9, 50, device=device)
    codes = layer.codes_of_outputs().t()
    decoded = torch.cat([own[names] for own, names in zip(layer.weight, codes, strict=True)], 1)
    inputs = [tokens, layer.weight, layer.bias]
    expected = torch.autograd.grad(functional.linear(tokens, decoded, layer.bias), inputs, up)
    found = torch.autograd.grad(layer(tokens), inputs, up)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_trained_layer_is_compressed_and_not_kept():
    linear = nn.Linear(16, 400)
    with torch.no_grad():
        linear.weight.copy_(torch.cat([clustered(400, 8), clustered(400, 8)], 1))
    dense = weakref.ref(linear.weight)
    tokens = torch.randn(5, 16)
    expected = linear(tokens)
    layer = BasisLinear.from_linear(linear, parts=2, clusters=6)
    torch.testing.assert_close(layer(tokens), expected, rtol=0.05, atol=0.2)
    assert torch.equal(layer.bias, linear.bias)
    assert layer.weight.numel() == 6 * 16
    assert layer.footprint()["codes"] == 400
    assert layer.weight.requires_grad
    del linear, expected
    gc.collect()
    assert dense() is None


def test_a_fresh_layer_loads_a_converted_one():
    layer = BasisLinear.from_linear(nn.Linear(16, 400), parts=4, clusters=30)
    fresh = BasisLinear(16, 400, parts=4, clusters=30)
    tokens = torch.randn(3, 16)
    assert not torch.equal(fresh(tokens), layer(tokens))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(tokens), layer(tokens))
    assert torch.equal(fresh._index().order, layer._index().order), "of the codes that were loaded"


def test_the_index_is_of_the_codes_that_there_are_and_not_of_their_address():
    """A layer that has been on the CPU meanwhile often finds the memory of its codes again."""
    layer = BasisLinear(8, 12, parts=2, clusters=4)
    memory = layer.codes.numpy().copy()
    layer.codes = torch.from_numpy(memory)
    before = layer._index()
    memory[:] = memory[::-1].copy()
    layer.codes = torch.from_numpy(memory)
    assert layer.codes._version == 0
    found = layer._index()
    assert not torch.equal(found.order, before.order)
    assert layer._index() is found


def test_a_layer_of_few_outputs_is_exact():
    linear = nn.Linear(8, 20, bias=False, dtype=torch.bfloat16)
    layer = BasisLinear.from_linear(linear, parts=2, clusters=384)
    assert layer.bias is None
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.to_dense(), linear.weight)


def test_parts_of_a_layer_must_divide_its_input():
    with pytest.raises(ValueError, match="to a divisor of the in_features, 10"):
        BasisLinear(10, 50, parts=8)


@pytest.mark.parametrize("shape", [(3, 8), (3, 32), (16, 3)])
def test_a_linear_layer_refuses_inputs_of_another_length(shape):
    with pytest.raises(ValueError, match=r"input has shape .* it must be \[..., 16\]"):
        BasisLinear(16, 50, parts=4)(torch.randn(shape))


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("parts", [1, 4])  # parts of 16 inputs, and short ones
def test_a_layer_on_a_cpu_follows_its_codes_and_weights(tokens, parts):
    layer = BasisLinear(16, 40, parts=parts, clusters=300).eval()
    x = torch.randn(tokens, 16)

    def require_equal():
        wanted = functional.linear(x, layer.to_dense(), layer.bias)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(layer(x), wanted)  # with a graph

    require_equal()
    with torch.no_grad():
        layer.weight.mul_(2)
    require_equal()
    other = BasisLinear(16, 40, parts=parts, clusters=300)
    layer.load_state_dict(other.state_dict())
    require_equal()
    layer.codes = other.codes.flip(0)
    require_equal()
    layer.train()
    layer.weight.data.mul_(3)  # not seen by the version of the parameter
    layer.eval()
    require_equal()
    layer.bfloat16().float()
    require_equal()


@pytest.mark.parametrize(
    ("inputs", "outputs", "tokens", "plain"),
    [
        (64, 2_000, 16, True),
        (64, 20_000, 4, True),
        (64, 20_000, 5, False),  # its products are fewer
        (64, 50_000, 1, True),
        (64, 50_000, 2, False),
        (64, 100_000, 1, False),  # 26 MB, more than a cache holds
        (32, 20_000, 16, True),
        (256, 2_000, 2, True),
        (256, 20_000, 1, False),
    ],
)
def test_a_small_layer_in_evaluation_on_a_cpu_is_a_plain_product(
    inputs, outputs, tokens, plain, monkeypatch
):
    layer = BasisLinear(inputs, outputs).eval()
    x = torch.randn(tokens, inputs)
    wanted = functional.linear(x, layer.to_dense(), layer.bias)

    def count(grad):
        sums = []
        with monkeypatch.context() as patch, torch.set_grad_enabled(grad):
            real = basis_linear.selected_sum
            patch.setattr(basis_linear, "selected_sum", lambda *a: sums.append(1) or real(*a))
            torch.testing.assert_close(layer(x), wanted)
        return len(sums)

    assert count(grad=False) == (0 if plain else 1)
    assert count(grad=True) == 1, "the decoded weight has no gradient"
    layer.double()
    x, wanted = x.double(), functional.linear(x.double(), layer.to_dense(), layer.bias)
    assert count(grad=False) == 1, "the plain product is of fp32"


def test_what_is_kept_on_a_cpu_is_counted():
    layer = BasisLinear(64, 20_000)
    own = {"weights": 8 * 384 * 8 * 4 + 80_000, "codes": 180_000}
    trained = layer.footprint()
    layer(torch.randn(2, 64)).sum().backward()
    kept = layer._rows.nbytes + layer._members.nbytes
    assert trained == layer.footprint() == {**own, "index": kept, "decoded": 0}
    layer.eval()
    with torch.no_grad():
        layer(torch.randn(2, 64))
    assert layer._decoded.nbytes == 5_120_000
    assert layer.footprint() == {**own, "index": layer._rows.nbytes, "decoded": 5_120_000}
    assert BasisLinear(64, 200_000).eval().footprint()["decoded"] == 0
