"""Whole tensor trains: mean squares, the TT-SVD, the fit of given rows."""

from math import prod

import pytest
import torch

from dlrm.embeddings.common import tt_svd
from dlrm.embeddings.tt import TT
from dlrm.kernels.tt import TTShape
from tests.kit import train_product

SHAPES = [
    ((5, 7), (2, 3), (1, 4, 1)),
    ((3, 5, 4), (2, 1, 3), (1, 2, 5, 1)),
    ((3, 2, 4, 3), (2, 2, 1, 3), (1, 3, 2, 4, 1)),
]
every_shape = pytest.mark.parametrize(("p", "q", "ranks"), SHAPES)


def make_cores(p, q, ranks):
    return [
        torch.randn(p[k], ranks[k], q[k], ranks[k + 1], dtype=torch.float64) for k in range(len(p))
    ]


@every_shape
def test_grams_and_mean_square_are_those_of_the_dense_table(p, q, ranks):
    cores = make_cores(p, q, ranks)
    table = train_product(cores)
    assert tt_svd.mean_square(cores) == pytest.approx(table.square().mean().item())
    left, right = tt_svd.left_grams(cores), tt_svd.right_grams(cores)
    for k in range(len(p) + 1):  # every bond sees the same sum of squares
        assert (left[k] * right[k]).sum().item() == pytest.approx(table.square().sum().item())


@every_shape
def test_svd_recovers_a_train_of_its_own_ranks(p, q, ranks):
    table = train_product(make_cores(p, q, ranks))
    cores = tt_svd.tt_svd(table, p, q, ranks)
    assert [tuple(core.shape) for core in cores] == [
        (p[k], ranks[k], q[k], ranks[k + 1]) for k in range(len(p))
    ]
    torch.testing.assert_close(train_product(cores), table)


@every_shape
def test_svd_error_is_within_the_bound_and_falls_with_the_rank(p, q, ranks):
    table = torch.randn(prod(p) - 1, prod(q), dtype=torch.float64)
    errors = []
    for rank in (1, 2, 4, 8, 200):
        clipped = (1, *[rank] * (len(p) - 1), 1)
        cores = tt_svd.tt_svd(table, p, q, clipped)
        errors.append((train_product(cores)[: len(table)] - table).norm().item())
        deviations = torch.stack([core.square().mean() for core in cores])
        torch.testing.assert_close(deviations, deviations[:1].expand_as(deviations))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < table.norm().item()
    assert errors[-1] < 1e-10 * table.norm().item()
    if len(p) == 2:  # one SVD, hence the best there is
        unfolded = torch.zeros(prod(p), prod(q), dtype=torch.float64)
        unfolded[: len(table)] = table
        unfolded = unfolded.view(*p, *q).permute(0, 2, 1, 3).reshape(p[0] * q[0], -1)
        best = torch.linalg.svdvals(unfolded)[4:].norm().item()
        cores = tt_svd.tt_svd(table, p, q, ranks)
        error = train_product(cores)
        error[: len(table)] -= table
        assert error.norm().item() == pytest.approx(best)


def test_svd_of_long_sides_is_randomized_and_nearly_as_good(monkeypatch):
    p, q, rank = (30, 40), (2, 3), 6
    spectrum = torch.logspace(0, -3, 60, dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(120, 60, dtype=torch.float64)).Q
    unfolded = (left * spectrum) @ right.T
    table = unfolded.view(p[0], q[0], p[1], q[1]).permute(0, 2, 1, 3).reshape(1200, 6)
    monkeypatch.setattr(tt_svd, "MAX_EXACT_SIDE", 10)
    cores = tt_svd.tt_svd(table, p, q, (1, rank, 1))
    assert (train_product(cores) - table).norm() < 1.01 * spectrum[rank:].norm()


def test_svd_of_zeros():
    cores = tt_svd.tt_svd(torch.zeros(20, 4), (4, 5), (2, 2), (1, 3, 1))
    assert all(torch.isfinite(core).all() for core in cores)
    assert train_product([core.double() for core in cores]).abs().max() == 0


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("chunk", [2, 8192])
def test_fit_meets_rows_of_several_tables_and_leaves_the_others(d, chunk, monkeypatch):
    monkeypatch.setattr(tt_svd, "FIT_CHUNK", chunk)
    group = TT([3000, 500], 8, rank=16, d=d)
    tables, ids = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 77, 2999, 3, 499])
    wanted = group.vectors(tables, ids) + 0.01 * torch.randn(5, 8)
    before = [group.to_dense(table) for table in range(2)]
    shape = TTShape(group._p, group.q, group.ranks)
    residual = tt_svd.fit_rows(list(group.cores), shape, tables, ids, wanted)
    got = group.vectors(tables, ids)
    assert residual == pytest.approx(((got - wanted).norm() / wanted.norm()).item(), rel=1e-4)
    assert residual < 0.1
    for table in range(2):
        others = torch.ones(group.num_embeddings[table], dtype=torch.bool)
        others[ids[tables == table]] = False
        change = group.to_dense(table)[others] - before[table][others]
        moved = (wanted - before[table].mean())[tables == table].square().mean().sqrt()
        assert change.square().mean().sqrt() < 0.25 * moved


def test_fits_of_rows_are_equal_to_the_bit(device):
    """Of several processes each fits its replica."""
    group = TT([30_000, 5000], 8, rank=16).to(device)
    tables = torch.tensor([0, 1], device=device).repeat_interleave(400)
    ids = torch.cat([torch.randperm(rows)[:400] for rows in (30_000, 5000)]).to(device)
    wanted = group.vectors(tables, ids).detach() + 0.01 * torch.randn(800, 8, device=device)
    fits = []
    for _ in range(4):
        cores = [core.detach().clone() for core in group.cores]
        shape = TTShape(group._p, group.q, group.ranks)
        tt_svd.fit_rows(cores, shape, tables, ids, wanted)
        fits.append(cores)
    for fit in fits[1:]:
        assert all(torch.equal(a, b) for a, b in zip(fits[0], fit, strict=True))


def test_the_drift_is_the_mean_squared_change_of_the_table():
    group = TT([60], 8, rank=3, p=[3, 4, 5]).double()
    tables = torch.zeros(7, dtype=torch.int64)
    cores, k = list(group.cores), 1
    shape = TTShape(group._p, group.q, group.ranks)
    gradient = tt_svd._drift_gradient(cores, shape, tables, k)
    change = torch.randn_like(cores[k])
    before = group.vectors(group._tables[0], torch.arange(60))
    with torch.no_grad():
        cores[k].add_(change)
    after = group.vectors(group._tables[0], torch.arange(60))
    drift = 7 * tt_svd.DRIFT_WEIGHT * (after - before).square().sum(1).mean()
    assert (change * gradient(change)).sum().item() == pytest.approx(drift.item())
