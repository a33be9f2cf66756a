"""What must hold for any input, tried on inputs that hypothesis makes up."""

from itertools import pairwise
from math import prod
from typing import get_args

import pytest
import torch
from torch import nn

from dlrm.config.schema import ShardingType
from dlrm.distributed.planner import imbalance, plan_shards, shard_rows
from dlrm.embeddings import EmbeddingBag, available, build
from dlrm.embeddings.common.budget import Budget, highest_level, max_rows, split_by_rows
from dlrm.embeddings.common.factorization import MAX_PADDING, factorize_dim, factorize_rows
from dlrm.kernels.update.row_sort import sort_rows, sort_rows_together
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import make_table_plan

pytest.importorskip("hypothesis")  # of the dev extra, which a GPU machine may lack
from hypothesis import assume, given
from hypothesis import strategies as st

LOSSLESS = {
    "dense": {},
    "offload": {},
    "paged": {"page_size": 3},
    "hash": {"rows": 50},
    "qr": {"collisions": 1},
    "block": {"dim": 4},
    "drop": {"keep": 50},
    "tt": {"rank": 50},
    "robe": {"rows": 50, "block": 1 << 30},
    "basis": {"clusters": 50},
}
"""Options under which a kind can hold any table of up to 50 rows."""

sizes = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


@st.composite
def bags(draw):
    """Rows of a table, ids, offsets and weights: empty bags, duplicates, the first and last id."""
    rows = draw(st.integers(1, 50))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    ids = st.lists(
        st.one_of(st.sampled_from([0, rows - 1]), st.integers(0, rows - 1)),
        min_size=sum(lengths),
        max_size=sum(lengths),
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.tensor(draw(ids), dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    weights = draw(st.none() | st.just(torch.randn(len(ids), dtype=torch.float64)))
    return rows, ids, offsets.to(ids.dtype), weights


@pytest.mark.parametrize("kind", LOSSLESS)
@given(case=bags(), mode=st.sampled_from(["sum", "mean", "max"]), last=st.booleans())
def test_a_look_up_is_that_of_embedding_bag(kind, case, mode, last):
    rows, ids, offsets, weights = case
    weights = weights if mode == "sum" else None
    options = {"mode": mode, "include_last_offset": last}
    given_offsets = offsets if last else offsets[:-1]
    table = torch.randn(rows, 4, dtype=torch.float64)
    expected = nn.EmbeddingBag.from_pretrained(table, freeze=False, **options)
    found = EmbeddingBag(rows, 4, kind=kind, dtype=torch.float64, **options, **LOSSLESS[kind])
    found.load_state_dict({"weight": table})
    out, wanted = (bag(ids, given_offsets, weights) for bag in (found, expected))
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    if kind in ("dense", "paged"):  # one parameter, with a gradient for each row
        up = torch.randn_like(wanted)
        out.backward(up)
        wanted.backward(up)
        (parameter,) = found.parameters()
        torch.testing.assert_close(parameter.grad.reshape(rows, 4), expected.weight.grad)


@pytest.mark.parametrize("kind", sorted(available()))
@given(case=bags(), batch=st.integers(1, 5))
def test_a_bag_is_the_sum_of_its_rows(kind, case, batch):
    """For any kind, compressed or not: a look-up of bags adds up look-ups of single ids."""
    rows, ids, offsets, weights = case
    embedding = build(kind, [rows], 4).double()
    single = embedding(ids[None, :])[:, 0]  # [nnz, D]
    pooled = embedding(ids, offsets, weights)[:, 0]  # [B, D]
    scaled = single if weights is None else single * weights[:, None]
    bounds = offsets.tolist()
    wanted = [scaled[a:b].sum(0) for a, b in pairwise(bounds)]
    torch.testing.assert_close(pooled, torch.stack(wanted))


@given(rows=st.integers(1, 2**40), d=st.integers(1, 5))
def test_factors_of_rows_cover_them(rows, d):
    p = factorize_rows(rows, d)
    assert len(p) == d
    assert list(p) == sorted(p)
    assert rows <= prod(p)
    assert p[-1] <= max(2 * p[0], p[0] + 1)
    assert prod(p) <= MAX_PADDING * rows or p[-1] <= p[0] + 1


@given(dim=st.integers(1, 4096), d=st.integers(1, 5))
def test_factors_of_a_dim_are_exact(dim, d):
    q = factorize_dim(dim, d)
    assert (len(q), prod(q), list(q)) == (d, dim, sorted(q))


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
    for size in (int(share * sum(tables) * 8 * 4) for share in shares):
        try:
            plan = make_table_plan(names, tables, 8, kind, budget=str(size), counts=lambda: counts)
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
