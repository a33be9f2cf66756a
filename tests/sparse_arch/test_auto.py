from itertools import product

import pytest
import torch

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.drop import Drop
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.auto import RARE, Table, choose_tables
from dlrm.sparse_arch.table_plan import make_table_plan

CAPPED = [min(rows, 100_000) for rows in KAGGLE_CARDINALITIES]


def zipf(rows, most=2**20):
    return most // torch.arange(1, rows + 1)


def utility(table_plan, counts, dim):
    """What the planner maximises, written out: own rows by their counts and their length."""
    total = 0.0
    for (_, options), count in zip(table_plan, counts, strict=True):
        count = count[: options.get("keep", len(count))].double()
        kept = 1 - 0.2 / options.get("dim", dim)
        total += kept * float((count**2 / (count + RARE)).sum())
    return total


@pytest.mark.parametrize("ratio", [1, 2, 10, 100, 1000, 10_000])
def test_a_budget_is_kept_and_used(ratio):
    budget = sum(CAPPED) * 64 // ratio
    chosen = choose_tables(CAPPED, 16, budget, [zipf(rows) for rows in CAPPED])
    with torch.device("meta"):
        arch = SparseArch(CAPPED, 16, chosen)
    total = sum(sum(parts.values()) for parts in arch.footprint())
    assert 0.998 * budget <= total <= budget
    assert len(arch.groups) <= 6, "tables of rows of one length are looked up together"


@pytest.mark.parametrize("ratio", [1.1, 1.5, 3, 5])
def test_a_table_that_is_most_of_the_budget_uses_it(ratio):
    """From one price to the next it changes its length, and with that by more than is left."""
    rows = 20_000
    count = 1e6 * torch.arange(1, rows + 1).double() ** -1.05
    budget = int(64 * rows / ratio)
    ((_, options),) = choose_tables([rows], 16, budget, [count.round().long()])
    table = Table(rows, 16, count)
    dim, keep = options.get("dim", 16), options.get("keep", rows)
    assert table.size(dim, keep) <= budget
    others = [(other, min((budget - table.size(other, 0)) // (4 * other), rows))
              for other in (1, 2, 4, 8, 16)]  # fmt: skip
    best = max(table.utility(other, kept) for other, kept in others if kept >= 0)
    assert table.utility(dim, keep) >= 0.999 * best


def test_nothing_is_compressed_where_the_budget_does_not_ask_for_it():
    sizes = [100, 7]
    counts = [zipf(rows) for rows in sizes]
    assert choose_tables(sizes, 16, 4 * 16 * 107, counts) == [("dense", {})] * 2


def test_no_choice_of_lengths_and_numbers_of_rows_is_worth_more():
    sizes, dim = [40, 12], 4
    counts = [zipf(40, 300), zipf(12, 90)]
    offers = [
        [(size, keep, own) for own in (1, 2, 4) for keep in range(rows)
         if (size := Table(rows, dim, counts[t]).size(own, keep)) > 0]
        for t, rows in enumerate(sizes)
    ]  # fmt: skip
    for budget in (150, 250, 400, 700):
        found = utility(choose_tables(sizes, dim, budget, counts), counts, dim)
        best = max(
            utility([("", {"keep": k, "dim": d}) for _, k, d in pair], counts, dim)
            for pair in product(*offers)
            if sum(size for size, _, _ in pair) <= budget
        )
        assert found >= 0.93 * best  # one price for all: what is left over may not fit the best


def test_frequent_ids_get_more_bytes():
    counts = [zipf(1000, 2**18), zipf(1000, 2**8)]
    (_, often), (_, seldom) = choose_tables([1000, 1000], 16, 16_000, counts)
    assert often["keep"] > seldom["keep"]
    assert often.get("dim", 16) >= seldom["dim"]


def test_it_is_worth_more_than_the_best_of_full_rows():
    sizes, counts = [5000, 300], [zipf(5000), zipf(300)]
    budget = 64 * 5300 // 20
    kept = Drop.for_budget(Budget(sizes, 16, budget, counts=counts))
    drop = [("drop", own or {}) for own in kept]
    assert utility(choose_tables(sizes, 16, budget, counts), counts, 16) > utility(drop, counts, 16)


def test_counts_need_not_fall_strictly():
    counts = [torch.tensor([9, 1, 8, 8, 0, 0, 0, 0])]
    assert choose_tables([8], 2, 4 * 2 * 5, counts) == [("drop", {"keep": 4})]


def test_a_budget_without_room_for_a_row_per_table_is_refused():
    with pytest.raises(ValueError, match=r"100 bytes is too small for --emb auto: 2 .* 128 bytes"):
        choose_tables([50, 60], 16, 100, [zipf(50), zipf(60)])


def test_the_planner_is_a_kind_of_the_plan():
    names, sizes = ["a", "b"], [50, 4000]
    counts = [zipf(50), zipf(4000)]
    whole = make_table_plan(names, sizes, 8, "auto", budget="10x", counts=lambda: counts)
    assert whole == choose_tables(sizes, 8, 4 * 8 * 4050 // 10, counts)
    largest = make_table_plan(
        names, sizes, 8, "auto", budget="10x", largest=1, counts=lambda: counts
    )
    assert largest == [("dense", {}), *choose_tables([4000], 8, 12960 - 1600, counts[1:])]
    with pytest.raises(ValueError, match="--emb auto needs a budget: set --budget"):
        make_table_plan(names, sizes, 8, "auto")
    with pytest.raises(ValueError, match="needs the number of occurrences of each id"):
        make_table_plan(names, sizes, 8, "auto", budget="10x")


def test_ids_are_counted_only_for_budgets_that_depend_on_it():
    asked = []

    def counts():
        asked.append(True)
        return [zipf(50), zipf(4000)]

    for kind, expected in (("hash", 0), ("drop", 1), ("auto", 2)):
        make_table_plan(["a", "b"], [50, 4000], 8, kind, budget="10x", counts=counts)
        assert len(asked) == expected
