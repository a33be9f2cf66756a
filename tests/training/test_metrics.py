import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

from dlrm.data.batch import Batch
from dlrm.data.groups import Groups
from dlrm.training.metrics import classification, predict, sigmoid
from dlrm.training.plots import Plots
from dlrm.training.ranking import Ties, group_areas, roc_area


def test_metrics_agree_with_scikit_learn():
    random = np.random.default_rng(0)
    logits = random.normal(size=500).round(1).astype(np.float32)  # with ties
    labels = (random.random(500) < 0.3).astype(np.float32)
    probability = 1 / (1 + np.exp(-logits.astype(np.float64)))
    values = classification(logits, labels)
    assert values["auc"] == pytest.approx(roc_auc_score(labels, probability), rel=1e-12)
    precision = average_precision_score(labels, probability)
    assert values["pr_auc"] == pytest.approx(precision, rel=1e-12)
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
    found = roc_area(Ties.of(*tensors))
    assert found == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(3000, device=device)
    assert roc_area(Ties.of(*(tensor[order] for tensor in tensors))) == found


def grouped(of_rows):
    values = pa.array([f"user {i}" for i in range(max(of_rows, default=-1) + 1)], pa.string())
    return Groups(of_rows=np.asarray(of_rows, np.int64), values=values, vocabulary=None)


@pytest.mark.parametrize("weighted", [False, True])
def test_auc_by_group_is_that_of_each_group_alone(device, weighted):
    random = np.random.default_rng(2)
    groups = random.integers(-1, 40, 600)
    groups[0] = 40  # alone
    scores, labels = random.normal(size=600).round(1), random.random(600) < 0.3
    weights = random.random(600) if weighted else np.ones(600)
    expected, rows, one_class = {}, {}, 0
    for group in range(41):
        of = groups == group
        if 0 < labels[of].sum() < of.sum():
            expected[group] = roc_auc_score(labels[of], scores[of], sample_weight=weights[of])
            rows[group] = weights[of].sum()
        else:
            one_class += 1

    tensors = [torch.tensor(x, device=device) for x in (scores, labels.astype(np.float32))]
    given = [torch.tensor(weights, device=device)] if weighted else []
    areas = group_areas(*tensors, *given, groups=grouped(groups))
    assert dict(zip(areas.groups.tolist(), areas.areas.tolist(), strict=True)) == pytest.approx(
        expected, abs=1e-9
    )
    values = areas.metrics()
    ordered, tenth = sorted(expected.values()), -(-len(expected) // 10)
    assert values == pytest.approx(
        {
            "group_auc": np.average(list(expected.values()), weights=list(rows.values())),
            "group_auc_worst": np.mean(ordered[:tenth]),
            "group_auc_best": np.mean(ordered[-tenth:]),
            "groups": len(expected),
            "groups_of_one_class": one_class,
            "rows_without_group": (groups < 0).sum(),
        }
    )
    worst = areas.extremes(grouped(groups))["worst"]
    assert [own["auc"] for own in worst] == pytest.approx(ordered[:5])
    assert expected[int(worst[0]["group"].split()[1])] == pytest.approx(worst[0]["auc"])


@pytest.mark.parametrize("groups", [[], [-1], [0], [0, 1, 2]])
def test_where_no_group_has_both_classes_there_is_no_auc_by_group(groups):
    n = len(groups)
    areas = group_areas(torch.zeros(n), torch.ones(n), groups=grouped(groups))
    values = areas.metrics()
    assert np.isnan([values.pop(name) for name in list(values) if name.startswith("group_")]).all()
    outside = groups.count(-1)
    assert values == {
        "groups": 0, "groups_of_one_class": n - outside, "rows_without_group": outside,
    }  # fmt: skip
    assert areas.extremes(grouped(groups)) == {"worst": [], "best": []}


def test_plots_bin_all_samples(device):
    random = np.random.default_rng(3)
    logits = torch.tensor(random.normal(-2, 1, 4001), device=device)
    labels = (torch.rand(4001, device=device) < logits.sigmoid()).float()
    plots = Plots.of("test", logits, labels)
    predicted, actual = plots.reliability
    assert predicted.shape == (20,)
    assert (np.diff(predicted) > 0).all()
    assert np.abs(predicted - actual).max() < 0.1
    assert plots.shares.sum(1) == pytest.approx(1)
    middles = (np.arange(50) + 0.5) / 50 * plots.highest
    assert (plots.shares @ middles)[1] > (plots.shares @ middles)[0]

    repeated = Plots.of("test", logits, labels, torch.full_like(logits, 3))
    assert repeated.reliability == pytest.approx(plots.reliability)
    alone = Plots.of("val", torch.tensor([-1e9]), torch.ones(1))
    assert alone.reliability.tolist() == [[0], [1]]
    assert alone.figures().keys() == {"reliability/val", "scores/val"}


@pytest.mark.parametrize("labels", [[], [1.0], [0.0, 0.0]])
def test_auc_of_fewer_than_two_classes_is_no_number(labels):
    assert np.isnan(roc_area(Ties.of(torch.zeros(len(labels)), torch.tensor(labels))))


def test_predicting_the_base_rate_has_entropy_one():
    labels = np.array([1, 0, 0, 0], np.float32)
    values = classification(np.full(4, -np.log(3.0)), labels)
    assert values["auc"] == 0.5
    assert values["pr_auc"] == 0.25
    assert values["normalized_entropy"] == pytest.approx(1.0)
    assert values["calibration"] == pytest.approx(1.0)


def test_huge_logits_do_not_overflow():
    values = classification(np.array([800.0, -800.0]), np.array([0.0, 0.0]))
    assert values["log_loss"] == pytest.approx(400.0)
    assert np.isnan([values["auc"], values["pr_auc"]]).all()
    assert sigmoid(torch.tensor([-800.0, 800.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("logits", "labels", "told"),
    [
        (np.zeros(0), np.zeros(0), "no samples"),
        (np.array([np.nan]), np.ones(1), r"lower --optim\.lr"),
        *(
            (np.zeros(shape), np.zeros(other), r"logits have shape \(.* labels .*must be \[n\]")
            for shape, other in (((4, 1), (4,)), ((4,), (4, 1)), ((4,), (1,)), ((), ()))
        ),
        *(
            (np.zeros(2), np.array([1.0, y]), r"labels must be in \[0, 1\]")
            for y in (-1, 2, np.nan)
        ),
    ],
)
def test_what_cannot_be_measured_is_an_error(logits, labels, told):
    with pytest.raises(ValueError, match=told):
        classification(logits, labels)


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
