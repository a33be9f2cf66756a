"""Tensor-train tables."""

from math import prod

import pytest
import torch
from torch.func import functional_call

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings import EmbeddingBag, build
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.tt import TT, clip_ranks, tt_weights

# Rows of the 26 tables of Criteo Terabyte with ids modulo 10,000,000.
TERABYTE_10M = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10,
    2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
WEIGHTS = {  # of the seven largest Kaggle tables by rank 8, 16, 32, 64
    10131227: (39360, 135040, 495360, 1891840),
    8351593: (35488, 122176, 449152, 1717504),
    7046547: (35200, 121600, 448000, 1715200),
    5461306: (31072, 106944, 393088, 1502976),
    2202608: (22992, 79264, 291648, 1115776),
    286181: (12464, 43360, 160448, 615808),
    142572: (9216, 31744, 116736, 446464),
}
RATIOS = {  # tables in TT: compression of all embeddings by rank 8, 16, 32, 64
    3: (4.1, 4.1, 4.1, 3.9),
    5: (58.3, 55.8, 48.3, 31.7),
    7: (221.9, 187.0, 117.4, 48.0),
}
RANKS = (8, 16, 32, 64)


def materialise(group, table):
    """All rows of a table by the definition, from the parameters, differentiable."""
    out = group.cores[0].new_ones(1, 1, 1)
    for k, core in enumerate(group.cores):
        start = sum(p[k] for p in group.p[:table])
        slices = core[start : start + group.p[table][k]]
        slices = slices.view(len(slices), group.ranks[k], group.q[k], group.ranks[k + 1])
        out = torch.einsum("xar,prqs->xpaqs", out, slices)
        out = out.reshape(out.shape[0] * out.shape[1], -1, out.shape[-1])
    return out[: group.num_embeddings[table], :, 0]


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


def test_the_first_core_is_the_most_significant_digit():
    group = build("tt", [24], 8, rank=2, p=[2, 3, 4])
    row = group.rows(0, torch.tensor(1 * 12 + 2 * 4 + 3))
    with torch.no_grad():
        for k, digit in enumerate((1, 2, 3)):
            for other in range(group.p[0][k]):
                if other != digit:
                    group.cores[k][other] = 0
    assert torch.equal(group.rows(0, torch.tensor(23)), row)
    assert group.to_dense().abs().sum(1).nonzero().tolist() == [[23]]


def test_many_cores_of_many_tables():
    """The product of their slices is beyond 64 bits."""
    group, one = (build("tt", [1000] * tables, 16, rank=4, d=12) for tables in (26, 1))
    with torch.no_grad():
        for own, core, p in zip(one.cores, group.cores, one.p[0], strict=True):
            own.copy_(core[25 * p : 26 * p])
    torch.testing.assert_close(group.to_dense(25), one.to_dense(0))


def test_every_slice_of_a_long_core_learns():
    group = build("tt", [220 * 200 * 250], 16, rank=2, p=[200, 220, 250], q=[2, 2, 4])
    digits = torch.arange(250)
    ids = (digits % 200 * 220 + digits % 220) * 250 + digits
    group(ids[None]).square().sum().backward()
    for core in group.cores:
        assert (core.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("rows", WEIGHTS)
def test_weights_of_the_paper(rows):
    for rank, weights in zip(RANKS, WEIGHTS[rows], strict=True):
        group = build("tt", [rows], 16, rank=rank)
        assert group.q == (2, 2, 4)
        assert sum(core.numel() for core in group.cores) == weights
        assert group.footprint() == [{"weights": 4 * weights}]


def compression(sizes, dim, largest, rank):
    """Dense weights over weights with the largest tables in TT."""
    order = sorted(sizes, reverse=True)
    shapes = build("tt", order[:largest], dim, rank=rank)
    compressed = sum(part["weights"] // 4 for part in shapes.footprint())
    return dim * sum(sizes) / (compressed + dim * sum(order[largest:]))


@pytest.mark.parametrize("largest", RATIOS)
def test_compression_ratios_of_the_paper(largest):
    for rank, ratio in zip(RANKS, RATIOS[largest], strict=True):
        assert round(compression(KAGGLE_CARDINALITIES, 16, largest, rank), 1) == ratio


def test_compression_ratio_of_the_paper_for_terabyte():
    assert 112 <= compression(TERABYTE_10M, 64, 7, 8) < 113


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


def test_drop_in_from_pretrained():
    weight = torch.randn(50, 12)
    bag = EmbeddingBag.from_pretrained(weight, kind="tt", rank=100, mode="sum")
    reference = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    ids, offsets = torch.tensor([0, 49, 7, 7, 3]), torch.tensor([0, 2, 2, 4])
    torch.testing.assert_close(bag(ids, offsets), reference(ids, offsets), rtol=0, atol=1e-5)


def test_autocast_leaves_the_look_up_in_full_precision():
    group = build("tt", [1000], 16, rank=8)
    ids = torch.arange(64)[None]
    expected = group(ids)
    offsets = torch.arange(0, 65, 2)
    pooled = group(ids[0], offsets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(group(ids), expected)
        assert torch.equal(group(ids[0], offsets), pooled)


@pytest.mark.parametrize("ratio", [pytest.param(2, marks=pytest.mark.slow), 4, 10, 30, 100, 400])
def test_budgets_are_met_closely(ratio):
    sizes = KAGGLE_CARDINALITIES
    budget = 64 * sum(sizes) // ratio
    options = TT.for_budget(Budget(sizes, 16, budget))
    chosen = [rows for rows, own in zip(sizes, options, strict=True) if own]
    assert sorted(chosen, reverse=True) == sorted(sizes, reverse=True)[: len(chosen)]
    (rank,) = {own["rank"] for own in options if own}
    group = build("tt", chosen, 16, rank=rank)
    parts = [part["weights"] for part in group.footprint()]
    assert all(part < 64 * rows for part, rows in zip(parts, chosen, strict=True))
    size = sum(parts) + 64 * (sum(sizes) - sum(chosen))
    assert 0.93 * budget <= size <= budget  # one rank more costs up to a fourteenth


def test_budgets_at_the_ends():
    sizes = [100000, 3, 50]
    assert TT.for_budget(Budget(sizes, 16, 64 * sum(sizes))) == [None] * 3
    with pytest.raises(ValueError, match=r"budget of 100 bytes .* --emb tt") as error:
        TT.for_budget(Budget(sizes, 16, 100))
    smallest = int(str(error.value).split("at least ")[1].split()[0])
    rank_one = build("tt", sizes, 16, rank=1).footprint()
    assert smallest == sum(part["weights"] for part in rank_one)
    assert TT.for_budget(Budget(sizes, 16, smallest)) == [{"rank": 1}] * 3
    with pytest.raises(ValueError, match=f"at least {smallest} bytes"):
        TT.for_budget(Budget(sizes, 16, smallest - 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0: set --tt.rank 32"),
        ({"d": 1}, "at least 2 cores, got d 1: set --tt.d 3"),
        ({"d": 10_000}, "at most 63 cores, got d 10000: set --tt.d 3"),
        ({"q": [4, 4]}, "q is .*it must have d = 3 factors.* --tt.q or --tt.d"),
        ({"q": [4, -2, -2]}, "q is .*factors of at least 1"),
        ({"q": [2, 2, 2]}, "product is 8; it must be the dim, 16: set --tt.q 2 2 4"),
        ({"p": [10, 100]}, "p is .*it must have d = 3 factors.* --tt.p or --tt.d"),
        ({"p": [9, 10, 11]}, "product is 990; .* rows of the table, 1000: set --tt.p 10 10 10"),
        ({"cache_rows": -1}, "cache_rows is -1: set --tt.cache_rows 0"),
        ({"cache_rows": 5, "cache_window": 0}, "cache_window is 0, it must be at least 1"),
        ({"cache_rows": 5, "cache_decay": 1.5}, "cache_decay is 1.5, it must be between 0 and 1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        build("tt", [1000, 10], 16, **options)


def test_print_tells_the_shape():
    text = str(build("tt", [1000], 16, rank=8))
    assert "ranks=[1, 8, 8, 1], q=[2, 2, 4], p=[(10, 10, 10)]" in text


def test_state_moves_between_groups():
    first, second = (build("tt", [300, 20], 8, rank=4) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.to_dense(0), second.to_dense(0))
    assert prod(first.p[0]) >= 300
    again = functional_call(second, dict(first.named_parameters()), (torch.tensor([[7], [3]]),))
    assert torch.equal(again, first(torch.tensor([[7], [3]])))


@pytest.mark.parametrize(("rows", "budget"), [(20_000, 900_000), (5_000, 250_000)])
def test_a_budget_counts_bonds_as_short_as_they_are_cut(rows, budget):
    (options,) = TT.for_budget(Budget([rows], 16, budget))
    sizes = [
        sum(TT([rows], 16, rank=options["rank"] + more).footprint()[0].values()) for more in (0, 1)
    ]
    assert sizes[0] <= budget < sizes[1]
