import pytest

from dlrm.embeddings.budget import share_out, water_level


def test_the_level_is_the_highest_that_fits():
    tables = [3, 10, 100]
    for budget in range(120):
        level = water_level(lambda rows: sum(min(t, rows) for t in tables), 100, budget, "any")
        assert sum(min(table, level) for table in tables) <= budget
        assert level == 100 or sum(min(table, level + 1) for table in tables) > budget


def test_what_is_left_over_is_handed_out():
    # Whole bytes per row: a share of 19 leaves 15 of the 35, of which only the first takes 10.
    chosen = share_out([10, 10], lambda rows, share: max(1, share // rows), int.__mul__, 35, "any")
    assert chosen == [2, 1]


def test_a_budget_that_is_too_small_names_the_smallest_one():
    message = (
        "a budget of 20 bytes is too small for --emb any: these tables need at least 21 bytes; "
        "raise the budget or choose another kind"
    )
    with pytest.raises(ValueError, match=message):
        share_out([10, 11], lambda n, share: max(1, share // n), int.__mul__, 20, "any")
