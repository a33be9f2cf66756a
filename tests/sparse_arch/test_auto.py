from itertools import product

import pytest
import torch

from dlrm.data.evidence import RANGES, Effects
from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.common.budget import DTYPES, Budget
from dlrm.embeddings.drop import Drop
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.auto import EQUAL, RowFormat, Table, choose_tables
from dlrm.sparse_arch.table_plan import KnownIds, make_table_plan
from tests.kit import combinations

CAPPED = [min(rows, 100_000) for rows in KAGGLE_CARDINALITIES]
MUCH, LITTLE = EQUAL, Effects((0.01,) * RANGES)  # what the ids of a column say


def choose(sizes, dim, budget, counts, effects=None, **options):
    return choose_tables(Budget(sizes, dim, budget, counts), effects, **options)


def zipf(rows, most=2**20):
    return most // torch.arange(1, rows + 1)


def utility(table_plan, counts, dim):
    """What the planner maximises, written out: own rows by their counts, length and bits."""
    total = 0.0
    for (_, options), count in zip(table_plan, counts, strict=True):
        count = count[: options.get("keep", len(count))].double()
        kept = 1 - 0.2 / options.get("dim", dim)
        kept *= {"int4": 0.995, "int8": 0.9998, "bf16": 0.9999}.get(options.get("dtype"), 1)
        total += kept * float((count * 0.1**2 / (0.1 + 1 / count)).sum())
    return total


def footprint(sizes, dim, plan):
    with torch.device("meta"):
        arch = SparseArch(sizes, dim, plan)
    return sum(sum(parts.values()) for parts in arch.footprint()), len(arch.groups)


@combinations(
    slow=pytest.mark.slow,
    ratio=[2, 10, 100, 1000, 10_000],
    dtypes=[DTYPES, ("fp32",), ("bf16",), ("int4",)],
)
def test_a_budget_is_kept_and_used(ratio, dtypes):
    budget = sum(CAPPED) * 64 // ratio
    counts = [zipf(rows) for rows in CAPPED]
    chosen = choose(CAPPED, 16, budget, counts, dtypes=dtypes)
    if dtypes[0] != "fp32":  # the type of all tables of the model, which the plan leaves out
        chosen = [(kind, {"dtype": dtypes[0], **own}) for kind, own in chosen]
    total, groups = footprint(CAPPED, 16, chosen)
    assert total <= budget
    whole, _ = footprint(CAPPED, 16, [("dense", {"dtype": dtypes[0]})] * len(CAPPED))
    assert total >= min(0.96 * budget, whole)
    assert groups <= 8, "tables of rows of one row_format are looked up together"


def test_a_form_has_the_bytes_of_its_rows():
    for dim, dtype, projected in product((1, 2, 4, 8, 16), DTYPES, (False, True)):
        rows = 1152
        kind = "dense" if dim == 16 else "block" if projected else "short"
        options = {"dtype": dtype} | ({} if dim == 16 else {"dim": dim})
        row_format = RowFormat(dim=dim, dtype=dtype, embedding_dim=16, projected=projected)
        assert row_format.size(rows) == footprint([rows], 16, [(kind, options)])[0], (dim, dtype)
        assert row_format.rows_within(row_format.size(rows)) == rows


@pytest.mark.parametrize("ratio", [1.1, 1.5, 3, 5])
def test_a_table_that_is_most_of_the_budget_uses_it(ratio):
    """From one price to the next it changes its rows, and with that by more than is left."""
    rows = 20_000
    count = 1e6 * torch.arange(1, rows + 1).double() ** -1.05
    budget = int(64 * rows / ratio)
    ((_, options),) = choose([rows], 16, budget, [count.round().long()])
    table = Table(rows, 16, count, MUCH)
    own = RowFormat(dim=options.get("dim", 16), dtype="fp32", embedding_dim=16)
    assert table.size(own, options.get("keep", rows)) <= budget
    best = max(
        table.utility(row_format, min(kept, rows))
        for row_format in table.formats
        if (kept := (budget - table.size(row_format, 0)) // (4 * row_format.dim)) >= 0
    )
    assert table.utility(own, options.get("keep", rows)) >= 0.999 * best


def test_nothing_is_compressed_where_the_budget_does_not_ask_for_it():
    sizes = [100, 7]
    counts = [zipf(rows) for rows in sizes]
    assert choose(sizes, 16, 4 * 16 * 107, counts, dtypes=DTYPES) == [("dense", {})] * 2


def test_no_choice_of_lengths_and_numbers_of_rows_is_worth_more():
    sizes, dim = [40, 12], 4
    counts = [zipf(40, 300), zipf(12, 90)]
    forms = [RowFormat(dim=own, dtype="fp32", embedding_dim=dim) for own in (1, 2, 4)]
    offers = [
        [(Table(rows, dim, counts[t], MUCH).size(row_format, keep), keep, row_format.dim)
         for row_format in forms for keep in range(rows)]
        for t, rows in enumerate(sizes)
    ]  # fmt: skip
    for budget in (150, 250, 400, 700):
        found = utility(choose(sizes, dim, budget, counts), counts, dim)
        best = max(
            utility([("", {"keep": k, "dim": d}) for _, k, d in pair], counts, dim)
            for pair in product(*offers)
            if sum(size for size, _, _ in pair) <= budget
        )
        assert found >= 0.93 * best  # one price for all: what is left over may not fit the best


def test_frequent_ids_get_more_bytes():
    counts = [zipf(1000, 2**18), zipf(1000, 2**8)]
    (_, often), (_, seldom) = choose([1000, 1000], 16, 16_000, counts)
    assert often["keep"] > seldom["keep"]
    assert often.get("dim", 16) >= seldom["dim"]


def test_columns_whose_ids_say_more_get_more_bytes():
    """Rows are not given up because they are rare, but because they say little."""
    counts = [torch.full((5000,), 4), torch.full((5000,), 100)]
    plan = choose([5000, 5000], 16, 40_000, counts, [MUCH, Effects((0.0001,) * RANGES)])
    (_, rare), (_, frequent) = plan
    assert rare["keep"] > 10 * frequent["keep"]


def test_next_to_rates_fewer_ids_get_longer_rows():
    counts = [zipf(1000, 2**16)]
    plans = [choose([1000], 16, 4000, counts, [Effects(MUCH.by_range, rated)]) for rated in (0, 1)]
    (_, plain), (_, rated) = plans[0] + plans[1]
    assert rated["dim"] > plain["dim"]
    assert rated["keep"] < plain["keep"]


def test_tables_of_equal_rows_are_one_group():
    """With all rows kept or not: each group takes a launch."""
    sizes = [300, 1000, 5000]
    whole = 0
    for budget in range(10_000, 90_000, 4000):
        plan = choose(sizes, 16, budget, [zipf(rows) for rows in sizes], dtypes=("int8",))
        _, groups = footprint(sizes, 16, plan)
        assert groups == len({own.get("dim") for _, own in plan})
        whole += any(own.get("keep") == rows for (_, own), rows in zip(plan, sizes, strict=True))
    assert whole


def test_bits_are_given_up_first():
    """Rows of few bits are worth more than fewer rows, or shorter ones."""
    sizes, counts = [5000, 300], [zipf(5000), zipf(300)]
    quarter = choose(sizes, 16, 64 * 5300 // 4, counts, dtypes=DTYPES)
    assert {"int8", "int4"} & {own.get("dtype") for _, own in quarter}
    dense = utility([("dense", {})] * 2, counts, 16)
    assert utility(quarter, counts, 16) > 0.99 * dense
    for ratio in (4, 10, 100):
        budget = 64 * 5300 // ratio
        any_bits = choose(sizes, 16, budget, counts, dtypes=DTYPES)
        full = choose(sizes, 16, budget, counts)
        assert utility(any_bits, counts, 16) > 1.005 * utility(full, counts, 16)


@pytest.mark.parametrize("ratio", [10, 30, 1000])
def test_tables_that_are_trained_are_not_those_that_are_fitted(ratio):
    """Training adjusts to zeros in place of a matrix, but not to the noise of 4 bits."""
    counts, budget = [zipf(rows) for rows in CAPPED], sum(CAPPED) * 64 // ratio
    plans = [choose(CAPPED, 16, budget, counts, dtypes=DTYPES, trained=t) for t in (False, True)]
    kinds, fitted_kinds = ({kind for kind, _ in plan} for plan in plans)
    assert kinds & {"short", "block"} == {"short"}
    assert fitted_kinds & {"short", "block"} == {"block"}
    dtypes, fitted_dtypes = ({own.get("dtype") for _, own in plan} for plan in plans)
    assert "int4" not in dtypes
    assert "int4" in fitted_dtypes


def test_it_is_worth_more_than_the_best_of_full_rows():
    sizes, counts = [5000, 300], [zipf(5000), zipf(300)]
    budget = 64 * 5300 // 20
    kept = Drop.for_budget(Budget(sizes, 16, budget, counts=counts))
    drop = [("drop", own or {}) for own in kept]
    chosen = choose(sizes, 16, budget, counts)
    assert utility(chosen, counts, 16) > utility(drop, counts, 16)


def test_counts_need_not_fall_strictly():
    counts = [torch.tensor([9, 1, 8, 8, 0, 0, 0, 0])]
    assert choose([8], 2, 4 * 2 * 5, counts) == [("drop", {"keep": 4, "shared": False})]

    drawn = torch.poisson(2**18 / torch.arange(1, 100_001), generator=torch.manual_seed(0)).long()
    budget = 64 * 2000
    (by_drawn,) = choose([100_000], 16, budget, [drawn])
    (by_sorted,) = choose([100_000], 16, budget, [drawn.sort(descending=True).values])
    assert by_drawn[1]["keep"] == pytest.approx(by_sorted[1]["keep"], rel=0.05)


def test_a_budget_without_room_for_a_row_per_table_is_refused():
    with pytest.raises(ValueError, match=r"100 bytes is too small for --emb auto: 2 .* 128 bytes"):
        choose([50, 60], 16, 100, [zipf(50), zipf(60)])


def test_the_planner_is_a_kind_of_the_plan():
    names, sizes = ["a", "b"], [50, 4000]
    counts = [zipf(50), zipf(4000)]
    ids = KnownIds(counts=lambda: counts, effects=lambda: [MUCH, LITTLE])
    whole = make_table_plan(names, sizes, 8, "auto", budget="10x", ids=ids)
    effects = [MUCH, LITTLE]
    assert whole == choose(sizes, 8, 4 * 8 * 4050 // 10, counts, effects, dtypes=DTYPES)
    assert any("dtype" in options for _, options in whole)
    narrow = make_table_plan(names, sizes, 8, "auto", budget="10x", dtype="int8", ids=ids)
    assert narrow == choose(sizes, 8, 12960, counts, effects, dtypes=("int8", "int4"))
    largest = make_table_plan(names, sizes, 8, "auto", budget="10x", largest=1, ids=ids)
    rest = choose([4000], 8, 12960 - 1600, counts[1:], effects[1:], dtypes=DTYPES)
    assert largest == [("dense", {}), *rest]
    with pytest.raises(ValueError, match="--emb auto needs a budget: set --budget"):
        make_table_plan(names, sizes, 8, "auto")
    with pytest.raises(ValueError, match="needs the number of occurrences of each id"):
        make_table_plan(names, sizes, 8, "auto", budget="10x")


def test_a_model_of_mixed_types_is_trained(device):
    """Groups in int8, bf16 and int4 side by side: a step changes the rows that it used."""
    sizes = [30, 500, 4000]
    counts = [zipf(30, 2**26), zipf(500), zipf(4000)]
    plan = choose(sizes, 16, 64 * 4530 // 60, counts, dtypes=DTYPES, trained=True)
    assert {own.get("dtype") for _, own in plan} == {"int8", "int4"}
    plan[1][1]["dtype"] = "bf16"
    model = DLRM(2, sizes, 16, plan, bottom_mlp=(8,), top_mlp=(8,)).to(device)
    before = [rows.clone() for rows in model.sparse_arch.to_dense()]
    ids = torch.stack([torch.arange(8) % rows for rows in sizes]).to(device)
    optimizer = RowOptimizer(model.sparse_arch.parameters(), "sgd", lr=10.0)
    model(torch.randn(2, 8, device=device), ids).sum().backward()
    optimizer.step()
    for old, new in zip(before, model.sparse_arch.to_dense(), strict=True):
        assert (old[:8] != new[:8]).any()


def test_ids_are_counted_only_for_budgets_that_depend_on_it():
    asked = []

    def counts():
        asked.append(True)
        return [zipf(50), zipf(4000)]

    for kind, expected in (("hash", 0), ("drop", 1), ("auto", 2)):
        ids = KnownIds(counts=counts, effects=lambda: [MUCH] * 2)
        make_table_plan(["a", "b"], [50, 4000], 8, kind, budget="10x", ids=ids)
        assert len(asked) == expected
