"""The codebook kernel, its packed codes, and its gradients."""

import pytest
import torch

from dlrm.kernels.lookup import codebook
from dlrm.kernels.lookup.codebook import (
    BAG_TOKENS,
    code_bits,
    codebook_sum,
    codebook_sum_torch,
    members,
    pack,
    selected_rows,
    selected_sum,
    unpack,
)
from tests.kit import GPU, combinations

SMALL = {codebook: {"BLOCK_V": 16, "BLOCK_N": 16, "SUM_N": 16}}
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.mark.parametrize("clusters", [1, 2, 3, 16, 17, 256, 257, 384, 512, 65_536])
def test_bits_tell_all_codes_apart(clusters):
    bits = code_bits(clusters)
    assert 2**bits >= clusters
    assert bits == 1 or 2 ** (bits - 1) < clusters


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("bits", [1, 3, 7, 8, 9, 12, 13, 16])
def test_packed_codes_come_back(parts, bits):
    codes = torch.randint(1 << bits, (57, parts))
    codes[0], codes[1] = 0, (1 << bits) - 1
    packed = pack(codes, bits)
    assert packed.shape == (57, -(-parts * bits // 8))
    assert torch.equal(unpack(packed, parts, bits), codes)
    assert torch.equal(unpack(packed.view(3, 19, -1), parts, bits), codes.view(3, 19, parts))
    assert torch.equal(unpack(packed[4], parts, bits), codes[4])


@pytest.mark.parametrize("segment", [1, 16, 512])
def test_members_are_all_entries_by_centroid(segment, monkeypatch):
    monkeypatch.setattr(codebook, "SEGMENT", segment)
    codes = torch.randint(7, (100, 3))
    codes[:, 1] = 4  # one centroid has all
    found = members(pack(codes, 3), 3, 3, 7)
    spans = found.segments.tolist()
    assert all(end <= begin + segment for begin, end in spans)
    for part in range(3):
        for name in range(7):
            begin, end = found.first[7 * part + name : 7 * part + name + 2].tolist()
            own = torch.cat(
                [found.order[slice(*span)] for span in spans[begin:end]] + [found.order[:0]]
            )
            assert torch.equal(own.long(), (codes[:, part] == name).nonzero()[:, 0])
    assert all(begin >= end for begin, end in spans[found.first[-1] :])


def test_gradients_of_centroids_that_many_entries_share(device, assert_matches, monkeypatch):
    monkeypatch.setattr(codebook, "SEGMENT", 16)
    codes = torch.zeros(90, 2, dtype=torch.int64, device=device)
    codes[:20] = torch.randint(9, (20, 2), device=device)
    packed = pack(codes, 4)
    index = members(packed, 2, 4, 9)
    assert_matches(
        lambda products: codebook_sum(products, packed, None, 4, index, impl="triton"),
        lambda products: codebook_sum_torch(products, packed, None, 4),
        {"products": torch.randn(2, 9, 5, device=device, requires_grad=True)},
    )


SIZES = [(1, 1, 1, 1), (5, 20, 3, 9), (17, 35, 9, 3), (3, 40, 4, 5)]
"""Tokens, entries, parts and clusters."""


@combinations(
    sizes=SIZES + ([(67, 130, 8, 20), (64, 64, 2, 40), (3, 201, 4, 5)] if GPU else []),
    dtype=[torch.float32, torch.bfloat16],
    with_bias=[False, True],
)
def test_sums_and_gradients_agree_with_pytorch(sizes, dtype, with_bias, device, assert_matches):
    tokens, entries, parts, clusters = sizes
    bits = code_bits(clusters)
    packed = pack(torch.randint(clusters, (entries, parts), device=device), bits)
    index = members(packed, parts, bits, clusters)
    inputs = {"products": torch.randn(parts, clusters, tokens, device=device, dtype=dtype)}
    if with_bias:
        inputs["bias"] = torch.randn(entries, device=device, dtype=dtype)
    factor = 2 if dtype == torch.bfloat16 else 1
    out, _ = assert_matches(
        lambda products, bias=None: codebook_sum(
            products, packed, bias, bits, index, impl="triton"
        ),
        lambda products, bias=None: codebook_sum_torch(products, packed, bias, bits),
        {name: x.requires_grad_() for name, x in inputs.items()},
        factors=dict.fromkeys(("output", *inputs), factor),
    )
    assert out.dtype == dtype


@pytest.mark.parametrize(("parts", "clusters"), [(8, 384), (2, 256), (6, 1500), (3, 40_000)])
def test_codes_of_any_length_are_read(parts, clusters, device, assert_close):
    codes, bits = torch.randint(clusters, (70, parts), device=device), code_bits(clusters)
    packed = pack(codes, bits)
    products = torch.randn(parts, clusters, 9, device=device, dtype=torch.float16)
    index = members(packed, parts, bits, clusters)
    out = codebook_sum(products, packed, None, bits, index, impl="triton")
    exact = codebook_sum_torch(products.double(), packed, None, bits)
    assert_close(out, exact)


def test_the_bias_may_be_a_view_and_the_codes_must_not(device, assert_close):
    packed = pack(torch.randint(5, (7, 3), device=device), 3)
    products, bias = torch.randn(3, 5, 2, device=device), torch.randn(14, device=device)[::2]
    out = codebook_sum(products, packed, bias, 3, None, impl="triton")
    assert_close(out, codebook_sum_torch(products, packed, bias, 3))
    cut = torch.cat([packed, packed], 1)[:, : packed.shape[1]]
    with pytest.raises(ValueError, match=r"^codes has shape \(7, 2\) and strides .* codes.contig"):
        codebook_sum(products, cut, bias, 3, None, impl="triton")


@pytest.mark.parametrize("tokens", [0, 1, 2, 9, BAG_TOKENS, BAG_TOKENS + 1, 2 * BAG_TOKENS + 3])
def test_an_index_changes_no_gradient_of_the_reference(tokens, assert_close):
    codes = torch.randint(5, (40, 3))
    codes[codes == 2] = 0  # a centroid of no entry
    packed = pack(codes, 3)
    products, up = torch.randn(3, 5, tokens, requires_grad=True), torch.randn(tokens, 40)
    bias = torch.randn(40, requires_grad=True)
    rows, index = selected_rows(packed, 3, 3, 5), members(packed, 3, 3, 5)
    out = selected_sum(products, rows, bias, index)
    expected = codebook_sum_torch(products, packed, bias, 3)
    assert torch.equal(out, expected)
    found, wanted = (torch.autograd.grad(each, [products, bias], up) for each in (out, expected))
    assert_close(found[0], wanted[0])
    assert_close(found[1], up.sum(0))


def test_no_tokens(device):
    packed = pack(torch.randint(4, (10, 2), device=device), 2)
    products = torch.randn(2, 4, 0, device=device, requires_grad=True)
    out = codebook_sum(products, packed, None, 2, members(packed, 2, 2, 4), impl="triton")
    assert out.shape == (0, 10)
    out.sum().backward()
    assert products.grad.shape == (2, 4, 0)


def test_without_an_index_there_is_no_backward_pass(device):
    packed = pack(torch.randint(4, (10, 2), device=device), 2)
    products = torch.randn(2, 4, 3, device=device, requires_grad=True)
    out = codebook_sum(products, packed, None, 2, None, impl="triton")
    with pytest.raises(ValueError, match="without an index has no backward pass"):
        out.sum().backward()


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_half_precision_is_summed_in_single(impl, device):
    products = torch.ones(300, 2, 3, dtype=torch.bfloat16, device=device)
    codes = torch.zeros(5, 38, dtype=torch.uint8, device=device)
    out = codebook_sum(products, codes, torch.zeros(5, device=device), 1, None, impl=impl)
    assert out.dtype == torch.bfloat16
    assert (out == 300).all()  # bf16 has no number between 256 and 258, sums would end at 256
