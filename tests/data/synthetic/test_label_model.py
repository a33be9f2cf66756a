"""The label model: how hard the labels are, and what a model can learn."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, Meta
from dlrm.data.synthetic.distributions import profiles
from dlrm.data.synthetic.label_model import FREQUENT, best_metrics
from tests.kit import read_split

KAGGLE = profiles()["kaggle"]


def test_best_metrics_are_those_of_the_true_probabilities(kaggle, sample):
    bins, labels = sample.bins.numpy(), sample.labels.numpy()
    probabilities = kaggle.label_model.probabilities
    counts = np.stack(
        [np.bincount(bins[labels == y], minlength=len(probabilities)) for y in (0, 1)]
    )
    best = best_metrics(counts, probabilities)
    assert best["auc"] == pytest.approx(roc_auc_score(labels, probabilities[bins]), abs=1e-12)
    assert best["log_loss"] == pytest.approx(log_loss(labels, probabilities[bins]), abs=1e-9)
    assert best["accuracy"] == pytest.approx(((probabilities[bins] >= 0.5) == labels).mean())
    assert best["positives"] == pytest.approx(labels.mean())
    assert best["normalized_entropy"] == pytest.approx(
        best["log_loss"] / log_loss(labels, np.full(len(labels), labels.mean()))
    )


def test_truth_is_as_hard_as_the_real_data(sample, kaggle):
    probabilities = kaggle.label_model.probabilities[sample.bins]
    labels = sample.labels.numpy()
    assert labels.mean() == pytest.approx(0.256, abs=0.005)
    assert probabilities.mean() == pytest.approx(labels.mean(), abs=0.004)  # calibrated
    assert roc_auc_score(labels, probabilities) == pytest.approx(0.80, abs=0.005)
    assert log_loss(labels, probabilities) == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(("auc", "positives"), [(0.7, 0.5), (0.9, 0.03)])
def test_difficulty_is_by_option(auc, positives, generator):
    made = generator(40_000, auc=auc, positives=positives)
    sample = made.rows(0, 40_000)
    assert sample.labels.double().mean() == pytest.approx(positives, abs=0.01)
    reached = roc_auc_score(sample.labels, sample.bins)
    assert reached == pytest.approx(auc, abs=0.015)


def test_truth_is_learnable(demo):
    """A linear model on dense features and frequent ids gets well above chance, below the best."""
    meta = Meta.read(demo)
    train, test = (read_split(demo, split) for split in ("train", "test"))
    train = train[:20_000]

    def features(table):
        columns = [table[list(CRITEO_DENSE)].to_numpy()]
        columns += [np.equal.outer(table[c].to_numpy(), np.arange(8)) for c in CRITEO_CATEGORICAL]
        return np.concatenate(columns, axis=1).astype(np.float32)

    model = LogisticRegression(max_iter=200, C=0.01).fit(features(train), train["label"])
    auc = roc_auc_score(test["label"], model.decision_function(features(test)))
    assert 0.68 < auc < meta.planted["test"]["auc"] - 0.01


def test_rare_ids_carry_real_but_little_information(kaggle, sample):
    """Taking the effects of rare ids away costs the best AUC a little."""
    label_model, labels = kaggle.label_model, sample.labels
    dense = sample.dense.clamp(min=0) * ~sample.missing
    score = label_model.score(dense, sample.ids)
    assert roc_auc_score(labels, score) == pytest.approx(0.80, abs=0.005)
    tables = label_model.id_tables.view(26, 2, FREQUENT, -1).clone()
    whole = label_model.id_tables
    try:
        tables[:, 1] = 0
        label_model.id_tables = tables.view_as(whole)
        without = roc_auc_score(labels, label_model.score(dense, sample.ids))
    finally:
        label_model.id_tables = whole
    assert 0.002 < roc_auc_score(labels, score) - without < 0.04
