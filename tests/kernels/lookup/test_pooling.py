"""Bags of vectors that lie one bag after another."""

from itertools import pairwise

import pytest
import torch

from dlrm.kernels.lookup.pool import MODES, pool_bags
from dlrm.utils.bags import Bags

TABLES, BATCH = 3, 5


def draw(dim, device, *, fixed, beyond=0):
    """Vectors of bags, the offsets of the bags, and a factor for each vector."""
    torch.manual_seed(0)
    lengths = torch.tensor([2, 0, 5]).repeat_interleave(BATCH)
    if not fixed:
        lengths = torch.randint(0, 6, (TABLES * BATCH,))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count = int(offsets[-1]) + beyond
    vectors = torch.randn(count, dim, device=device)
    return vectors.requires_grad_(), offsets.to(device), torch.rand(count, device=device)


def bags_of(vectors, offsets, scale=None):
    """Bags of which vector k belongs to id k."""
    return Bags(torch.arange(len(vectors), device=vectors.device), offsets, scale)


def exact(vectors, offsets, mode, scale=None):
    """The pooled bags one by one, ``[B, F, D]``."""
    out = vectors.new_zeros(TABLES * BATCH, vectors.shape[1])
    for bag, (begin, end) in enumerate(pairwise(offsets.tolist())):
        own = vectors[begin:end] if scale is None else vectors[begin:end] * scale[begin:end, None]
        if len(own):
            out[bag] = {"sum": own.sum(0), "mean": own.mean(0), "max": own.max(0).values}[mode]
    return out.view(TABLES, BATCH, -1).transpose(0, 1)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dim", "fixed"), [(1, True), (1, False), (3, False), (16, True)])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_bags_are_pooled(device, assert_matches, impl, mode, dim, fixed):
    vectors, offsets, scale = draw(dim, device, fixed=fixed)
    inputs = {"vectors": vectors}
    if mode == "sum":
        inputs["scale"] = scale.requires_grad_()
    assert_matches(
        lambda vectors, scale=None: pool_bags(
            vectors, bags_of(vectors, offsets, scale), TABLES, mode=mode, impl=impl
        ),
        lambda vectors, scale=None: exact(vectors, offsets, mode, scale),
        inputs,
    )


@pytest.mark.parametrize("mode", MODES)
def test_what_lies_beyond_the_last_bag_is_left_out(device, mode):
    vectors, offsets, _ = draw(4, device, fixed=False, beyond=7)
    own = vectors.detach()[:-7].requires_grad_()
    outs = [
        pool_bags(each, bags_of(each, offsets), TABLES, mode=mode, impl="triton")
        for each in (vectors, own)
    ]
    assert torch.equal(*outs)
    for out in outs:
        (out * torch.arange(4, device=device)).sum().backward()
    assert torch.equal(vectors.grad[:-7], own.grad)
    assert not vectors.grad[-7:].any()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bf16_vectors_are_summed_in_fp32(device, impl):
    vectors = torch.full((301, 2), 1.0, dtype=torch.bfloat16, device=device)
    vectors[0] = 256
    bags = bags_of(vectors, torch.tensor([0, 301], device=device))
    out = pool_bags(vectors.float(), bags, 1, dtype=torch.bfloat16, impl=impl)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [556.0] * 2
    if impl == "triton":  # where PyTorch sums bf16 vectors, it rounds each time on a CPU
        assert pool_bags(vectors, bags, 1, impl=impl).flatten().tolist() == [556.0] * 2


def test_wrong_arguments_are_named(device):
    vectors, offsets, scale = draw(2, device, fixed=True)
    with pytest.raises(ValueError, match="unknown mode 'maen', did you mean 'mean'"):
        pool_bags(vectors, bags_of(vectors, offsets), TABLES, mode="maen")
    with pytest.raises(ValueError, match=r"15 offsets for 3 tables: there must be one more"):
        pool_bags(vectors, bags_of(vectors, offsets[:-1]), TABLES)
    with pytest.raises(ValueError, match="per_sample_weights need mode sum, the mode is mean"):
        pool_bags(vectors, bags_of(vectors, offsets, scale), TABLES, mode="mean")
