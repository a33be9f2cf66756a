"""Rows in the number formats of an export are off by no more than half a step of their scale."""

import pytest
import torch

from dlrm.export import rows
from dlrm.export.rows import Int4Rows, Int8Rows, store_rows


def weights(count, dim):
    """Rows of very different size, one of them zero."""
    size = torch.logspace(-8, 4, count)[:, None]
    weight = size * torch.randn(count, dim)
    weight[count // 2] = 0
    return weight


@pytest.mark.parametrize("dim", [8, 9, 16, 33])
@pytest.mark.parametrize(("precision", "levels"), [("int8", 127), ("int4", 7.5)])
def test_entries_are_off_by_half_a_step(precision, levels, dim, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 7)  # several chunks
    weight = weights(40, dim)
    stored = store_rows(weight, precision)
    ids = torch.randint(40, (3, 5))
    found = stored(ids)
    assert found.shape == (3, 5, dim)
    assert found.dtype == torch.float32
    step = weight.abs().amax(1, keepdim=True) / levels
    bound = (0.5 + levels / 256) * step  # the scale has 8 bits: so much may be cut off the largest
    assert ((found - weight[ids]).abs() <= bound[ids] + 1e-30).all()
    assert (found - weight[ids]).abs().amax() > 0
    assert (stored(torch.tensor([20])).abs() <= 1e-30).all()


@pytest.mark.parametrize(
    ("precision", "share"), [("bf16", 1 / 2), ("int8", 18 / 64), ("int4", 10 / 64)]
)
def test_bytes(precision, share):
    weight = torch.randn(100, 16)
    stored = sum(buffer.nbytes for buffer in store_rows(weight, precision).buffers())
    assert stored == share * weight.nbytes


def test_formats_that_keep_the_rows():
    weight = torch.randn(100, 16)
    assert store_rows(weight, "fp32").weight.data_ptr() == weight.data_ptr()
    ids = torch.arange(100)
    assert torch.equal(store_rows(weight, "bf16")(ids), weight.bfloat16().float())
    short = torch.randn(5, 4)
    for precision in ("int8", "int4"):
        assert torch.equal(store_rows(short, precision)(ids[:5]), short.bfloat16().float())
    assert isinstance(store_rows(weight, "int8"), Int8Rows)
    assert isinstance(store_rows(weight, "int4"), Int4Rows)
    with pytest.raises(ValueError, match="unknown precision 'int5', did you mean 'int"):
        store_rows(weight, "int5")
