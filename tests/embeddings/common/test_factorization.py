"""Factors of rows and dims."""

from math import prod

import pytest

from dlrm.embeddings.common.factorization import factorize_dim, factorize_rows


@pytest.mark.parametrize("d", [2, 3, 4])
def test_rows_are_covered_by_balanced_factors(d):
    for rows in (*range(1, 200), 997, 7919, 99999989, 10**8, 40000000, 2**31):
        p = factorize_rows(rows, d)
        assert len(p) == d, rows
        assert list(p) == sorted(p), rows
        assert prod(p) >= rows
        assert p[-1] <= 2 * p[0], rows
        if rows >= 10**d:
            assert prod(p) <= 1.25 * rows


def test_rows_are_rounded_up_to_few_more():
    assert factorize_rows(11_000_000, 3) == (200, 220, 250)
    assert factorize_rows(1, 1) == (1,)
    assert 997 <= factorize_rows(997, 1)[0] <= 1000


@pytest.mark.parametrize(
    ("dim", "q"),
    [
        (16, (2, 2, 4)),
        (64, (4, 4, 4)),
        (128, (4, 4, 8)),
        (7, (1, 1, 7)),
        (1, (1, 1, 1)),
        (12, (2, 2, 3)),
        (10, (1, 2, 5)),
        (16, (4, 4)),
        (64, (2, 2, 4, 4)),
    ],
)
def test_dims_are_factorised_exactly(dim, q):
    assert factorize_dim(dim, len(q)) == q


@pytest.mark.parametrize(("rows", "d"), [(0, 3), (10, 0)])
def test_nothing_to_factorise(rows, d):
    with pytest.raises(ValueError, match=f"must be at least 1, got {rows} and {d}"):
        factorize_rows(rows, d)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_a_number_of_rows_that_no_memory_holds_takes_no_time(d):
    for rows in (2**32 + 1, 2**62, 2**63 - 1):
        p = factorize_rows(rows, d)
        assert rows <= prod(p) <= 1.25 * rows
        assert p[-1] <= p[0] + 1
    with pytest.raises(ValueError, match="the dim is 1000000000000000000, it can be factorized up"):
        factorize_dim(10**18, d)
