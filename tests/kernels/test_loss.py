"""The mean binary cross entropy, compared with PyTorch's."""

import pytest
import torch

from dlrm.kernels.loss import mean_loss, mean_loss_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("size", "odds", "total"), [(1, 1.0, None), (70, 0.3, 210), (5000, 1.0, None)]
)
def test_loss_and_gradient(
    device, size, odds, total, weighted, dtype, assert_matches, nan_in_new_memory
):
    torch.manual_seed(0)
    logits = (4 * torch.randn(size, device=device)).to(dtype).requires_grad_()
    inputs = {"logits": logits, "labels": (torch.rand(size, device=device) < 0.3).float()}
    if weighted:
        inputs["weights"] = torch.rand(size, device=device)

    def op(**given):
        return mean_loss(**given, odds=odds, total=total, impl="triton")

    def reference(**given):
        return mean_loss_torch(**given, odds=odds, total=total)

    # The loss of a single sure logit is log(1 + z) of a small z, and 1 + z is rounded: seen 5.1e-6.
    factors = {"output": 20}
    assert_matches(op, reference, inputs, factors=factors)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_sure_logits(device, impl):
    """No overflow, and no loss where they are right."""
    logits = torch.tensor([-200.0, 200.0, -200.0, 200.0], device=device, requires_grad=True)
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0], device=device)
    loss = mean_loss(logits, labels, impl=impl)
    loss.backward()
    assert float(loss) == pytest.approx(100.0)
    assert logits.grad.tolist() == pytest.approx([0, 0, -0.25, 0.25])
