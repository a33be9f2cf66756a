import itertools

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.embeddings import available
from dlrm.embeddings.common.context import LookupContext
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.feature_order import group_tables
from dlrm.sparse_arch.table_plan import make_table_plan
from dlrm.training.prefetch import make_prefetcher

NAMES = ["a", "b", "c", "d"]
SIZES = [50, 4000, 7, 900]


def in_order(arch, vectors):
    return torch.cat(vectors, 1)[:, arch.feature_order.positions]  # [B, F, D]


def test_mixed_kinds_fill_their_own_slots():
    table_plan = [("hash", {"rows": 16}), ("dense", {}), ("hash", {"rows": 16}), ("dense", {})]
    arch = SparseArch(SIZES, 8, table_plan)
    assert arch.feature_order.groups == [[0, 2], [1, 3]]
    ids = torch.stack([torch.randint(0, rows, (5,)) for rows in SIZES])
    out = in_order(arch, arch(ids))
    assert out.shape == (5, 4, 8)
    for group, slots in arch.embeddings():
        for table, slot in enumerate(slots):
            torch.testing.assert_close(out[:, slot], group.rows(table, ids[slot]))
    by_group = arch.feature_order.by_group
    assert by_group.tolist() == [0, 2, 1, 3]
    same = arch(ids[by_group], context=LookupContext(grouped=True))
    assert torch.equal(in_order(arch, same), out)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_row_of_ids_for_each_table(rows):
    arch = SparseArch(SIZES, 8, [("hash", {}), *[("dense", {})] * 3])
    with pytest.raises(ValueError, match=r"ids have shape \(\d, 2\), they must be \[4, B\]: a row"):
        arch(torch.zeros(rows, 2, dtype=torch.long))


def test_tables_that_differ_in_an_option_per_table_make_one_group():
    table_plan = [("drop", {"keep": 3}), ("block", {"dim": 2, "keep": 9})]
    table_plan += [("drop", {"keep": 5}), ("block", {"dim": 3, "keep": 9})]
    assert group_tables(table_plan) == [
        ([0, 2], "drop", {"keep": [3, 5]}),
        ([1], "block", {"dim": 2, "keep": [9]}),
        ([3], "block", {"dim": 3, "keep": [9]}),
    ]
    arch = SparseArch(SIZES, 8, table_plan)
    assert [group.num_kept for group in arch.groups] == [(4, 6), (10,), (10,)]


def test_tables_of_equal_options_make_one_group_in_whatever_order_they_come():
    options = {"tt": {"rank": {"b": 2}, "cache_rows": 100}}
    found = make_table_plan(NAMES, [4000, 4000, 7, 4000], 8, "tt", options=options, budget="10x")
    assert [slots for slots, kind, _ in group_tables(found) if kind == "tt"] == [[0, 1, 3]]


def test_mixed_kinds_with_bags():
    table_plan = [("dense", {}), ("hash", {"rows": 3}), ("dense", {}), ("hash", {"rows": 3})]
    arch = SparseArch(SIZES, 4, table_plan)
    lengths = torch.tensor([2, 0, 1, 3, 0, 4, 1, 1])  # 4 tables, 2 samples
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(0, 7, (int(lengths.sum()),))
    out = in_order(arch, arch(ids, offsets))
    homes = {slot: (g, t) for g, slots in arch.embeddings() for t, slot in enumerate(slots)}
    for slot, (group, table) in homes.items():
        for sample in range(2):
            bag = slice(offsets[slot * 2 + sample], offsets[slot * 2 + sample + 1])
            expected = group.rows(table, ids[bag]).sum(0)
            torch.testing.assert_close(out[sample, slot], expected)


@pytest.mark.parametrize(("bounds", "reads"), [(None, 1), ((0, 2, 4, 6, 8), 0)])
def test_bags_are_read_on_the_host_once_a_batch_or_never(monkeypatch, bounds, reads):
    read = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read.append(1) or tolist(self))
    table_plan = [("dense", {}), ("hash", {"rows": 3}), ("qr", {}), ("hash", {"rows": 4})]
    offsets = torch.arange(4 * 2 + 1)
    SparseArch(SIZES, 4, table_plan)(torch.zeros(8, dtype=torch.long), offsets, bounds=bounds)
    assert len(read) == reads  # on a GPU the host waits for each


@pytest.mark.parametrize("plan", [["dense", "offload"] * 2, ["offload"] * 4])
def test_groups_that_fetch_ahead_hear_of_the_coming_batches(plan):
    arch = SparseArch(SIZES, 4, [(kind, {}) for kind in plan])
    optimizer = RowOptimizer(arch.parameters(), "sgd")
    prefetcher = make_prefetcher(arch)
    assert prefetcher.look_ahead(5) == 2 * arch.window_size(5 * 4) - 1
    assert arch.window_size(5 * 4) >= 1
    batches = [
        Batch(
            torch.zeros(1, 5),
            torch.stack([torch.randint(0, rows, (5,)) for rows in SIZES]),
            torch.zeros(5),
        )
        for _ in range(4)
    ]
    arch.cache_stats()
    assert not arch.rows_ready
    for batch, following in itertools.pairwise(batches):
        arch.begin_window([batch], [following])
        assert arch.rows_ready
        vectors = arch(batch.ids, context=LookupContext(rows_fetched=True))
        sum(each.sum() for each in vectors).backward()
        offload = next(group for group, _ in arch.embeddings() if group.kind() == "offload")
        slots = [slot for slot, kind in enumerate(plan) if kind == "offload"]
        rows = following.ids[slots] + offload._offsets[:, None]
        assert (offload.cached.slots[rows] >= 0).all()
        optimizer.step()
        optimizer.zero_grad()
    stats = arch.cache_stats()
    assert stats["cache/MB_in_per_step"] > 0
    dense = SparseArch(SIZES, 4, [("dense", {})] * 4)
    prefetcher = make_prefetcher(dense)
    assert (prefetcher.look_ahead(1), dense.window_size(1), dense.rows_ready) == (0, 0, True)


SHARES = [("dense", {}), ("shared", {"with": 2}), (None, {}), ("shared", {"with": 2})]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", sorted(available()))
def test_features_that_share_a_table_look_up_its_rows(kind, mode):
    """Of any kind, one-hot and in bags; their gradients meet in the one table."""
    plan = [(own or kind, {"mode": mode} | options if own != "shared" else options)
            for own, options in SHARES]  # fmt: skip
    sizes, batch = [50, 300, 300, 300], 6
    arch = SparseArch(sizes, 8, plan).eval()  # some kinds give rows to ids in training
    parts = {slot: (group, t) for group, s in arch.embeddings() for t, slot in enumerate(s)}
    assert sorted(parts) == [0, 2]
    home = [parts[slot] for slot in (0, 2, 2, 2)]

    ids = torch.stack([torch.randint(0, rows, (batch,)) for rows in sizes])
    rows = torch.stack([g.rows(t, own) for (g, t), own in zip(home, ids, strict=True)], 1)
    out = in_order(arch, arch(ids))
    torch.testing.assert_close(out, rows)
    grouped = arch(ids[arch.feature_order.by_group], context=LookupContext(grouped=True))
    assert torch.equal(in_order(arch, grouped), out)

    lengths = torch.randint(0, 4, (4, batch))
    bags = [torch.randint(0, sizes[f], (int(n),)) for f in range(4) for n in lengths[f]]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)])
    pool = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[mode]
    expected = torch.zeros(4, batch, 8)
    for number, bag in enumerate(bags):
        group, table = home[number // batch]
        if len(bag):
            expected[number // batch, number % batch] = pool(group.rows(table, bag), 0)
    found = in_order(arch, arch(torch.cat(bags), offsets))
    torch.testing.assert_close(found, expected.transpose(0, 1))

    if kind == "dense":
        (3 * out[:, 1] + out[:, 3]).sum().backward()
        grad = home[1][0].weight.grad.to_dense()[-300:]
        counted = 3 * torch.bincount(ids[1], minlength=300) + torch.bincount(ids[3], minlength=300)
        torch.testing.assert_close(grad, counted[:, None].float().expand(300, 8))


def test_a_shared_table_counts_once():
    plan = [(kind or "dense", options) for kind, options in SHARES]
    arch = SparseArch([50, 300, 300, 300], 8, plan)
    assert arch.sizes() == {"weights_bytes": 350 * 32, "bytes": 350 * 32, "compression": 1}
    tables = arch.to_dense()
    assert [len(table) for table in tables] == [50, 300, 300, 300]
    assert torch.equal(tables[1], tables[2])
    arch.load_dense([table + 1 for table in tables])
    torch.testing.assert_close(arch.to_dense()[3], tables[2] + 1)
    with pytest.raises(ValueError, match="features 2 and 1 share a table, but have 300 and 299 id"):
        SparseArch([50, 299, 300, 300], 8, plan)
    with pytest.raises(ValueError, match="feature 1 shares the table of 3, which has none"):
        SparseArch([9] * 4, 8, [plan[0], ("shared", {"with": 3}), plan[2], plan[3]])
