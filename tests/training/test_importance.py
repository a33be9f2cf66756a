import numpy as np
import pytest
import torch

from dlrm.data.batch import Batch, fixed_offsets
from dlrm.training.importance import importance_table, permutation_importance, permuted
from dlrm.utils.offsets import offsets_of

SIZE = 500


class Reads(torch.nn.Module):
    """A model that reads the dense feature 1 and the sums of the bags of feature 0."""

    def forward(self, dense, ids, offsets):
        if offsets is None:
            return dense[1] + ids[0]
        ends = ids.cumsum(0)[offsets[1 : dense.shape[1] + 1] - 1]
        return dense[1] + ends.diff(prepend=ends.new_zeros(1))


def batches(device, kind):
    random = np.random.default_rng(0)
    for size in (SIZE, 7):
        dense = torch.tensor(random.normal(size=(2, size)), dtype=torch.float32)
        lengths = torch.tensor(random.integers(1, 4, (2, size)))
        if kind == "fixed":
            lengths[:] = torch.tensor([[3], [1]])
        if kind == "one-hot":
            ids, offsets = torch.tensor(random.integers(0, 9, (2, size))), None
            value = ids[0]
        else:
            ids = torch.tensor(random.integers(0, 9, int(lengths.sum())))
            offsets = fixed_offsets((3, 1), size, "cpu") if kind == "fixed" else offsets_of(lengths)
            value = Reads()(dense, ids, offsets) - dense[1]
        labels = (dense[1] + value - value.float().mean() > 0).float()
        yield Batch(dense, ids, labels, offsets).to(device)


@pytest.mark.parametrize("kind", ["one-hot", "fixed", "ragged"])
def test_columns_that_the_model_reads_are_important(device, kind):
    given = list(batches(device, kind))
    names = ["I1", "I2", "lists", "C2"]
    found = permutation_importance(Reads(), given, names, seed=1)
    assert set(list(found)[:2]) == {"I2", "lists"}
    for name, lost in found.items():
        if name in ("I2", "lists"):
            assert lost["auc"] > 5 * lost["auc_std"] > 0
            assert lost["log_loss"] > lost["log_loss_std"] > 0
        else:
            assert set(lost.values()) == {0.0}
    assert permutation_importance(Reads(), given, names, seed=1) == found
    assert permutation_importance(Reads(), given, names, seed=2) != found
    lines = importance_table(found).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[0] == next(iter(found))


@pytest.mark.parametrize("feature", [0, 1])
def test_bags_are_shuffled_as_a_whole(device, feature):
    """Each bag is still there once, and those of the other feature are where they were."""
    batch = next(batches(device, "ragged"))
    after = permuted(batch, 2 + feature, np.random.default_rng(0))

    def bags(batch):
        parts = batch.ids.cpu().tensor_split(batch.offsets.cpu()[1:-1])
        texts = [str(part.tolist()) for part in parts]
        return texts[:SIZE], texts[SIZE:]

    assert sorted(bags(after)[feature]) == sorted(bags(batch)[feature])
    assert bags(after)[feature] != bags(batch)[feature]
    assert bags(after)[1 - feature] == bags(batch)[1 - feature]
    assert (after.dense is batch.dense, after.labels is batch.labels) == (True, True)


def test_rows_of_one_class_have_the_importance_of_log_loss_alone():
    batch = next(batches("cpu", "one-hot"))
    one = Batch(batch.dense, batch.ids, torch.ones(SIZE))
    found = permutation_importance(Reads(), [one], ["I1", "I2", "C1", "C2"], seed=0)
    assert np.isnan(found["I2"]["auc"])
    assert {line.split()[1] for line in importance_table(found).splitlines()[1:]} == {"-"}
    assert np.isfinite(found["I2"]["log_loss"])
