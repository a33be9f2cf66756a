"""What must hold for any input, tried on inputs that hypothesis makes up."""

from typing import get_args

import pytest
import torch

from dlrm.config.schema import ShardingType
from dlrm.distributed.planner import imbalance, plan_shards, shard_rows
from dlrm.embeddings.common.budget import Budget, highest_level, max_rows, split_by_rows
from dlrm.kernels.update.row_sort import sort_rows, sort_rows_together
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import KnownIds, make_table_plan

pytest.importorskip("hypothesis")  # of the dev extra, which a GPU machine may lack
from hypothesis import assume, given
from hypothesis import strategies as st

sizes = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@st.composite
def plans(draw):
    """Tables, ranks and sharding types."""
    tables = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))
    types = [draw(st.sampled_from(get_args(ShardingType))) for _ in tables]
    loads = [draw(st.floats(0, 1e6)) for _ in tables]
    return tables, draw(st.integers(1, 40)), draw(st.integers(1, 9)), types, loads


@given(plan=plans(), page=st.integers(1, 64), column_wise=st.booleans(), room=st.integers(0, 1000))
def test_every_weight_is_in_one_shard(plan, page, column_wise, room):
    tables, dim, ranks, types, loads = plan
    options = {"loads": loads, "page": page, "column_wise": column_wise, "room": room}
    shards = plan_shards(tables, dim, ranks, sharding_types=types, **options)
    held = [torch.zeros(rows, dim) for rows in tables]
    for shard in shards:
        assert 0 <= shard.rank < ranks
        assert shard.height > 0
        assert shard.width > 0
        held[shard.table][slice(*shard.rows), slice(*shard.columns)] += 1
    for table, kind in zip(held, types, strict=True):
        assert (table == (kind != "replicate")).all()
    assert shards == sorted(shards, key=lambda shard: (shard.table, shard.rows, shard.columns))


@given(tables=sizes, ranks=st.integers(1, 16), dim=st.sampled_from([4, 16, 64]))
def test_sharding_balances_no_worse_than_tables_as_a_whole(tables, ranks, dim):
    loads = [1.0] * len(tables)
    auto, whole = (
        imbalance(plan_shards(tables, dim, ranks, sharding_types=[t] * len(tables)), loads, ranks)
        for t in ("auto", "table")
    )
    assert auto <= whole


@given(rows=st.integers(1, 10**9), ranks=st.integers(1, 64), page=st.integers(1, 10**5))
def test_row_wise_shards_are_runs_of_pages_of_equal_number(rows, ranks, page):
    shards = shard_rows(0, rows, 8, ranks, page)
    assert sum(shard.height for shard in shards) == rows
    assert all(shard.rows[0] % page == 0 for shard in shards)
    pages = [-(-shard.height // page) for shard in shards]
    assert max(pages) - min(pages) <= 1


@given(tables=sizes, budget=st.integers(0, 10**7), more=st.integers(0, 10**6))
def test_a_level_fits_its_budget_and_rises_with_it(tables, budget, more):
    def cost(level):
        return sum(min(rows, level) for rows in tables)

    low, high = (highest_level(cost, max(tables), b, "any") for b in (budget, budget + more))
    assert cost(low) <= budget
    assert low == max(tables) or cost(low + 1) > budget
    assert low <= high


@pytest.mark.parametrize(
    "kind", ["auto", "basis", "block", "cafe", "drop", "hash", "qr", "robe", "tt"]
)
@given(
    tables=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    shares=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
)
def test_a_plan_stays_within_its_budget(kind, tables, shares):
    names = [f"C{table}" for table in range(len(tables))]
    counts = [torch.arange(rows, 0, -1) for rows in tables]
    ids = KnownIds(counts=lambda: counts)
    for size in (int(share * sum(tables) * 8 * 4) for share in shares):
        try:
            plan = make_table_plan(names, tables, 8, kind, budget=str(size), ids=ids)
        except ValueError:  # this kind has no options that are so small
            continue
        assert SparseArch(tables, 8, plan).sizes()["bytes"] <= size


@given(tables=st.lists(st.integers(1, 400), min_size=1, max_size=4), size=st.integers(0, 10**5))
def test_more_memory_never_leaves_fewer_rows(tables, size):
    assume(size >= 32 * len(tables))
    low, high = (max_rows(Budget(tables, 8, own), "drop") for own in (size, size + 32))
    assert low <= high


@given(amount=st.integers(0, 10**12), tables=sizes)
def test_parts_of_an_amount_add_up(amount, tables):
    parts = split_by_rows(amount, tables)
    assert sum(parts) == amount
    assert min(parts) >= 0
    assert all(abs(p - amount * t / sum(tables)) <= 1 for p, t in zip(parts, tables, strict=True))


row_lists = st.lists(
    st.tuples(st.sampled_from([7, 1000, 2**31 + 5]), st.lists(st.integers(-1, 6), max_size=40)),
    min_size=1,
    max_size=4,
)


@given(lists=row_lists)
def test_rows_are_sorted_stably_with_all_entries(lists):
    gradients = [(torch.tensor(rows, dtype=torch.int64), n) for n, rows in lists]
    together = sort_rows_together(gradients)
    for (rows, n), joint in zip(gradients, together, strict=True):
        wanted, order = torch.sort(rows, stable=True)
        for found in (sort_rows(rows, n), joint):
            taken, entries = found.rows - found.base, found.order - found.first
            kept = wanted >= 0
            assert torch.equal(taken[taken >= 0].long(), wanted[kept])
            assert torch.equal(entries[taken >= 0], order[kept])
