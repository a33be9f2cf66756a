from operator import add, mul

import pytest
import torch

from dlrm.embeddings import qr as qr_module
from dlrm.embeddings.qr import QR

every_operation = pytest.mark.parametrize("operation", ["multiply", "add", "concat"])


@every_operation
def test_a_row_is_composed_of_quotient_and_remainder(operation):
    group = QR([3, 25], 6, collisions=4, operation=operation)
    ids = torch.arange(25)
    q, r = group.quotient[1 + ids // 4], group.remainder[3 + ids % 4]
    assert len(group.quotient) == 1 + 7
    assert len(group.remainder) == 3 + 4
    compose = {"multiply": mul, "add": add, "concat": lambda *both: torch.cat(both, 1)}
    torch.testing.assert_close(group.rows(1, ids), compose[operation](q, r))


@every_operation
def test_no_two_ids_have_the_same_row(operation):
    rows = QR([997], 6, collisions=31, operation=operation).to_dense()
    assert len(rows.unique(dim=0)) == 997


def test_concat_shares_an_odd_dim_out():
    group = QR([25], 7, collisions=4, operation="concat")
    assert group.quotient.shape == (7, 4)
    assert group.remainder.shape == (4, 3)


@every_operation
@pytest.mark.parametrize("collisions", [2, 30, 1000])
def test_rows_start_as_wide_as_dense_ones_and_train_as_fast(operation, collisions):
    tables = 32
    group = QR([30_000] * tables, 16, collisions=collisions, operation=operation)
    rows = torch.stack([group.to_dense(table) for table in range(tables)])
    assert rows.std() * (3 * 30_000) ** 0.5 == pytest.approx(1, rel=0.03)
    out = group(torch.arange(0, 30_000, collisions).expand(tables, -1))
    out.backward(torch.randn_like(out))
    assert group.quotient.grad.to_dense().std() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("collisions", [2**31, 10**12, 10**20])
def test_ids_of_32_bits_bear_more_collisions(collisions):
    group = QR([1000, 5], 4, collisions=collisions)
    ids = torch.tensor([[1, 999], [3, 4]], dtype=torch.int32)
    rows = torch.stack([group.rows(table, ids[table]) for table in range(2)], 1)
    torch.testing.assert_close(group(ids), rows)


def cells(rows, collisions):
    """Quotient and remainder of every id as matrices of 0 and 1, ``[V, Q]`` and ``[V, R]``."""
    ids = torch.arange(rows)
    one_hot = torch.nn.functional.one_hot
    return one_hot(ids // collisions).double(), one_hot(ids % collisions).double()


def frequencies(rows):
    """How often ids occur, by Zipf's law."""
    return 1 / torch.arange(1, rows + 1, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("rows", [24, 25, 5, 2])
def test_the_best_fit_of_add_is_least_squares(rows):
    weight = torch.randn(rows, 3, dtype=torch.float64)
    design, root = torch.cat(cells(rows, 4), 1), frequencies(rows).sqrt()
    expected = design @ (torch.linalg.pinv(root * design) @ (root * weight))
    group = QR([rows], 3, collisions=4, operation="add").double()
    group.load_dense([weight])
    torch.testing.assert_close(group.rows(0, torch.arange(rows)), expected)


@pytest.mark.parametrize("rows", [24, 25])
def test_the_best_fit_of_concat_is_the_means(rows):
    weight = torch.randn(rows, 4, dtype=torch.float64)
    q, r = cells(rows, 4)
    often = frequencies(rows)
    expected = [x @ ((often * x).T @ weight / (often * x).sum(0)[:, None]) for x in (q, r)]
    group = QR([rows], 4, collisions=4, operation="concat").double()
    group.load_dense([weight])
    expected = torch.cat([expected[0][:, :2], expected[1][:, 2:]], 1)
    torch.testing.assert_close(group.rows(0, torch.arange(rows)), expected)


def test_the_best_fit_of_multiply_is_of_rank_one_per_column(monkeypatch):
    monkeypatch.setattr(qr_module, "ITERATIONS", 2000)
    weight = torch.randn(96, 3, dtype=torch.float64)
    group = QR([96], 3, collisions=4).double()
    group.load_dense([weight])
    for factor in (group.quotient, group.remainder):  # no direction is better
        factor.requires_grad_()
    left = (group.rows(0, torch.arange(96)) - weight).square() * frequencies(96)
    slopes = torch.autograd.grad(left.sum(), [group.quotient, group.remainder])
    assert max(slope.to_dense().abs().max() for slope in slopes) < 1e-4
    assert left.sum() < 0.7 * (frequencies(96) * weight.square()).sum()


def test_frequent_ids_are_fitted_best():
    weight = torch.randn(400, 8)
    for operation in ("multiply", "add"):
        group = QR.from_dense([weight], collisions=4, operation=operation)
        wrong = (group.to_dense() - weight).square().mean(1)
        assert wrong[:4].mean() < 0.7 * wrong[4:].mean()


def test_gradients_of_one_lookup_have_rows_of_their_own_length(device):
    """PyTorch takes the stride of their values for it, and adds so much to a row of the table."""
    group = QR([9], 33, collisions=3, operation="concat").to(device)
    group(torch.tensor([[2]], device=device)).sum().backward()
    assert group.quotient.grad._values().stride() == (17, 1)
    assert group.remainder.grad._values().stride() == (16, 1)
