import pytest
import torch

from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.drop import Drop


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
