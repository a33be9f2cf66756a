"""Row updates and look-ups through a cache, by the kernels: the bits of those without one."""

import copy
import itertools
import pickle
from dataclasses import replace

import pytest
import torch

from dlrm.kernels.lookup.pool import lookup_bags
from dlrm.kernels.lookup.tables import TableRows, lookup
from dlrm.kernels.offload import admission, row_cache, transfer
from dlrm.kernels.offload.pinned_memory import mapped_tensor, on_host
from dlrm.kernels.offload.row_cache import (
    CachedPackedParameter,
    CachedParameter,
    slots_that_fit,
)
from dlrm.kernels.update import sparse
from dlrm.kernels.update.packed import PackedParameter, PackedRows, stored_rows
from dlrm.kernels.update.rules import RULES, make_rule
from dlrm.kernels.update.sparse import update_rows
from dlrm.utils.bags import Bags
from dlrm.utils.streams import side_stream_of
from tests.kit import combinations

ROWS, DIM = 60, 3
SMALL = {
    sparse: {"TILE": 1},
    admission: {"BLOCK": 32, "PAGE": 64},
    transfer: {"MOVERS": 3, "ROWS": 8},
}


def in_host_memory(value, device):
    """The same values in host memory, as a tensor of the device."""
    if device.type == "cpu":
        return value.clone()
    return mapped_tensor(value.shape, value.dtype, device)[1].copy_(value)


def look_up(cached, rows, *, training):
    """The rows ``[n]`` of a look-up of no window, ``[n, D]``."""
    cached.prepare(rows[None], training=training)
    return lookup(cached, rows[None])[0]


def make(device, capacity, rule, dtype=torch.float32):
    """A table, and the same rows behind a cache, each with the states of a rule."""
    rule, values = make_rule(rule), torch.randn(ROWS, DIM, device=device)
    if dtype == "int8":
        packed = PackedRows.empty(ROWS, DIM, ROWS, device)
        packed.write(torch.arange(ROWS, device=device), values)
        there = replace(packed, data=in_host_memory(packed.data, device))
        value = PackedParameter(packed)
        weight = CachedPackedParameter(there, False, capacity, half_life=3)
    else:
        value = values.to(dtype)
        weight = CachedParameter(in_host_memory(value, device), False, capacity, half_life=3)
    cached = weight.cached
    cached.impl = "triton"
    cached.start()
    widths = [1 if per_row else DIM for per_row in rule.states.values()]
    states = [torch.zeros(ROWS, width, device=device) for width in widths]
    return rule, value, states, cached, [cached.new_rows(width, torch.float32) for width in widths]


class Both:
    """Updates of both tables, which must stay equal."""

    def __init__(self, device, made, *, impl=None):
        self.rule, self.value, self.states, self.cached, self.cached_states = made
        self.lr, self.impl = torch.tensor(0.1, device=device), impl
        self.seeds = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]

    def update(self, rows, grads):
        options = {"lr": self.lr, "impl": self.impl}
        both = (self.value, self.states, None), (
            self.cached.weight, self.cached_states, self.cached.cached_slots,
        )  # fmt: skip
        for (weight, states, slots), seed in zip(both, self.seeds, strict=True):
            update_rows(self.rule, weight, rows, grads, states, cached=slots, seed=seed, **options)

    def assert_equal(self):
        self.cached.flush()
        mine = [stored_rows(self.cached.weight), *self.cached_states]
        assert all(map(torch.equal, mine, [stored_rows(self.value), *self.states]))


@pytest.mark.parametrize(
    ("rule", "capacity", "dtype"),
    [
        *(("adagrad", 7, torch.float32), ("adam", 0, torch.float32), ("adam", ROWS, torch.float32)),
        *(("rowwise_adagrad", 7, "int8"), ("adam", 7, "int8")),
        *(
            pytest.param(rule, 7, torch.float32, marks=pytest.mark.slow)
            for rule in RULES
            if rule != "adagrad"
        ),
    ],
)
def test_updates_equal_those_without_a_cache(device, rule, capacity, dtype):
    both = Both(device, make(device, capacity, rule, dtype), impl="triton")
    for index in range(4 if device.type == "cuda" else 3):
        rows = (torch.rand(20, device=device) ** 2 * ROWS).long()
        found = look_up(both.cached, rows, training=True)
        assert torch.equal(found, lookup(both.value, rows, impl="triton")), index
        both.update(rows, torch.randn(20, DIM, device=device))
    assert both.cached.slots.ge(0).sum() >= min(capacity, 20)
    both.assert_equal()


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_bags_pool_the_cached_values(device, mode):
    _, value, _, cached, _ = make(device, 20, "sgd")
    rows = torch.arange(30, device=device)
    look_up(cached, rows[:15], training=True)
    cached.tensors[0][1].add_(1.0)
    cached_now = cached.slots >= 0
    assert 10 < cached_now.sum() <= 15
    value[cached_now] += 1.0
    bags = Bags(rows, torch.tensor([0, 4, 4, 21, 30], device=device))
    tables = TableRows(torch.zeros(1, dtype=torch.int64, device=device))
    expected = lookup_bags(value, tables, bags, mode=mode, impl="torch")
    found = lookup_bags(cached, tables, bags, mode=mode)
    torch.testing.assert_close(found, expected)


def delay(device):
    """On a GPU, hold up the stream that moves rows by about a millisecond."""
    if device.type == "cuda":
        with side_stream_of(device, "rows").fork(wait=False):
            torch.cuda._sleep(2_000_000)


@combinations(rule=["adagrad", "rowwise_adagrad", "adam"], capacity=[20, 60])
def test_moves_during_the_step_change_nothing(device, rule, capacity):
    made = make(device, capacity, rule, torch.bfloat16 if rule == "adam" else torch.float32)
    both, cached = Both(device, made), made[3]
    rounds = 301 if device.type == "cuda" else 15
    batches = [(torch.rand(50, device=device) ** 2 * ROWS).long() for _ in range(rounds)]

    for index, (rows, coming) in enumerate(itertools.pairwise(batches)):
        announced = index % 7 not in (0, 5)
        if not announced:
            rows = (torch.rand(50, device=device) ** 2 * ROWS).long()

        if index % 3 == 0:
            delay(device)
        before = cached.index.slot_to_row.clone()
        cached.begin_window(None if announced else (rows[None], None), (coming[None], None))
        if announced and device.type == "cpu":  # rows in use stay where they are
            used = torch.isin(before, rows)
            assert torch.equal(cached.index.slot_to_row[used], before[used])
        assert torch.equal(lookup(cached, rows), both.value[rows])
        both.update(rows, torch.randn(50, DIM, device=device))

        if index % 7 == 3:  # an evaluation
            every = torch.arange(ROWS, device=device)
            assert torch.equal(look_up(cached, every, training=False), both.value)

    moved = cached.index.traffic[2:4].tolist()
    assert moved[0] > moved[1] if capacity == ROWS else moved[1] > len(batches)
    both.assert_equal()


@pytest.mark.parametrize("then", ["flush", "release", "stop", "look up", "train"])
def test_whoever_wants_the_table_waits_for_rows_on_their_way(device, then):
    made = make(device, 20, "sgd")
    both, cached, value = Both(device, made), made[3], made[1]
    rows = torch.arange(40, device=device).view(4, 10)
    for index, used in enumerate(rows[:3]):
        delay(device)
        cached.begin_window(None if index else (used[None], None), (rows[index + 1][None], None))
        both.update(used, torch.ones(10, DIM, device=device))
    if then == "look up":
        assert torch.equal(look_up(cached, rows.view(-1), training=False), value[:40])
    elif then == "train":  # with rows that just left, and were not announced
        cached.begin_window((rows[1:2], None), None)
        assert torch.equal(lookup(cached, rows[1]), value[rows[1]])
    else:
        weight = cached.weight
        getattr(cached, then)()
        assert torch.equal(weight, value)


def test_rows_move_in_order_of_their_pages(device, monkeypatch):
    moved = []
    exchange = transfer.exchange_rows
    monkeypatch.setattr(admission, "PAGE", 64)  # five rows of 12 bytes: pages of four are counted
    monkeypatch.setattr(
        admission,
        "exchange_rows",
        lambda tensors, moves, **how: [moved.append(moves), exchange(tensors, moves, **how)],
    )
    _, _, _, cached, _ = make(device, 20, "sgd")
    for rows in torch.randperm(ROWS, device=device).view(3, 20):
        look_up(cached, rows, training=True)
    for index, moves in enumerate(moved):
        assert moves.counters.tolist() == [20, 20, 20, 20 * (index > 0)]
        lists = [moves.missing[:20], *[moves.leaving[:20]] * (index > 0)]
        for listed in lists:
            assert len(listed.unique()) == 20
            assert ((listed // 4).diff() >= 0).all()
        assert sorted(moves.targets[:20].tolist()) == list(range(20))


def test_an_empty_cache_takes_all_rows_of_a_window(device):
    _, _, _, cached, _ = make(device, ROWS, "sgd")
    look_up(cached, torch.arange(ROWS, device=device), training=True)
    assert (cached.slots >= 0).all()


@pytest.mark.gpu
def test_a_cache_may_be_dropped_while_rows_are_on_their_way(device):
    _, _, _, cached, states = make(device, 40, "adagrad")
    size = cached.tensors[1][1].shape
    delay(device)
    cached.begin_window(None, (torch.arange(40, device=device)[None], None))
    del cached
    new = [torch.zeros(size, device=device) for _ in range(20)]  # in the same memory, if it is free
    torch.cuda.synchronize()
    assert not any(map(torch.any, new))
    del states


def test_memory_of_the_host_is_seen_from_both_sides(device):
    there = in_host_memory(torch.arange(12.0).view(3, 4), device)
    here = on_host(there[1:])
    assert not here.is_cuda
    assert here.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    here[1, 2] = -1
    assert there.tolist()[2] == [8, 9, -1, 11]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
def test_a_copy_of_a_parameter_has_a_cache_of_its_own(copied):
    weight = CachedParameter(torch.arange(6.0).view(3, 2), capacity=1, half_life=7)
    weight.cached.start()
    twin, same = copied([weight, weight])
    assert isinstance(twin, CachedParameter)
    assert twin is same is not weight
    assert twin.cached is not weight.cached
    assert (*twin.cached.settings, twin.cached.active) == (1, 7, False)
    assert torch.equal(twin, weight)
    assert twin.requires_grad
    assert twin.data_ptr() != weight.data_ptr()
    assert not copied(weight.requires_grad_(False)).requires_grad


def test_a_cache_leaves_half_of_the_free_memory_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))
    assert slots_that_fit(16, torch.device("cuda")) == 500_000 // (3 * 64)
    assert slots_that_fit(10**6, torch.device("cuda")) == 1
    assert slots_that_fit(16, torch.device("cpu")) > 10**9

    monkeypatch.setattr(row_cache, "slots_that_fit", lambda dim, device: 7)
    cached = CachedParameter(torch.randn(ROWS, DIM), capacity=20).cached
    cached.start()
    state = cached.new_rows(DIM, torch.float32)
    assert cached.nbytes()[0] == 2 * 7 * DIM * 4

    # As many more rows than slots as before: results do not depend on the cache.
    cached.prepare(torch.arange(ROWS)[None], training=True)
    assert torch.equal(lookup(cached, torch.arange(ROWS)[None])[0], cached.weights[0])
    assert state.shape == (ROWS, DIM)
