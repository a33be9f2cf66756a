"""Calibration: the average by training rows, the spread by validation rows; not in training."""

import math
from unittest.mock import MagicMock

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as loss

from dlrm.data.batch import Batch
from dlrm.data.schema import Meta, Split
from dlrm.distributed.interruption import Interruption
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.training import held_out as held_out_rows
from dlrm.training.calibration import LARGEST_SHIFT, fit_calibration
from dlrm.training.held_out import HeldOut
from dlrm.training.loaders import HeldOutRows, RunLoaders
from tests.kit import prepare_rows, write_rows


def rows(sure, off=0.0, average=-1.5, seed=0, count=20_000):
    """Logits that are ``sure`` times too far from the average and ``off`` too high, and labels."""
    generator = torch.Generator().manual_seed(seed)
    distance = torch.randn(count, generator=generator).double()
    labels = torch.bernoulli((distance + average).sigmoid(), generator=generator)
    return distance * sure + average + off, labels


@pytest.mark.parametrize(("sure", "off"), [(0.7, 0.0), (1.0, 0.6), (1.8, -0.4)])
def test_average_and_spread_are_right_afterwards(sure, off):
    seen, later = rows(sure, off), rows(sure, off, seed=1)
    scale, shift = fit_calibration(seen, later)
    assert scale == pytest.approx(1 / sure, rel=0.06)
    best = loss(later[0] * scale + shift, later[1])
    assert best == pytest.approx(float(loss(rows(1.0, seed=1)[0], later[1])), abs=0.004)
    for other in (0.9 * scale, 1.1 * scale):
        center = shift / (1 - scale) if scale != 1 else 0.0
        assert loss((later[0] - center) * other + center, later[1]) > best


def test_a_drift_of_the_validation_rows_does_not_move_the_average():
    seen, later = rows(1.0), rows(1.0, off=0.8, average=-2.3, seed=1)  # half as many are positive
    scale, shift = fit_calibration(seen, later)
    assert (
        abs(float((later[0] * scale + shift).sigmoid().mean() - later[0].sigmoid().mean())) < 0.02
    )


def test_scores_that_are_higher_on_later_rows_are_moved_half_as_far():
    """As where a model knows its training rows by heart; more than so far, they are other rows."""
    seen, (logits, labels) = rows(1.0), rows(1.0, seed=1)
    for higher, moved in ((0.4, 0.2), (-0.3, -0.15), (3.0, 0.25)):
        scale, shift = fit_calibration(seen, (logits + higher, labels))
        average = float(((logits + higher) * scale + shift).sigmoid().mean())
        expected = float((logits + higher - moved).sigmoid().mean())
        assert average == pytest.approx(expected, abs=0.01)


def test_rows_that_do_not_count_and_scores_that_say_nothing():
    seen, (logits, labels) = rows(1.0), rows(1.8, seed=1)
    weights = torch.ones_like(labels)
    weights[10_000:] = 0
    half = fit_calibration(seen, (logits[:10_000], labels[:10_000]))
    assert fit_calibration(seen, (logits, labels, weights)) == pytest.approx(half, rel=1e-9)
    assert 0.8 < fit_calibration(seen, (logits[:20], labels[:20]))[0] < 1.2  # too few to say much
    same = torch.full((500,), -2.0)
    assert fit_calibration((same, torch.ones(500)), (same, torch.ones(500)))[0] == 1
    assert fit_calibration(seen, (1e6 * logits, labels))[0] == 0.25  # diverged, and stays so


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


class Scores(torch.nn.Module):
    """A trained model whose logits are the first dense feature."""

    def __init__(self):
        super().__init__()
        self.calibration = torch.tensor([1.0, 0.0])

    def forward(self, dense, ids, offsets):
        return dense[0]


def test_states_are_compared_at_the_odds_of_the_weights():
    """At the odds of the rows, weights of 8 for positives favoured a state that knows nothing."""
    distance, labels = rows(1.0, average=-2.5)
    weights = torch.where(labels == 1, 8.0, 1.0)
    constant = torch.full_like(distance, -1.2)
    found = []
    for logits in (distance, constant):
        ids = torch.zeros(1, len(logits), dtype=torch.int64)
        batch = Batch(logits[None].float(), ids, labels.float(), weights=weights)
        loader = MagicMock(rows=batch.size, batch_size=batch.size)
        loader.__iter__.return_value = [batch]
        of_run = HeldOutRows({"val": loader}, {}, None)
        held_out = HeldOut(Scores(), "fp32", False, 8.0, Interruption(World()), of_run)
        found.append((held_out.evaluate("val", 0, print)["log_loss"], held_out.loss))
    (good, good_at_weights), (poor, poor_at_weights) = found
    assert good > poor
    assert good_at_weights < poor_at_weights
    assert good_at_weights == pytest.approx(
        float(loss(distance + math.log(8), labels.double(), weights.double(), reduction="sum"))
        / float(weights.sum()),
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("device", "room", "read"), [("cuda", 99, 1), ("cuda", 31, 2), ("cpu", 99, 2)]
)
def test_validation_rows_stay_in_the_memory_of_a_gpu_with_room(device, room, read, monkeypatch):
    monkeypatch.setattr(held_out_rows, "shuffle_memory", lambda _: room)
    batch = Batch(torch.randn(1, 2), torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0.0, 1.0]))
    loader = MagicMock(rows=4, batch_size=2, device=torch.device(device))
    loader.__iter__.side_effect = lambda: iter([batch, batch])  # of 24 bytes each
    held_out = HeldOut(
        Scores(), "fp32", False, 1.0, Interruption(World()), HeldOutRows({"val": loader}, {}, None)
    )
    first, second = (held_out.evaluate("val", 0, print) for _ in range(2))
    assert first == second
    assert loader.__iter__.call_count == read


@pytest.mark.parametrize(
    ("positives", "first", "wanted"),
    [
        (0.25, 0.25, 2048 * 4),
        (0.75, 0.75, 2048 * 4),
        (0.25, 0.5, 2048 * 4),  # those that were read are unlike the others
        (0.25, 1.0, 2048 * 4),
        (0.01, 0.25, 32768),
        (0.0, 0.0, 32768),
    ],
)
def test_the_average_is_found_on_as_many_rows_as_it_takes(positives, first, wanted):
    count, size = 100_000, 64
    split = Split(files=("train.parquet",), rows=count, positives=int(positives * count))
    seen = MagicMock(rows=count, batch_size=size, __len__=lambda _: count // size)
    seen.meta.splits = {"train": split}
    logits = torch.full((1, size), 0.5)
    labels = (torch.arange(size) < first * size).float()
    batch = Batch(logits, torch.zeros(1, size, dtype=torch.int64), labels)
    read = []
    seen.__iter__.return_value = (read.append(size) or batch for _ in range(count // size))

    model = Scores()
    rows_of_run = HeldOutRows({}, {}, lambda **_: seen)
    held_out = HeldOut(model, "fp32", True, 1.0, Interruption(World()), rows_of_run)
    for _ in range(2):
        assert held_out.evaluate("val", 0, print) == {}  # there are no validation rows
        assert sum(read) == wanted  # once
    scale, shift = model.calibration.tolist()
    assert scale == 1
    if first in (0, 1):  # rows of one class say nothing of the average
        assert shift == pytest.approx(0, abs=1e-6)
    else:
        lowest = 1 / (1 + math.exp(LARGEST_SHIFT - 0.5))
        average = 1 / (1 + math.exp(-0.5 - shift))
        assert average == pytest.approx(max(positives, lowest), abs=1e-4)


@pytest.mark.parametrize("row_groups", [1, 40])
def test_the_average_is_right_where_rows_are_sorted_by_the_label(tmp_path, row_groups):
    logits, labels = rows(1.0, off=0.7, average=-3.0, count=100_000)
    order = labels.argsort(stable=True)
    columns = {"score": logits[order].float().numpy(), "label": labels[order].long().numpy()}
    options = {"columns": {"score": "number"}, "transform": "none", "split": {"by": "random"}}
    prepare_rows(write_rows(tmp_path / "rows.parquet", columns), tmp_path / "data", options)
    path = tmp_path / "data" / "train.parquet"
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=-(-len(table) // row_groups))

    model = Scores()
    options = {"window": 1, "device": "cpu", "seed": 3}
    loaders = RunLoaders(World(), 512, 512, 1.0, None, options)
    held_out = loaders.held_out(str(tmp_path / "data"), Meta.read(tmp_path / "data"))
    of_run = HeldOut(model, "fp32", True, 1.0, Interruption(World()), held_out._replace(loaders={}))
    of_run.evaluate("val", 0, print)
    assert model.calibration.tolist() == pytest.approx([1.0, -0.7], abs=0.1)
