"""Bags with ids beyond the last one, and sums in fp32."""

import pytest
import torch

from dlrm.kernels.lookup.pool import MODES, BagContext, lookup_bags
from dlrm.kernels.lookup.tables import TableRows
from dlrm.utils.bags import Bags


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("nan_in_new_memory")
def test_what_lies_beyond_the_last_bag_is_left_out(device, mode, impl):
    weight = torch.randn(9, 4, device=device).requires_grad_()
    tables = TableRows(torch.tensor([0, 5], device=device))
    ids, offsets = torch.randint(4, (20,), device=device), torch.tensor([0, 3, 3, 8, 13])
    outs, grads = [], []
    for count, padded in ((13, False), (20, True)):
        bags = Bags(ids[:count], offsets.to(device))
        context = BagContext(padded=padded)
        out = lookup_bags(weight, tables, bags, mode=mode, context=context, impl=impl)
        (grad,) = torch.autograd.grad((out * torch.arange(4, device=device)).sum(), weight)
        outs.append(out)
        entries = grad._indices()[0] >= 0
        grads.append(
            torch.zeros_like(weight).index_add_(
                0, grad._indices()[0][entries], grad._values()[entries]
            )
        )
    assert torch.equal(*outs)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bf16_rows_are_summed_in_fp32(device, impl):
    rows = torch.full((301, 2), 1.0, device=device)
    rows[0] = 256
    tables = TableRows(torch.zeros(1, dtype=torch.int64, device=device))
    bags = Bags(torch.arange(301, device=device), torch.tensor([0, 301], device=device))
    context = BagContext(dtype=torch.bfloat16)
    out = lookup_bags(rows, tables, bags, context=context, impl=impl)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [556.0] * 2
    if impl == "triton":  # where PyTorch sums bf16 rows, it rounds each time on a CPU
        found = lookup_bags(rows.bfloat16(), tables, bags, impl=impl)
        assert found.flatten().tolist() == [556.0] * 2
