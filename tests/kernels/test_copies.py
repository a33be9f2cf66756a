"""Several matrices copied in one launch."""

import pytest
import torch

from dlrm.kernels.copies import copy_together


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("width", [1, 37, 1024, 3000])
def test_each_becomes_the_other(device, impl, width):
    order = torch.tensor([2, 0, 4, 1, 3], device=device)
    sources = [
        torch.randn(13, width, device=device),
        torch.rand(width, device=device),
        torch.randint(2**40, (5, width), device=device),
        torch.randint(2**20, (width, 5), device=device, dtype=torch.int32).t(),  # not contiguous
    ]
    targets = [torch.zeros_like(s, memory_format=torch.contiguous_format) for s in sources]
    copy_together(targets, sources, [None, None, order, order], impl=impl)
    for target, expected in zip(
        targets, [*sources[:2], sources[2][order], sources[3][order]], strict=True
    ):
        assert torch.equal(target, expected)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_an_empty_batch(device, impl):
    empty = torch.empty(3, 0, device=device)
    copy_together([empty], [empty], [None], impl=impl)


def test_what_does_not_fit(device):
    target = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match=r"has shape \(3, 5\) on .*, it must have \(3, 4\)"):
        copy_together([target], [torch.zeros(3, 5, device=device)], [None])
    with pytest.raises(ValueError, match="on meta, it must have"):
        copy_together([target], [torch.zeros(3, 4, device="meta")], [None])
