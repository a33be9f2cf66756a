"""The cache of uncompressed rows of tensor-train tables."""

import copy

import pytest
import torch

from dlrm.embeddings import build
from dlrm.embeddings.common.hot_rows import RowCache
from dlrm.kernels.tt import tt_vectors

SIZES = [400, 30]


def make(**options):
    options = {"rank": 8, "cache_rows": 6, "cache_window": 500, **options}
    return build("tt", SIZES, 8, **options)


def use(group, *tables):
    """Look up a list of ids in each table, in training."""
    ids = [torch.tensor(table, dtype=torch.int64) for table in tables]
    offsets = torch.tensor([0, *(len(table) for table in ids)]).cumsum(0)
    return group(torch.cat(ids), offsets)


def cached_ids(group):
    """Cached rows as (table, id), by slot."""
    cache = group.cache
    out = {}
    for key, slot in zip(cache._keys.tolist(), cache._slots.tolist(), strict=True):
        if key != cache.empty:
            out[slot] = (0, key) if key < SIZES[0] else (1, key - SIZES[0])
    return out


def row(group, table, index):
    return group.rows(table, torch.tensor(index)).detach()


def test_nothing_is_cached_before_the_first_populate():
    group = make()
    plain = build("tt", SIZES, 8, rank=8)
    plain.load_state_dict(group.state_dict(), strict=False)
    for _ in range(3):
        torch.testing.assert_close(use(group, [1, 1, 2], [3]), use(plain, [1, 1, 2], [3]))
    assert cached_ids(group) == {}
    assert group.cache_stats() == {"hits": 0, "lookups": 12}


def test_counts_beyond_what_bf16_counts_to():
    group = make(cache_rows=1, cache_window=1000).bfloat16()
    use(group, [1] * 256 + [5] * 257, [3])
    group.cache_populate()
    assert list(cached_ids(group).values()) == [(0, 5)]
    assert group.cache.rows.dtype == torch.bfloat16


@pytest.mark.parametrize("seed", range(8))
def test_a_row_that_is_fitted_in_a_few_steps_leaves_the_cores_finite(seed):
    """What is left then is rounding; a step along it could be of any length."""
    torch.manual_seed(seed)
    group = build("tt", [3, 333, 2], 4, rank=4, cache_rows=1, cache_window=16)
    with torch.no_grad():
        use(group, [1] * 9, [7] * 9, [1] * 9)
        group.cache_populate()
        group.cache.rows[:1] += torch.randn(1, 4) / 10
        for _ in range(9):
            use(group, [2] * 9, [9] * 9, [0] * 9)
        report = group.cache_populate()
    assert report.evicted == 1
    assert report.residual < 1
    assert all(core.isfinite().all() for core in group.cores)


def test_the_most_used_rows_are_cached_and_start_from_the_cores():
    group = make(cache_rows=2)
    before = [group.to_dense(table) for table in range(2)]
    use(group, [1, 1, 1, 2, 2, 399], [3, 3, 3, 3, 29])
    report = group.cache_populate()
    assert sorted(cached_ids(group).values()) == [(0, 1), (1, 3)]
    assert (report.resident, report.admitted, report.evicted) == (2, 2, 0)
    assert report.lookups == 11
    assert report.hits == 0
    assert sorted(report.reset["cache.rows"].tolist()) == [0, 1]
    for table in range(2):
        torch.testing.assert_close(group.to_dense(table), before[table])


def test_a_hit_trains_the_cached_row_and_a_miss_the_cores():
    group = make()
    use(group, [5, 5], [0])
    group.cache_populate()
    use(group, [5, 5], [0]).sum().backward()
    assert all(core.grad is None or not core.grad.any() for core in group.cores)
    slots = {slot: 2.0 if owner == (0, 5) else 1.0 for slot, owner in cached_ids(group).items()}
    grad = group.cache.rows.grad.to_dense()
    for slot in range(len(grad)):
        assert (grad[slot] == slots.get(slot, 0.0)).all()
    group.zero_grad()
    use(group, [6], [1]).sum().backward()
    assert not group.cache.rows.grad.to_dense().any()
    assert all(core.grad.any() for core in group.cores)


def test_gradients_of_hits_and_misses_together():
    group = make().double()
    plain = build("tt", SIZES, 8, rank=8).double()
    plain.load_state_dict(group.state_dict(), strict=False)
    use(group, [5, 5, 9], [0])
    group.cache_populate()
    with torch.no_grad():
        group.cache.rows.normal_()
    out = use(group, [5, 6, 9, 7], [0, 0, 2])
    cached = group.cache.rows
    slots = {owner: slot for slot, owner in cached_ids(group).items()}
    first = cached[slots[0, 5]] + plain.rows(0, torch.tensor([6, 7])).sum(0)
    second = 2 * cached[slots[1, 0]] + plain.rows(1, torch.tensor(2))
    expected = torch.stack([first + cached[slots[0, 9]], second])[None]
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, [cached, *group.cores], upstream)
    wanted = torch.autograd.grad(expected, [cached, *plain.cores], upstream)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.to_dense(), b)


def test_rows_that_stay_keep_slot_value_and_optimizer_state():
    group = make(cache_rows=2)
    use(group, [1, 1, 1, 1, 2, 2], [0])
    group.cache_populate()
    before = cached_ids(group)
    with torch.no_grad():
        group.cache.rows[:2] += 1.0
    kept = row(group, 0, 1)
    use(group, [1], [7] * 9)
    report = group.cache_populate()
    after = cached_ids(group)
    assert sorted(after.values()) == [(0, 1), (1, 7)]
    stayed = next(slot for slot, owner in before.items() if owner == (0, 1))
    assert after[stayed] == (0, 1)
    assert torch.equal(row(group, 0, 1), kept)
    assert report.reset["cache.rows"].tolist() == [1 - stayed]


def test_evicted_rows_are_written_back_and_the_residual_is_correct():
    group = make(rank=16, cache_rows=4)
    use(group, [1, 2, 3, 4], [])
    group.cache_populate()
    with torch.no_grad():
        group.cache.rows[:4] += 0.02 * torch.randn(4, 8)
    trained = group.rows(0, torch.tensor([1, 2, 3, 4])).detach()
    rest = group.to_dense(0)[5:]
    use(group, [300, 300, 301, 301, 302, 302, 303, 303], [])
    report = group.cache_populate()
    assert (report.admitted, report.evicted) == (4, 4)
    got = group.rows(0, torch.tensor([1, 2, 3, 4])).detach()
    residual = ((got - trained).norm() / trained.norm()).item()
    assert report.residual == pytest.approx(residual, rel=1e-4)
    assert residual < 0.2
    drift = (group.to_dense(0)[5:] - rest).square().mean().sqrt()
    assert drift < 0.25 * (0.02)
    for index in (300, 301, 302, 303):  # new rows start from the cores, after the write-back
        ids = torch.tensor(index)
        product = tt_vectors(list(group.cores), group._shape, ids * 0, ids).detach()
        torch.testing.assert_close(row(group, 0, index), product)


def test_no_id_gets_the_row_of_another_after_many_populates():
    group = make(cache_rows=8, cache_decay=0.3)
    generator = torch.Generator().manual_seed(1)
    for turn in range(12):
        with torch.no_grad():  # every cached row is marked with its table and id
            for slot, (table, index) in cached_ids(group).items():
                group.cache.rows[slot] = 1000.0 * table + index
        hot = torch.randint(SIZES[0], (9,), generator=generator).tolist()
        marked = set(cached_ids(group).values())
        use(group, hot * 3, [turn % SIZES[1]] * 4)
        group.cache_populate()
        for slot, (table, index) in cached_ids(group).items():
            value = group.cache.rows[slot].detach()
            assert torch.equal(value, row(group, table, index))
            if (table, index) in marked:
                assert (value == 1000.0 * table + index).all()
            else:
                assert not (value == 1000.0 * table + index).all()
        assert len(set(cached_ids(group).values())) == len(cached_ids(group))
        assert not group.cache.rows[-1].any()


def test_a_row_is_not_replaced_by_one_used_as_often():
    group = make(cache_rows=1, cache_decay=1.0)
    use(group, [9, 9], [])
    group.cache_populate()
    use(group, [4, 4], [])
    assert group.cache_populate().evicted == 0
    use(group, [4, 4, 4], [])
    assert group.cache_populate().evicted == 1
    assert list(cached_ids(group).values()) == [(0, 4)]


def test_counts_decay():
    group = make(cache_rows=1, cache_decay=0.5)
    use(group, [9] * 40, [])
    for _ in range(4):
        group.cache_populate()
    use(group, [4] * 6, [])  # 40 / 2 ** 4 is 2.5
    group.cache_populate()
    assert list(cached_ids(group).values()) == [(0, 4)]


def test_only_training_counts():
    group = make().eval()
    use(group, [1, 2, 3], [4])
    group.train().rows(0, torch.tensor([8, 9]))
    group.to_dense(1)
    assert group.cache_stats() == {"hits": 0, "lookups": 0}
    report = group.cache_populate()
    assert (report.resident, report.admitted) == (0, 0)
    assert group.eval().cache_populate().resident == 0


def test_hit_rate_is_of_the_training_look_ups_since_the_last_populate():
    group = make()
    use(group, [1, 2], [])
    group.cache_populate()
    use(group, [1, 1, 2, 7], [9])
    assert group.cache_stats() == {"hits": 3, "lookups": 5}
    report = group.cache_populate()
    assert report.values()["hit_rate"] == 0.6
    assert "reset" not in report.values()
    assert all(isinstance(value, int | float) for value in report.values().values())
    assert group.cache_stats() == {"hits": 0, "lookups": 0}


def test_gradients_that_wait_for_an_optimizer_are_dropped():
    group = make(cache_rows=1)
    use(group, [1, 1], [])
    group.cache_populate()
    use(group, [1] * 5, []).sum().backward()
    use(group, [2] * 50, [])
    group.cache_populate()
    assert group.cache.rows.grad is None


def test_to_dense_sees_cached_rows_and_load_dense_empties_the_cache():
    group = make()
    use(group, [3, 3], [])
    group.cache_populate()
    with torch.no_grad():
        group.cache.rows.fill_(7.0)
    assert (group.to_dense(0)[3] == 7.0).all()
    weights = [torch.randn(rows, 8) for rows in SIZES]
    group.load_dense(weights)
    assert cached_ids(group) == {}
    assert not (group.to_dense(0) == 7.0).any()
    assert group.cache_populate().resident == 0


def test_saved_and_restored_into_a_fresh_group():
    first = make()
    use(first, [1, 1, 2, 2, 3, 399], [5, 5, 6])
    first.cache_populate()
    with torch.no_grad():
        first.cache.rows += torch.randn_like(first.cache.rows)
    use(first, [300, 300, 300, 1], [7])  # counts that no populate has seen yet
    second = make()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert cached_ids(second) == cached_ids(first)
    assert second.cache_stats() == first.cache_stats()
    for group in (first, second):
        use(group, [300, 20, 20], [7])
    reports = [group.cache_populate() for group in (first, second)]
    assert reports[0].values() == reports[1].values()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_footprint_counts_rows_keys_and_counters_and_nothing_grows_with_the_tables():
    group, large = make(), build("tt", [10**7, 10**6], 8, cache_rows=6, cache_window=500)
    state = sum(tensor.nbytes for tensor in group.state_dict().values())
    parts = group.footprint()
    assert sum(sum(part.values()) for part in parts) == state
    assert parts[0]["cache"] > parts[1]["cache"] > 0
    caches = [sum(part["cache"] for part in g.footprint()) for g in (group, large)]
    assert caches[0] == caches[1] == 7 * 32 + 6 * 8 + 6 * 8 + 500 * 4 + 8 + 16


def test_no_cache_has_nothing_to_populate():
    group = build("tt", SIZES, 8)
    assert group.cache_populate() is None
    assert group.cache_stats() == {}


def test_a_cache_larger_than_the_tables():
    group = make(cache_rows=10**4)
    use(group, list(range(SIZES[0])), list(range(SIZES[1])))
    assert group.cache_populate().resident == 430
    out = use(group, list(range(SIZES[0])), [])
    assert group.cache_stats() == {"hits": 400, "lookups": 400}
    out.sum().backward()


@pytest.mark.parametrize("shape", [(4, 3000), (12000,)])
def test_more_look_ups_than_the_window_are_sampled_evenly(shape):
    cache = RowCache(4, 2, 8, decay=1.0, window=1000, sparse=True)
    keys = torch.arange(4)[:, None].expand(4, 3000).reshape(shape)
    for part in (keys, keys[..., :1700], keys[..., :55]):
        cache.observe(part)
        if part is keys:
            counts = cache._ring.bincount(minlength=4)
            assert counts.float().std() < 0.05 * counts.float().mean()
    assert (cache._ring < 4).all()


def test_empty_batches_and_int32_ids():
    group = make()
    assert use(group, [], []).shape == (1, 2, 8)
    group(torch.zeros(2, 3, dtype=torch.int32))
    group.cache_populate()
    assert sorted(cached_ids(group).values()) == [(0, 0), (1, 0)]
    assert group(torch.zeros(2, 0, dtype=torch.int32)).shape == (0, 2, 8)


@pytest.mark.gpu
def test_cached_look_up_on_the_gpu_without_synchronisation():
    group = make().cuda()
    use_ids = torch.tensor([[1, 1, 2, 3], [4, 4, 5, 6]], device="cuda")
    group(use_ids)
    group.cache_populate()
    with torch.no_grad():
        group.cache.rows.normal_()
    expected = copy.deepcopy(group).cpu()
    ids = torch.tensor([[1, 7, 2, 1], [4, 4, 8, 6]], device="cuda")
    out = group(ids)
    close = {"rtol": 5e-3, "atol": 1e-3}  # the kernel may multiply in TF32
    torch.testing.assert_close(out.cpu(), expected(ids.cpu()), **close)
    out.sum().backward()
    expected(ids.cpu()).sum().backward()
    for (name, a), b in zip(group.named_parameters(), expected.parameters(), strict=True):
        got, wanted = (g.grad.to_dense()[:6].cpu() for g in (a, b))
        torch.testing.assert_close(got, wanted, msg=name, **close)
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = group.cache.find(ids)
        group.cache.look_up(slots)
        group.observe(group._tables[:, None], ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
