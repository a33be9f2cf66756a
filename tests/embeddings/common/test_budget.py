import pytest

from dlrm.embeddings.common.budget import allocate


@pytest.mark.parametrize(
    ("tables", "chosen"),
    [
        ([10, 10], [1, 2]),  # 15 are left: half of it helps nobody, all of it the second
        ([10, 10, 20], [2, 1, 1]),  # 15 are left: too little for the last, so the first has it
    ],
)
def test_what_is_left_over_is_handed_out(tables, chosen):
    def whole_bytes_per_row(rows, share):
        return max(1, share // rows)

    budget = sum(tables) + 15
    assert allocate(tables, whole_bytes_per_row, int.__mul__, budget, "any") == chosen


def test_a_budget_that_is_too_small_names_the_smallest_one():
    message = (
        "a budget of 20 bytes is too small for --emb any: these tables need at least 21 bytes; "
        "raise the budget or choose another kind"
    )
    with pytest.raises(ValueError, match=message):
        allocate([10, 11], lambda n, share: max(1, share // n), int.__mul__, 20, "any")
