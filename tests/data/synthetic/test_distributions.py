"""Distributions of the columns, and the uniform numbers that they are drawn with."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm.data.synthetic.distributions import (
    SLOT_BITS,
    UNIFORM_BITS,
    Distribution,
    PermutedUniforms,
    invert,
    profiles,
)
from tests.kit import read_criteo

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT.parent / "shared/data/criteo_kaggle_137k.tsv.gz"
KAGGLE = profiles()["kaggle"]
CPU = torch.device("cpu")


def test_a_row_does_not_depend_on_its_block(kaggle):
    whole = kaggle.rows(1_000_000, 1_001_000)
    parts = [kaggle.rows(1_000_000, 1_000_007), kaggle.rows(1_000_007, 1_001_000)]
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    assert torch.equal(whole.bins, torch.cat([part.bins for part in parts]))
    assert torch.equal(whole.ids, torch.cat([part.ids for part in parts], dim=1))
    assert torch.equal(whole.dense, torch.cat([part.dense for part in parts], dim=1))
    assert torch.equal(whole.missing, torch.cat([part.missing for part in parts], dim=1))


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1000, 4096])
def test_streams_are_permutations(rows):
    uniforms = PermutedUniforms(rows, jitter=[False] * 3, seed=5, device=CPU)
    orders = uniforms.order(torch.arange(rows))
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(rows))
    if rows >= 97:
        ranks = torch.cat([torch.arange(rows)[None], orders]).double()
        correlation = torch.corrcoef(ranks) - torch.eye(4)
        assert correlation.abs().max() < 5 / rows**0.5


def test_streams_reach_beyond_32_bits():
    rows = 4_373_472_329
    uniforms = PermutedUniforms(rows, jitter=[False], seed=0, device=CPU)
    order = uniforms.order(torch.arange(rows - 10_000, rows))[0]
    assert 0 <= order.min() < rows // 100
    assert rows - rows // 100 < order.max() < rows
    assert len(order.unique()) == 10_000


def test_every_value_occurs_as_often_as_its_share_says():
    column = Distribution(name="C1", knots=(0, 1, 3, 1003), cdf=(0.0, 0.5, 0.75, 1.0))
    rows = 40_000
    uniforms = PermutedUniforms(rows, jitter=[False], seed=0, device=CPU)
    values = invert(column.quantiles()[None], uniforms.draw(torch.arange(rows)))
    counts = np.bincount(values[0], minlength=1003)
    assert len(counts) == 1003
    # A slot of the quantile table is the resolution of a share.
    np.testing.assert_allclose(counts[:3] / rows, [0.5, 0.125, 0.125], atol=2 ** (1 - SLOT_BITS))
    assert set(counts[3:]) <= set(range(7, 14))  # 10 each


def test_no_value_is_missed_that_deserves_a_row():
    """The tail of Kaggle's largest table at its full size: a row or two each."""
    column = KAGGLE.categorical[2]
    rows = round(KAGGLE.rows * (1 - column.missing))
    assert column.smallest_share * KAGGLE.rows >= 1
    step = (1 << UNIFORM_BITS) // KAGGLE.rows
    uniform = (torch.arange(rows - 1_000_000, rows) + KAGGLE.rows - rows) * step  # as drawn
    values = invert(column.quantiles()[None], uniform[None]).unique()
    assert values[-1] == column.values - 1
    assert len(values) > 0.99 * (column.values - values[0])


def test_rare_values_are_no_grid():
    column = Distribution(name="C1", knots=(0, 1_000_000), cdf=(0.0, 1.0))
    uniforms = PermutedUniforms(1000, jitter=[True], seed=0, device=CPU)
    values = invert(column.quantiles()[None], uniforms.draw(torch.arange(1000)))[0].sort().values
    assert torch.equal(values // 1000, torch.arange(1000))
    assert len((values % 1000).unique()) > 500


def test_missing_rates_and_columns_missing_together(kaggle, sample):
    for column, missing in zip(KAGGLE.dense, sample.missing, strict=True):
        assert missing.double().mean() == pytest.approx(column.missing, abs=0.005)
    masks = {
        column.name: ids == column.missing_rank
        for column, ids in zip(KAGGLE.categorical, sample.ids, strict=True)
        if column.missing
    }
    for column in KAGGLE.categorical:
        if column.missing:
            assert masks[column.name].double().mean() == pytest.approx(column.missing, abs=0.005)
            assert torch.equal(masks[column.name], masks[column.missing_group])
    assert not torch.equal(masks["C3"], masks["C19"])


@pytest.mark.parametrize("cardinality", [1, 2, 3, 100, 9_999, 10_131_227, 40_000_000])
def test_resized_law(cardinality):
    column = KAGGLE.categorical[2]
    resized = column.resized(cardinality, name="X")
    assert resized.cardinality == cardinality
    assert resized.cdf[0] == 0
    assert resized.cdf[-1] == 1
    assert np.all(np.diff(resized.knots) > 0)
    density = np.diff(resized.cdf) / np.diff(resized.knots)
    assert np.all(np.diff(density) <= 1e-12)
    assert not resized.missing or 0 <= resized.missing_rank < cardinality
    if cardinality >= 100:  # the head keeps its proportions
        original = np.diff(column.cdf)[:5] / column.cdf[1]
        np.testing.assert_allclose(np.diff(resized.cdf)[:5] / resized.cdf[1], original)
    last = resized.quantiles()[-2:]
    assert last[0] < cardinality << 12


def test_terabyte_tables_are_within_range(monkeypatch, generator):
    monkeypatch.setattr("dlrm.data.synthetic.generator.PILOT_ROWS", 1 << 12)
    profile = profiles()["terabyte"]
    made = generator(profile.rows, profile.categorical, profile.dense).rows(0, 20_000)
    for column, ids in zip(profile.categorical, made.ids, strict=True):
        assert ids.min() >= 0
        assert ids.max() < column.cardinality
    assert made.ids[0].max() > 30_000_000


@pytest.mark.skipif(not SAMPLE.exists(), reason="needs the real sample")
def test_fit_to_the_real_sample(sample):
    real = read_criteo(SAMPLE)
    for column, ids in zip(KAGGLE.categorical, sample.ids, strict=True):
        wanted = real[column.name].value_counts().to_numpy()
        made = np.sort(np.bincount(ids))[::-1]
        made = made[made > 0]
        assert len(made) == pytest.approx(len(wanted), rel=0.06, abs=8), column.name
        size = min(len(made), len(wanted))
        gap = np.abs(made[:size].cumsum() - wanted[:size].cumsum()).max() / len(real)
        assert gap < 0.02, column.name
    for column, values, missing in zip(KAGGLE.dense, sample.dense, sample.missing, strict=True):
        present = values[~missing]
        for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
            wanted = real[column.name].quantile(share)
            assert np.quantile(present, share) == pytest.approx(wanted, rel=0.06, abs=1), (
                column.name
            )
