import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from dlrm.data.batch import Batch
from dlrm.training.metrics import auc, classification, predict, sigmoid


def test_metrics_agree_with_scikit_learn():
    random = np.random.default_rng(0)
    logits = random.normal(size=500).round(1).astype(np.float32)  # with ties
    labels = (random.random(500) < 0.3).astype(np.float32)
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    values = classification(logits, labels)
    assert values["auc"] == pytest.approx(roc_auc_score(labels, probability), rel=1e-12)
    assert values["log_loss"] == pytest.approx(log_loss(labels, probability))
    assert values["accuracy"] == pytest.approx(accuracy_score(labels, logits > 0))
    base = labels.mean(dtype=float)
    entropy = log_loss(labels, np.full(500, base))
    assert values["normalized_entropy"] == pytest.approx(values["log_loss"] / entropy)
    assert values["calibration"] == pytest.approx(probability.mean() / base)


@pytest.mark.parametrize("digits", [0, 1, 6])
@pytest.mark.parametrize("share", [0.002, 0.3, 0.998])
def test_auc_counts_ties_half_and_ignores_the_order(device, digits, share):
    random = np.random.default_rng(1)
    scores, labels = random.normal(size=3000).round(digits), random.random(3000) < share
    expected = roc_auc_score(labels, scores)
    tensors = [torch.tensor(x, device=device) for x in (scores, labels.astype(np.float32))]
    found = auc(*tensors)
    assert found == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(3000, device=device)
    assert auc(*(tensor[order] for tensor in tensors)) == found


@pytest.mark.parametrize("labels", [[], [1.0], [0.0, 0.0]])
def test_auc_of_fewer_than_two_classes_is_no_number(labels):
    assert np.isnan(auc(torch.zeros(len(labels)), torch.tensor(labels)))


def test_predicting_the_base_rate_has_entropy_one():
    labels = np.array([1, 0, 0, 0], np.float32)
    values = classification(np.full(4, -np.log(3.0)), labels)
    assert values["auc"] == 0.5
    assert values["normalized_entropy"] == pytest.approx(1.0)
    assert values["calibration"] == pytest.approx(1.0)


def test_huge_logits_do_not_overflow():
    values = classification(np.array([800.0, -800.0]), np.array([0.0, 0.0]))
    assert values["log_loss"] == pytest.approx(400.0)
    assert np.isnan(values["auc"])
    assert sigmoid(torch.tensor([-800.0, 800.0])).tolist() == [0.0, 1.0]


def test_what_cannot_be_measured_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        classification(np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match=r"lower --optim\.lr"):
        classification(np.array([np.nan]), np.array([1.0]))


@pytest.mark.parametrize("shapes", [((4, 1), (4,)), ((4,), (4, 1)), ((4,), (1,)), ((), ())])
def test_logits_and_labels_of_other_shapes_are_refused(shapes):
    logits, labels = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"logits have shape \(.* labels \(.*, both must be \[n\]"):
        classification(logits, labels)


@pytest.mark.parametrize("label", [-1.0, 2.0, np.nan])
def test_labels_that_are_no_probabilities_are_refused(label):
    with pytest.raises(ValueError, match=r"labels must be in \[0, 1\]"):
        classification(np.zeros(3), np.array([1.0, 0.0, label]))


@pytest.mark.parametrize("training", [True, False])
def test_predict_keeps_order_and_restores_the_mode(training):
    class Sum(torch.nn.Module):
        def forward(self, dense, ids, offsets):
            assert not self.training
            return dense.sum(0) + ids.sum(0)

    batches = [
        Batch(torch.full((2, n), float(n)), torch.full((3, n), n), torch.arange(n) % 2.0)
        for n in (2, 3, 0)
    ]
    model = Sum().train(training)
    logits, labels = predict(model, batches)
    assert logits.tolist() == [10, 10, 15, 15, 15]
    assert labels.tolist() == [0, 1, 0, 1, 0]
    assert model.training is training
    assert [len(part) for part in predict(model, [])] == [0, 0]


def test_a_weight_counts_a_sample_so_many_times():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=300).round(1), rng.random(300) < 0.4
    weights = rng.integers(0, 5, 300)
    found = classification(logits, labels, weights)
    repeated = classification(np.repeat(logits, weights), np.repeat(labels, weights))
    assert found == pytest.approx(repeated, rel=1e-12)
    scaled = classification(logits, labels, weights * 0.1)
    assert scaled == pytest.approx(repeated, rel=1e-12)
    with pytest.raises(ValueError, match="all samples have weight 0"):
        classification(logits, labels, weights * 0)
    with pytest.raises(ValueError, match="weights have shape"):
        classification(logits, labels, weights[1:])
