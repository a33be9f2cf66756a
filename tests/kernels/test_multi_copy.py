"""Several matrices copied in one launch."""

import pytest
import torch
from torch.nn import functional

from dlrm.data.batch import Batch
from dlrm.kernels.multi_copy import cast_together, copy_together


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
    for source in (target[:2], target.double(), target.to("meta")):
        with pytest.raises(
            ValueError, match=r"source 1 is \(torch\.float.*, its target \(torch\.f"
        ):
            copy_together([target, target], [target, source], [None, None])
    turned = torch.zeros(4, 4, device=device).t()
    with pytest.raises(ValueError, match="target 1 must be contiguous"):
        copy_together([target, turned], [target, turned], [None, None])


def test_casts_fill_up_rows_with_zeros(device, nan_in_new_memory):
    exact = torch.randn(200, device=device).bfloat16()  # Triton's interpreter does not round
    tensors = [
        exact[:39].float().view(3, 13),
        exact[:7].float(),
        exact[:15].float().view(5, 3).t(),
        exact[:16].view(2, 8),
        exact[:0].float().view(0, 4),
    ]
    found = cast_together(tensors, torch.bfloat16, [16, 8, 5, 8, 4])
    for tensor, width, cast in zip(tensors, [16, 8, 5, 8, 4], found, strict=True):
        assert torch.equal(cast, functional.pad(tensor, (0, width - tensor.shape[-1])).bfloat16())
    assert found[3] is tensors[3]
    assert cast_together(tensors[:2], torch.float32)[0] is tensors[0]


def test_a_batch_whose_features_are_a_transpose(device):
    """A clone is contiguous, so that it can be a target."""
    batch = Batch(
        torch.randn(64, 13, device=device).t(),
        torch.randint(9, (64, 5), device=device).t(),
        torch.rand(64, device=device),
    )
    kept = batch.clone()
    targets, sources = (kept.dense, kept.ids), (batch.dense, batch.ids)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    kept.dense.zero_()
    copy_together(targets, sources, (None, None), impl="triton")
    assert torch.equal(kept.dense, batch.dense)
