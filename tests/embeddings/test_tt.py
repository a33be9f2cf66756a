"""Tensor-train tables."""

import copy
from dataclasses import replace

import pytest
import torch

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings import EmbeddingBag, build
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.tt import TT, clip_ranks, tt_weights
from dlrm.optim import RowOptimizer
from tests.kit import train_product

WEIGHTS = {  # of the seven largest Kaggle tables by rank 8, 16, 32, 64
    10131227: (39360, 135040, 495360, 1891840),
    8351593: (35488, 122176, 449152, 1717504),
    7046547: (35200, 121600, 448000, 1715200),
    5461306: (31072, 106944, 393088, 1502976),
    2202608: (22992, 79264, 291648, 1115776),
    286181: (12464, 43360, 160448, 615808),
    142572: (9216, 31744, 116736, 446464),
}
RANKS = (8, 16, 32, 64)


def materialise(group, table):
    """All rows of a table by the definition, from the parameters, differentiable."""
    cores = []
    for k, core in enumerate(group.cores):
        start = sum(p[k] for p in group.p[:table])
        slices = core[start : start + group.p[table][k]]
        cores.append(slices.view(-1, group.ranks[k], group.q[k], group.ranks[k + 1]))
    return train_product(cores)[: group.num_embeddings[table]]


SHAPES = [
    {"dim": 6, "rank": 3, "d": 2},
    {"dim": 6, "rank": 3, "d": 2, "q": [3, 2]},
    {"dim": 10, "rank": 5, "d": 3},
    {"dim": 15, "rank": 2, "q": [3, 1, 5]},
    {"dim": 7, "rank": 4, "d": 3},
    {"dim": 12, "rank": 3, "d": 4, "q": [2, 1, 3, 2]},
    {"dim": 8, "rank": 2, "p": [31, 29, 37]},  # p much longer than r q r
    {"dim": 1, "rank": 1},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_rows_and_every_gradient_against_the_definition(options):
    options = dict(options)
    sizes = [97, 1, 500]
    group = build("tt", sizes, options.pop("dim"), **options).double()
    ids = torch.stack([torch.randint(rows, (40,)) for rows in sizes])
    ids[:, 0], ids[:, 1], ids[:, 2:5] = 0, torch.tensor(sizes) - 1, ids[:, 5:6]
    dense = [materialise(group, table) for table in range(3)]
    expected = torch.stack([table[i] for table, i in zip(dense, ids, strict=True)], 1)
    out = group(ids)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    names = [name for name, _ in group.named_parameters()]
    assert names == [f"cores.{k}" for k in range(len(group.q))]
    got = torch.autograd.grad(out, list(group.parameters()), upstream)
    wanted = torch.autograd.grad(expected, list(group.parameters()), upstream)
    for name, a, b in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(a, b, msg=name)
        assert a.abs().max() > 0


def test_many_cores_of_many_tables():
    """The product of their slices is beyond 64 bits."""
    group, one = (build("tt", [1000] * tables, 16, rank=4, d=12) for tables in (26, 1))
    with torch.no_grad():
        for own, core, p in zip(one.cores, group.cores, one.p[0], strict=True):
            own.copy_(core[25 * p : 26 * p])
    torch.testing.assert_close(group.to_dense(25), one.to_dense(0))


@pytest.mark.parametrize("rows", WEIGHTS)
def test_weights_of_the_paper(rows):
    for rank, weights in zip(RANKS, WEIGHTS[rows], strict=True):
        group = build("tt", [rows], 16, rank=rank)
        assert group.q == (2, 2, 4)
        assert sum(core.numel() for core in group.cores) == weights
        assert group.footprint() == [{"weights": 4 * weights}]


@pytest.mark.parametrize("rank", [2, 8, 32, 64])
@pytest.mark.parametrize(
    ("rows", "dim", "d"), [(10131227, 16, 3), (142572, 16, 3), (30000, 64, 2), (100000, 12, 4)]
)
def test_initial_rows_deviate_as_dense_ones(rows, dim, d, rank):
    group = build("tt", [5, rows], dim, rank=rank, d=d)
    for ids in (torch.arange(20000), torch.randint(rows, (20000,))):
        deviation = group.rows(1, ids).std().item()
        assert deviation == pytest.approx((3 * rows) ** -0.5, rel=0.03)


def test_initial_entries_are_not_near_zero():
    group = build("tt", [142572], 16, rank=32)
    for core in group.cores:
        entries = core / core.square().mean().sqrt()
        assert entries.abs().min() > 0.6  # 2 of 2.4 deviations, slices being scaled by their own
        assert entries.mean().abs() < 0.1


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize(
    ("rows", "dim", "d", "rank"),
    [
        (10131227, 16, 3, 8),
        (10131227, 16, 3, 32),
        (142572, 16, 3, 32),
        (9000, 64, 2, 8),
        (100000, 12, 4, 16),
    ],
)
def test_sgd_moves_rows_as_far_as_dense_ones(rows, dim, d, rank, keep):
    group = build("tt", [50, rows], dim, rank=rank, d=d, keep=[0, keep])
    before = group.rows(1, torch.arange(1000)).clone()
    RowOptimizer(group.parameters(), "sgd")
    torch.testing.assert_close(group.rows(1, torch.arange(1000)), before, rtol=1e-4, atol=1e-7)
    parameters, start = list(group.cores), copy.deepcopy(group.state_dict())
    moved = []
    for each in torch.randint(keep + 1, rows, (20, 1)):  # alone: nothing is shared
        old, gradient = group.rows(1, each).clone(), torch.randn(1, dim)
        group.vectors(torch.ones(1, dtype=torch.int64), each).backward(gradient)
        RowOptimizer(parameters, "sgd", lr=0.001).step()
        step = group.rows(1, each) - old
        assert -(step * gradient).sum() / gradient.square().sum() > 0.0002
        moved.append((step.norm() / (0.001 * gradient.norm())).item())
        group.load_state_dict(start)
        group.zero_grad()
    assert 0.5 < sum(moved) / len(moved) < 2


def test_cores_of_zeros_are_not_rescaled():
    group = build("tt", [5000], 8, rank=4)
    group.cores[0].data.zero_()
    others = [core.clone() for core in group.cores[1:]]
    RowOptimizer(group.parameters(), "sgd")
    assert all(map(torch.equal, group.cores[1:], others))
    with torch.device("meta"):
        RowOptimizer(build("tt", [5000], 8, rank=4).parameters(), "sgd")


def test_copies_are_rescaled_for_sgd_and_no_others_are():
    group = build("tt", [5000], 8, rank=4)
    for rule, copied in (("adam", group), ("sgd", copy.deepcopy(group))):
        RowOptimizer(copied.parameters(), rule)
        assert torch.equal(copied.cores[0], group.cores[0]) == (rule != "sgd")


def test_ranks_are_cut_to_what_a_table_can_use():
    assert clip_ranks(32, [(200, 220, 250)], (2, 2, 4)) == (1, 32, 32, 1)
    assert clip_ranks(1000, [(2, 3, 4)], (2, 2, 4)) == (1, 4, 16, 1)
    assert clip_ranks(1000, [(2, 3, 4), (5, 5, 5)], (2, 2, 4)) == (1, 10, 20, 1)
    assert tt_weights((2, 3, 4), (2, 2, 4), (1, 4, 16, 1)) == 2 * 8 + 3 * 128 + 4 * 64


@pytest.mark.parametrize("d", [2, 3, 4])
def test_from_dense_is_exact_at_full_rank_and_better_with_more(d):
    weights = [torch.randn(rows, 12, dtype=torch.float64) for rows in (97, 50, 1)]
    errors = []
    for rank in (1, 4, 1000):
        group = TT([97, 50, 1], 12, rank=rank, d=d).double()
        group.load_dense(weights)
        rows = torch.cat([group.rows(t, torch.arange(len(w))) for t, w in enumerate(weights)])
        errors.append((rows - torch.cat(weights)).norm().item())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10
    exact = TT.from_dense([w.float() for w in weights], rank=1000, d=d)
    torch.testing.assert_close(exact.to_dense(1), weights[1].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_bags_of_packed_exact_rows_are_weighted_in_fp32(dtype):
    """Next to cores in bf16."""
    bag = EmbeddingBag(40, 8, mode="sum", kind="tt", rank=2, keep=7, sparse=True, dtype=dtype)
    ids = torch.arange(12).view(3, 4)
    found = bag(ids, per_sample_weights=torch.full((3, 4), 0.5))
    torch.testing.assert_close(found, bag(ids) / 2)


@pytest.mark.parametrize("ratio", [pytest.param(4, marks=pytest.mark.slow), 10, 100, 400])
def test_budgets_are_met_closely(ratio):
    sizes = [min(rows, 300_000) for rows in KAGGLE_CARDINALITIES]
    budget = 64 * sum(sizes) // ratio
    options = TT.for_budget(Budget(sizes, 16, budget))
    chosen = {rows: own for rows, own in zip(sizes, options, strict=True) if own}
    tables = [rows for rows, own in zip(sizes, options, strict=True) if own]
    (rank,) = {own["rank"] for own in chosen.values()}
    keep = [own["keep"] for own in options if own]
    group = build("tt", tables, 16, rank=rank, keep=keep)
    parts = [sum(part.values()) for part in group.footprint()]
    assert all(part < 64 * rows for part, rows in zip(parts, tables, strict=True))
    size = sum(parts) + 64 * (sum(sizes) - sum(tables))
    assert 0.995 * budget < size <= budget
    exact = 64 * sum(keep)
    assert exact > 0.5 * (budget - 64 * (sum(sizes) - sum(tables))) or rank == 1


def test_a_budget_keeps_the_most_frequent_ids_exact():
    counts = [torch.arange(2000.0, 1000, -1), torch.arange(1990.0, 990, -1)]
    options = TT.for_budget(Budget([1000, 1000], 16, 7000, counts=counts))
    first, second = (own["keep"] for own in options)
    assert 9 <= first - second <= 11  # all ids above one count
    assert first + second > 60
    bf16 = TT.for_budget(Budget([1000, 1000], 16, 7000, counts=counts, dtype="bf16"))
    assert sum(own["keep"] for own in bf16) > 1.5 * (first + second)
    cached = TT.for_budget(Budget([1000, 1000], 16, 7000, counts=counts), cache_rows=10)
    assert sum(own["keep"] for own in cached) < first + second


def test_a_budget_has_the_next_most_frequent_ids_cached_from_the_start():
    counts = [torch.arange(2000.0, 1000, -1), torch.arange(1990.0, 990, -1)]
    budget = Budget([1000, 1000, 3], 16, 9000, counts=[*counts, torch.ones(3)])
    first, second, small = TT.for_budget(budget, cache_rows=21)
    assert small is None  # a dense table needs no cache
    assert first["cache_first"] + second["cache_first"] == 21
    ends = [own["keep"] + own["cache_first"] for own in (first, second)]
    assert 9 <= ends[0] - ends[1] <= 11  # all ids above one count
    given = TT.for_budget(budget, cache_rows=21, cache_first=0)
    assert [own["cache_first"] for own in given[:2]] == [0, 0]


def test_ids_that_are_cached_from_the_start():
    torch.manual_seed(0)
    options = {"rank": 2, "keep": [20, 5], "cache_rows": 9, "cache_first": [4, 3]}
    group = build("tt", [300, 40], 16, **options)
    assert 0.5 < group.cache.rows[:4].abs().max() * 300**0.5 <= 1  # as dense rows start
    assert 0.5 < group.cache.rows[4:7].abs().max() * 40**0.5 <= 1
    ids = torch.tensor([[19, 20, 23, 24], [4, 5, 7, 8]])
    group(ids)
    assert group.cache_stats() == {"hits": 4, "lookups": 6}
    weights = [torch.randn(300, 16), torch.randn(40, 16)]
    fitted = TT.from_dense(weights, **options)
    for table, (weight, last) in enumerate(zip(weights, (24, 8), strict=True)):
        found = fitted.to_dense(table)
        torch.testing.assert_close(found[:last], weight[:last])
        assert (found[last:] - weight[last:]).norm() > 1
    fitted.cache_populate()  # nothing was looked up: they stay
    torch.testing.assert_close(fitted.to_dense(1)[:8], weights[1][:8])


def test_a_few_look_ups_of_others_do_not_end_what_is_cached_from_the_start():
    group = build("tt", [300], 16, rank=2, cache_rows=5, cache_first=5)
    for number, evicted in ((12, 0), (16, 1)):
        group(torch.tensor([[70] * number]))
        assert group.cache_populate().evicted == evicted, number


def test_a_budget_goes_to_trains_alone_if_no_row_is_to_be_exact():
    options = TT.for_budget(Budget([1000, 1000], 16, 7000), keep=0)
    assert {own["keep"] for own in options} == {0}
    assert options[0]["rank"] > TT.for_budget(Budget([1000, 1000], 16, 7000))[0]["rank"]


def exact_and_product(group, table, row):
    """The definition: an exact row, or the shared row and what a table of the others alone has."""
    kept = group.kept[table]
    starts = [sum(own + 1 for own in group.kept[:t]) for t in range(len(group.kept))]
    if row < kept:
        return group.exact.weight[starts[table] + row]
    alone = build("tt", group.in_train, 16, rank=3).double()
    alone.load_state_dict({k: v for k, v in group.state_dict().items() if k.startswith("cores")})
    return group.exact.weight[starts[table] + kept] + alone.rows(table, torch.tensor(row - kept))


def test_exact_rows_and_products():
    group = build("tt", [300, 40, 7], 16, rank=3, keep=[20, 5, 100]).double()
    assert group.kept == (20, 5, 6)
    assert group.in_train == [280, 35, 1]
    for table, row in [(0, 0), (0, 19), (0, 20), (0, 299), (1, 5), (1, 39), (2, 3), (2, 6)]:
        expected = exact_and_product(group, table, row)
        torch.testing.assert_close(group.rows(table, torch.tensor(row)), expected)
    assert sum(sum(part.values()) for part in group.footprint()) == sum(
        parameter.nbytes for parameter in group.parameters()
    )


def test_gradients_of_exact_and_shared_rows():
    """Each id moves its own row or the shared one, and only the others move the train."""
    group = build("tt", [300, 40], 16, rank=3, keep=[20, 5], sparse=False).double()
    ids = torch.tensor([[0, 19, 20, 299, 20], [4, 4, 4, 4, 39]])
    upstream = torch.randn(5, 2, 16, dtype=torch.float64)
    (group(ids) * upstream).sum().backward()
    expected = torch.zeros_like(group.exact.weight)
    for table, start, kept in ((0, 0, 20), (1, 21, 5)):
        expected.index_add_(0, start + ids[table].clamp(max=kept), upstream[:, table])
    torch.testing.assert_close(group.exact.weight.grad, expected)
    alone = build("tt", group.in_train, 16, rank=3).double()
    alone.load_state_dict({k: v for k, v in group.state_dict().items() if k.startswith("cores")})
    out = alone(torch.tensor([[0, 279, 0], [34, 34, 34]]))
    wanted = torch.stack([upstream[2:, 0], upstream[2:, 1]], 1)
    wanted[:2, 1] = 0
    (out * wanted).sum().backward()
    for own, other in zip(group.cores, alone.cores, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_dense_table_keeps_its_first_rows_to_the_bit():
    torch.manual_seed(0)
    weights = [torch.randn(300, 16), torch.randn(40, 16)]
    group = TT.from_dense(weights, rank=4, keep=30)
    assert torch.equal(group.to_dense(0)[:30], weights[0][:30])
    assert torch.equal(group.to_dense(1)[:30], weights[1][:30])
    error = (group.to_dense(1)[30:] - weights[1][30:]).norm() / weights[1][30:].norm()
    alone = TT.from_dense(weights, rank=4)
    assert error < (alone.to_dense(1) - weights[1]).norm() / weights[1].norm()


@pytest.mark.parametrize("one_hot", [True, False])
def test_the_cache_holds_rows_of_the_train(one_hot):
    """Exact rows are not counted, and a cached row is on top of the shared one."""
    torch.manual_seed(0)
    group = build("tt", [300, 40], 16, rank=3, keep=[20, 5], cache_rows=2)
    with torch.no_grad():
        group.exact.weight.normal_()
    ids = torch.tensor([[0, 7, 250, 250, 21], [0, 4, 4, 30, 30]])
    offsets = None if one_hot else torch.arange(11)
    before = group(ids)
    for _ in range(3):
        group(ids if one_hot else ids.view(-1), offsets)
    assert group.cache_stats() == {"hits": 0, "lookups": 20}
    report = group.cache_populate()
    assert report.resident == 2
    torch.testing.assert_close(group(ids), before)
    with torch.no_grad():
        group.cache.rows.add_(1)
    changed = (group(ids) - before).mean(-1).t()
    expected = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.float32)
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize(("rows", "budget"), [(20_000, 900_000), (5_000, 250_000)])
def test_a_budget_counts_bonds_as_short_as_they_are_cut(rows, budget):
    (options,) = TT.for_budget(Budget([rows], 16, budget), keep=0)
    sizes = [
        sum(TT([rows], 16, rank=options["rank"] + more).footprint()[0].values()) for more in (0, 1)
    ]
    assert sizes[0] <= budget < sizes[1]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_packed_exact_rows_and_cores_in_bf16(dtype, device):
    torch.manual_seed(0)
    sizes, options = [300, 40, 131], {"rank": 4, "keep": [60, 9, 0], "cache_rows": 5}
    options["cache_first"] = [5, 0, 0]
    packed = build("tt", sizes, 16, dtype=dtype, **options).to(device)
    weights = [torch.randn(rows, 16, device=device) for rows in sizes]
    packed.load_dense(weights)
    assert {core.dtype for core in (*packed.cores, packed.cache.rows)} == {torch.bfloat16}
    plain = build("tt", sizes, 16, **options).to(device)
    plain.load_dense(weights)
    limit = {"int8": 0.02, "int4": 0.15}[dtype]
    for table, kept in enumerate([65, 9, 0]):
        off = packed.to_dense(table) - plain.to_dense(table)
        assert off.square().mean().sqrt() < limit
        assert (packed.to_dense(table) - weights[table])[
            :kept
        ].square().mean().sqrt() < limit or not kept
    state = packed.state_dict()
    assert sum(v.nbytes for v in state.values()) == sum(sum(f.values()) for f in packed.footprint())
    twin = build("tt", sizes, 16, dtype=dtype, **options).to(device)
    twin.load_state_dict(state)
    for table in range(3):
        assert torch.equal(twin.to_dense(table), packed.to_dense(table))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_budget_of_packed_rows(dtype):
    sizes = [20_000, 30_000]
    budget = Budget(sizes, 16, 64 * sum(sizes) // 30, dtype=dtype)
    options = TT.for_budget(budget)
    bf16 = TT.for_budget(replace(budget, dtype="bf16"))
    keep, fewer = (sum(own["keep"] for own in each) for each in (options, bf16))
    assert keep > {"int8": 1.6, "int4": 2.5}[dtype] * fewer
    keeps = [own["keep"] for own in options]
    group = build("tt", sizes, 16, rank=options[0]["rank"], keep=keeps, dtype=dtype)
    size = sum(sum(part.values()) for part in group.footprint())
    assert 0.97 * budget.size < size <= budget.size
