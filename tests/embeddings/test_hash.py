import pytest
import torch

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.hash import Hash


def test_ids_share_the_row_of_their_remainder():
    group = Hash([4, 25], 3, rows=10)
    assert group.weight.shape == (14, 3)
    ids = torch.arange(25)
    torch.testing.assert_close(group.rows(1, ids), group.weight[4 + ids % 10])
    torch.testing.assert_close(group.rows(0, ids[:4]), group.weight[:4])


def test_the_best_fit_is_the_mean_of_those_that_share():
    weight = torch.randn(25, 3)
    group = Hash.from_dense([weight], rows=10)
    expected = torch.stack([weight[row::10].mean(0) for row in range(10)])
    torch.testing.assert_close(group.weight.detach(), expected)


def test_a_table_below_the_cap_is_taken_over_as_it_is():
    weight = torch.randn(25, 3)
    assert torch.equal(Hash.from_dense([weight], rows=25).weight, weight)


def test_fewer_than_one_row_is_refused():
    with pytest.raises(ValueError, match=r"hash rows is 0; set --hash.rows to 1 or more"):
        Hash([10], 4, rows=0)


@pytest.mark.parametrize("compression", [4, 10, 30, 100, 1000])
def test_the_budget_is_used_up_at_kaggle_size(compression):
    budget = sum(KAGGLE_CARDINALITIES) * 16 * 4 // compression
    chosen = Hash.for_budget(Budget(KAGGLE_CARDINALITIES, 16, budget))
    rows = [
        table if options is None else options["rows"]
        for table, options in zip(KAGGLE_CARDINALITIES, chosen, strict=True)
    ]
    assert 0.999 * budget <= sum(rows) * 16 * 4 <= budget
    level = {options["rows"] for options in chosen if options is not None}
    assert len(level) == 1, "one cap for all, so that they form one group"
    assert all(kept == min(t, *level) for kept, t in zip(rows, KAGGLE_CARDINALITIES, strict=True))
