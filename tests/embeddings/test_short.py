"""Short rows: what is theirs beside the contract of all kinds."""

import pytest
import torch

from dlrm.embeddings import build
from dlrm.embeddings.short import place_of
from dlrm.optim import RowOptimizer


def test_zeros_follow_the_weights():
    group = build("short", [50, 9], 8, dim=3)
    for table in range(2):
        rows = group.to_dense(table)
        assert rows[:, :3].count_nonzero() == rows[:, :3].numel()
        assert not rows[:, 3:].any()


def test_rare_ids_share_the_row_that_is_stored_first():
    group = build("short", [50, 9], 8, dim=2, keep=[20, 9])
    rows = group.to_dense(0)
    assert (rows[20:] == rows[20]).all()
    assert len(rows[:, :2].unique(dim=0)) == 21
    assert len(group.to_dense(1).unique(dim=0)) == 9
    torch.testing.assert_close(group.weight[0, :2], rows[20, :2])  # and the others follow
    torch.testing.assert_close(group.weight[0, 2:], rows[:3, :2].reshape(-1))


@pytest.mark.parametrize(("dim", "keep"), [(1, 90), (2, 30), (3, 7), (8, 5)])
def test_every_row_has_a_place_of_its_own(dim, keep):
    count, per_row = torch.tensor(keep + 1), 8 // dim
    rows, place = place_of(torch.arange(100), count, per_row)
    places = set(zip(rows.tolist(), place.tolist(), strict=True))
    assert len(places) == keep + 1
    assert max(rows) == -(-(keep + 1) // per_row) - 1
    assert max(place) < per_row


def test_an_update_moves_the_weights_of_the_ids_that_were_used():
    group = build("short", [50], 8, dim=2, keep=20)
    before = group.to_dense()
    optimizer = RowOptimizer(group.parameters(), "sgd", lr=1.0)
    group(torch.tensor([[3, 3, 30]])).sum().backward()
    optimizer.step()
    step = before - group.to_dense()
    expected = torch.zeros_like(before)
    expected[3, :2] = 2
    expected[20:, :2] = 1
    torch.testing.assert_close(step, expected)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 18), ("int4", 10), (None, 64)])
def test_the_ids_of_a_stored_row_share_its_scale(dtype, size):
    """11 stored rows for 161 ids; the first of int4 has 8 bits."""
    group = build("short", [5000], 16, dim=1, keep=160, dtype=dtype)
    wide = 8 if dtype == "int4" else 0
    assert group.footprint() == [{"weights": 11 * size + wide}]


def test_a_dim_that_is_not_possible_is_refused():
    for dim in (0, 9):
        with pytest.raises(ValueError, match=rf"short dim is {dim}; set --short.dim to 1 .. 8"):
            build("short", [5], 8, dim=dim)
