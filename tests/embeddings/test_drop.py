import pytest
import torch

from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.drop import Drop


def test_rare_ids_share_the_last_row():
    group = Drop([4, 25], 3, keep=10)
    assert group.weight.shape == (4 + 11, 3)
    ids = torch.arange(25)
    torch.testing.assert_close(group.rows(1, ids), group.weight[4 + ids.clamp(max=10)])
    torch.testing.assert_close(group.rows(0, ids[:4]), group.weight[:4])


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_the_rest_may_have_zeros_where_there_is_one(dtype):
    group = Drop([4, 25], 3, keep=[4, 10], shared=False, dtype=dtype)
    assert not group.to_dense(1)[10:].any()
    assert group.to_dense(0).any(1).all()
    assert group.to_dense(1)[:10].any(1).all()
    with torch.no_grad():
        for table in (0, 1):
            for _, part in group.rows_to_write(table):
                part.fill_(3)
    group.clear_shared_rows()
    assert (group.to_dense(0) != 0).all()
    assert not group.to_dense(1)[10:].any()


def test_zeros_need_rows_of_one_width():
    with pytest.raises(ValueError, match="rows of int4 can't be kept at zero: set shared"):
        Drop([40], 4, keep=20, shared=False, dtype="int4")


def test_all_ids_may_share_one_row():
    group = Drop([25], 3, keep=0)
    assert torch.equal(group.to_dense(), group.weight.expand(25, 3))


def test_fitting_copies_the_head_and_averages_the_tail():
    weight = torch.randn(25, 3)
    group = Drop.from_dense([weight], keep=10)
    assert torch.equal(group.weight[:10], weight[:10])
    torch.testing.assert_close(group.weight[10], weight[10:].mean(0))


def test_tables_of_one_group_keep_numbers_of_their_own():
    group = Drop([20, 25], 3, keep=[30, 2])
    assert group.weight.shape == (20 + 3, 3)
    assert torch.equal(group.rows(1, torch.arange(25)), group.weight[[20, 21, *[22] * 23]])


def test_a_budget_keeps_the_most_frequent_ids_of_all_tables():
    counts = [torch.tensor([9, 8, 7, 1, 1, 1]), torch.tensor([2, 1, 1, 1])]
    row = 8 * 4
    # Six rows, two of which are for the rest of either table: 9, 8, 7 and 2 are kept.
    assert Drop.for_budget(Budget([6, 4], 8, 6 * row, counts=counts)) == [{"keep": 3}, {"keep": 1}]
    assert Drop.for_budget(Budget([6, 4], 8, 6 * row)) == [{"keep": 2}, {"keep": 2}]
    with pytest.raises(ValueError, match="at least 64 bytes"):
        Drop.for_budget(Budget([6, 4], 8, 2 * row - 1, counts=counts))


def test_a_table_that_is_kept_whole_has_no_shared_row_to_pay():
    counts = [torch.tensor([9, 8, 7]), torch.tensor([6, 5]), torch.tensor([4, 3, 2, 1, 1])]
    row = 8 * 4
    for rows, keep in ((6, 0), (7, 1), (8, 2), (9, 3)):  # of the last table, the others are whole
        found = Drop.for_budget(Budget([3, 2, 5], 8, rows * row, counts=counts))
        assert found == [None, None, {"keep": keep}]
    assert Drop.for_budget(Budget([3, 2, 5], 8, 10 * row, counts=counts)) == [None] * 3
