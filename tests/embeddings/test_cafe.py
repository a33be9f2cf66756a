"""Hot ids have rows of their own, all others share pieces."""

import pytest
import torch

from dlrm.embeddings.cafe import Cafe
from dlrm.embeddings.common.budget import Budget

SIZES = [5000, 300]


class Traffic:
    """Look-ups with log-uniform skew of ids that are numbered at random."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.names = [torch.randperm(rows, generator=self.generator) for rows in SIZES]

    def draw(self, batch=256):
        """Ids ``[2, batch]``."""
        random = torch.rand(2, batch, generator=self.generator)
        ranks = [(rows**r).long() - 1 for rows, r in zip(SIZES, random, strict=True)]
        return torch.stack([name[rank] for name, rank in zip(self.names, ranks, strict=True)])


def train(group, traffic, steps):
    for _ in range(steps):
        group(traffic.draw())
    return group


def have_rows(group, ids):
    """Which of ``ids [F, n]`` have a row of their own."""
    tables = torch.arange(len(ids))[:, None]
    return group.local_rows(tables, ids) >= group.num_shared[0]


def test_the_hottest_ids_get_rows_whatever_their_numbers():
    group, traffic = Cafe(SIZES, 8, rows=100, hot=0.3), Traffic()
    train(group, traffic, 1000)
    hot = torch.stack([name[:7] for name in traffic.names])
    assert have_rows(group, hot).float().mean() > 0.9
    before = group.id_counts()
    train(group, traffic, 20)
    found = group.id_counts()["found"] - before["found"]
    by_oracle = 0.5 * (torch.tensor([31.0]).log() * (1 / torch.tensor(SIZES).log())).sum()
    assert found / (20 * 512) > 0.85 * by_oracle


def test_what_is_hot_may_change():
    group, other = train(Cafe(SIZES, 8, rows=100, half_life=100), Traffic(), 300), Traffic(seed=1)
    train(group, other, 1500)
    assert have_rows(group, torch.stack([name[:5] for name in other.names])).all()


def test_rare_ids_do_not_drive_out_frequent_ones():
    group = Cafe([1_000_000], 8, rows=100)
    generator, hot = torch.Generator().manual_seed(0), torch.arange(20)
    for _ in range(600):
        rare = torch.randint(100, 1_000_000, (1, 1000), generator=generator)
        group(torch.cat([rare, hot[None]], 1))
    assert have_rows(group, hot[None]).all()


def test_tables_share_their_rows():
    group = Cafe([1000, 1000], 8, rows=40, hot=0.5)
    assert (group.num_slots, group.num_shared) == ((40,), (40,))
    ids = torch.stack([torch.arange(36), torch.zeros(36, dtype=torch.int64)])
    for _ in range(600):
        group(ids)
    assert have_rows(group, ids)[0].sum() > 30, "more than the 20 rows that it brought"
    assert have_rows(group, ids)[1].all()
    group.eval()
    assert not torch.equal(group.rows(0, ids[0, :1]), group.rows(1, ids[0, :1]))


def test_fitting_keeps_the_longest_rows():
    weights = [torch.randn(400, 8) * 0.01, torch.randn(50, 8) * 0.01]
    weights[0][[5, 111, 399]] += 10
    group = Cafe.from_dense(weights, rows=60, hot=0.2)
    torch.testing.assert_close(group.to_dense(0)[[5, 111, 399]], weights[0][[5, 111, 399]])
    own = have_rows(group, torch.arange(400).expand(2, -1))[0]
    assert own.sum() < 24
    assert group.to_dense(0)[~own].abs().max() < 1, "without those that left"
    loss = sum((group.to_dense(t) - w).square().sum() for t, w in enumerate(weights))
    assert loss < 0.9 * sum(w[w.abs().amax(1) < 1].square().sum() for w in weights)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
def test_a_budget_is_used_and_not_exceeded(dtype):
    budget = Budget([100_000, 3000, 7], 16, 60_000, dtype=dtype)
    found = Cafe.for_budget(budget)
    assert found[2] is None
    packed = None if dtype == "fp32" else dtype
    group = Cafe([100_000, 3000], 16, dtype=packed, **found[0])
    taken = sum(sum(table.values()) for table in group.footprint()) + 7 * budget.row_bytes
    assert 0.97 * budget.size < taken <= budget.size
