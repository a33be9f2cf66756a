"""Calibration on validation rows: the scale of least loss, in the model, its run and its export."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as loss

from dlrm.model import DLRM
from dlrm.training.calibration import fit_calibration


def rows(sure, count=20_000):
    """Logits that are ``sure`` times too far from the average, and labels."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(count, generator=generator) - 1.5
    labels = torch.bernoulli(right.sigmoid(), generator=generator)
    return (right + 1.5) * sure - 1.5, labels


@pytest.mark.parametrize("sure", [0.7, 1.0, 1.8])
def test_the_scale_with_the_least_loss(sure):
    logits, labels = (values.double() for values in rows(sure))
    scale, shift = fit_calibration(logits, labels)
    assert scale == pytest.approx(1 / sure, rel=0.06)
    best = loss(logits * scale + shift, labels)
    center = shift / (1 - scale)
    for other in (0.9 * scale, 1.1 * scale):
        assert loss((logits - center) * other + center, labels) > best
    mean = float(logits.sigmoid().mean())
    assert float(torch.sigmoid(torch.tensor(center))) == pytest.approx(mean, rel=1e-3)


def test_rows_that_do_not_count_and_scores_that_say_nothing():
    logits, labels = rows(1.8)
    weights = torch.ones_like(labels)
    weights[10_000:] = 0
    assert fit_calibration(logits, labels, weights) == pytest.approx(
        fit_calibration(logits[:10_000], labels[:10_000]), rel=1e-9
    )
    same = torch.full((500,), -2.0)
    assert fit_calibration(same, torch.ones(500)) == (1.0, 0.0)
    assert 0.9 < fit_calibration(logits[:20], labels[:20])[0] < 1.1  # too few rows to say much
    assert fit_calibration(1e6 * logits, labels)[0] == 0.25  # diverged, and stays so


def test_only_evaluations_are_calibrated():
    model = DLRM(2, [5, 7], 4, [("dense", {})] * 2, bottom_mlp=[4], top_mlp=[4])
    inputs = torch.rand(2, 3), torch.tensor([[0, 1, 2], [3, 4, 5]])
    plain = model.eval()(*inputs)
    model.calibration.copy_(torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(model(*inputs), plain / 2 - 1)
    torch.testing.assert_close(model.train()(*inputs), plain)
    other = DLRM(2, [5, 7], 4, [("hash", {"rows": 3})] * 2, bottom_mlp=[4], top_mlp=[4])
    other.load_trained(model)
    assert other.calibration.tolist() == [0.5, -1.0]
