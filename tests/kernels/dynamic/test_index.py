"""An index of ids against a plain Python dictionary, and the kernels against PyTorch."""

import random

import pytest
import torch

from dlrm.kernels.dynamic.index import find_rows, place
from dlrm.kernels.dynamic.reference import buckets_of, find_torch, place_torch
from dlrm.kernels.dynamic.scores import Eviction
from dlrm.kernels.dynamic.slot_index import (
    EMPTY,
    LANES,
    NAMES,
    ROUNDS,
    Admission,
    SlotIndex,
    begin_step,
)

EDGES = [0, 1, -1, 2**63 - 1, -(2**63), EMPTY, 2**32, -(2**32)]


WORD = 2**64
FIRST, SECOND = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
GOLDEN, SEED = 0x9E3779B97F4A7C15, 0x5851F42D4C957F2D


def mixed(value):
    """The hash of an integer, from 0 to 2^64 - 1."""
    for factor in (FIRST, SECOND):
        value = (value ^ value % WORD >> 33) * factor % WORD
    return value ^ value >> 33


def with_hash(value):
    """The id of 64 bits with this hash."""
    for factor in (SECOND, FIRST):
        value = (value ^ value >> 33) * pow(factor, -1, WORD) % WORD
    value ^= value >> 33
    return value - WORD if value >= WORD // 2 else value


class Oracle:
    """What an index is meant to do, id by id, in plain Python."""

    def __init__(self, index):
        self.eviction, self.admission = index.eviction, index.admission
        self.sketch = [0] * len(index.sketch)
        self.absent = set((index.scores < 0).nonzero()[:, 0].tolist())  # beyond the last slots
        self.slots = {}  # table, id: slot
        self.owners = {}  # slot: table, id
        self.uses = {}  # slot: for lfu the period of the last step, and the number of steps
        self.last = {}  # slot: the clock at the last step that used it
        self.tags = {}  # slot: the last step that used it, modulo 255
        self.step, self.counts = 0, dict.fromkeys(NAMES, 0)

    def touch(self, slot, clock):
        period = self.step // self.eviction.half_life
        before, number = self.uses.get(slot, (period, 0))
        if self.tags.get(slot) != self.step % 255:
            number = min((number >> min(period - before, 15)) + 1, 1023)
            self.uses[slot], self.last[slot] = (period, number), clock
        self.tags[slot] = self.step % 255

    def order(self, slot, clock):
        """The order in which slots of a bucket are taken; None for never."""
        if slot in self.absent:
            return None
        if slot not in self.owners:
            return (-1, 0, slot)
        if self.tags[slot] == self.step % 255:
            return None
        if self.eviction.rule == "lfu":
            before, number = self.uses[slot]
            now = self.step // self.eviction.half_life
            return (number >> min(now - before, 15), before, slot)
        if self.eviction.rule == "age" and clock - self.last[slot] < self.eviction.age:
            return None
        return (0, self.last[slot], slot)

    def place(self, tables, ids, choices, clock):
        self.step += 1
        keys = list(zip(tables, ids, strict=True))
        for key in keys:
            if key in self.slots:
                self.counts["found"] += 1
                self.touch(self.slots[key], clock)

        missing = [key for key in keys if key not in self.slots and key[1] != EMPTY]
        new = self.admitted(missing)
        choices = dict(zip(keys, choices, strict=True))
        for number in range(ROUNDS):
            self.place_round({key: choices[key] for key in new - self.slots.keys()}, clock, number)
        fresh = new & self.slots.keys()
        waiting = sum(key not in new for key in missing)
        self.counts["waiting"] += waiting
        self.counts["not_placed"] += sum(key not in self.slots for key in keys) - waiting
        return [self.slots.get(key, -1) for key in keys], fresh

    def admitted(self, missing):
        """Which of the ids get a slot: a sketch counts them, and a hash draws."""
        cells, after = len(self.sketch), self.admission.after
        if after > 1:
            part = -(-cells // self.eviction.half_life)
            for at in range(part):
                self.sketch[(self.step * part + at) % cells] >>= 1
            for key in missing:
                for cell in self.cells(key):
                    self.sketch[cell] += 1
        draws = {
            (table, id): mixed(mixed(id % WORD ^ SEED) + table + self.step * GOLDEN) % 2**32
            for table, id in missing
        }
        return {
            key
            for key, draw in draws.items()
            if draw < self.admission.limit
            and (after == 1 or min(self.sketch[cell] for cell in self.cells(key)) >= after)
        }

    def cells(self, key):
        """The cells of the sketch that count an id."""
        half, bits = len(self.sketch) // 2, mixed(key[1] % WORD) ^ mixed(key[0] + 1)
        return bits % half, half + (bits >> 32) % half

    def place_round(self, choices, clock, number):
        last = number == ROUNDS - 1

        # Buckets are chosen before anything changes.
        wanted, buckets = {}, {bucket for pair in choices.values() for bucket in pair}
        states = {bucket: self.state(bucket, clock) for bucket in buckets}
        for key, pair in choices.items():
            (room, best), (other_room, other_best) = (states[bucket] for bucket in pair)
            emptier = room < 12 and other_room > room
            second = emptier if room or other_room else other_best < best
            wanted.setdefault(pair[second], []).append(key)

        for bucket, keys in wanted.items():
            slots = range(bucket * LANES, (bucket + 1) * LANES)
            free = sorted(order for slot in slots if (order := self.order(slot, clock)))
            empty = [order for order in free if order[0] == -1]
            if empty and not last:
                free = empty[: (len(empty) + 1) // 2]
            keys = sorted(keys, key=lambda key: key[1])
            for key, (_, _, slot) in zip(keys, free, strict=False):
                if slot in self.owners:
                    del self.slots[self.owners[slot]]
                    self.counts["evicted"] += 1
                self.slots[key], self.owners[slot] = slot, key
                self.touch(slot, clock)
                self.counts["inserted"] += 1

    def state(self, bucket, clock):
        """The empty slots of a bucket, and the order of the first one to take."""
        slots = range(bucket * LANES, (bucket + 1) * LANES)
        orders = [order for slot in slots if (order := self.order(slot, clock))]
        best = min((order[:2] for order in orders), default=(2**40, 0))
        return sum(order[0] == -1 for order in orders), best


def ids_of(rng, step, kind):
    """Ids of a step: of a power law, drifting, all new, or one that is repeated."""
    number = rng.choice([0, 1, 3, 40])
    if kind == "new":
        return [rng.getrandbits(64) - 2**63 for _ in range(number)]
    if kind == "one":
        return [rng.choice(EDGES)] * number
    drift = step // 50 * 10
    return [
        rng.choice(EDGES) if rng.random() < 0.02 else int(200 * rng.random() ** 3) + drift
        for _ in range(number)
    ]


@pytest.mark.parametrize("rule", ["lfu", "lru", "age", "score"])
@pytest.mark.parametrize("admission", [Admission(), Admission(2), Admission(3, 0.7)], ids=str)
@pytest.mark.parametrize("steps", [90, pytest.param(850, marks=pytest.mark.slow)])
def test_it_is_a_dictionary(rule, admission, steps):
    rng = random.Random(rule)
    sizes = [1, 70, 100]
    index = SlotIndex.empty(sizes, Eviction(rule, half_life=rng.choice([7, 37]), age=9), admission)
    oracle = Oracle(index)
    for step in range(steps):
        ids = ids_of(rng, step, rng.choice(["law", "law", "law", "new", "one"]))
        tables = [rng.randrange(3) for _ in ids]
        where = torch.tensor(tables, dtype=torch.int64), torch.tensor(ids, dtype=torch.int64)
        if rule == "score":
            index.time[1:] = torch.tensor([rng.randrange(50), 0])
        begin_step(index)
        choices = buckets_of(index, *where).tolist()
        narrow = all(-(2**31) <= id < 2**31 for id in ids)
        given = where[1].int() if narrow else where[1]
        placed = place_torch(index, torch.ones(3, dtype=torch.int64), where[0], given)
        expected, fresh = oracle.place(tables, ids, choices, int(index.time[1]))
        assert find_torch(index, *where).tolist() == expected
        own = [k for k in placed.missing.tolist() if placed.rows[k] >= 1]
        assert {(tables[k], ids[k]) for k in own} == fresh
    assert dict(zip(NAMES, index.counts.tolist(), strict=True)) == oracle.counts
    held = {slot: key[1] for slot, key in oracle.owners.items()}
    assert {s: i for s, i in enumerate(index.ids.tolist()) if i != EMPTY} == held
    tables = [table for table, _ in oracle.slots]
    assert all(tables.count(table) <= own for table, own in enumerate(sizes))
    assert oracle.counts["evicted"] > steps / 100


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_ids_of_one_bucket_take_its_slots_and_no_others(impl, device):
    buckets, many = 20, 2000 if device.type == "cuda" else 80
    index = SlotIndex.empty([LANES * buckets], device=device)
    few, table = index.buckets.new_ones(1), index.first[:, None]
    crowd = torch.tensor([[with_hash((7 << 32) + k) for k in range(many)]], device=device)
    assert buckets_of(index, table[0].expand(many), crowd[0]).unique(dim=0).tolist() == [[0, 1]]
    others = torch.arange(1, 100, device=device)[None]
    rows = place(index, few, table, others, impl=impl).rows
    taken = int((index.ids[: 2 * LANES] != EMPTY).sum())

    # All that fit soon have a row, and the others none, whatever comes with them.
    with_row = 0
    for _ in range(3):
        placed = place(index, few, table, torch.cat([crowd, others], 1), impl=impl)
        own = placed.rows[0, :many]
        with_row += len(own[own > 0])
        assert (own > 0).sum() == len(own[own > 0].unique())
        assert torch.equal(placed.rows[:, many:], rows)
    assert (own > 0).sum() == 2 * LANES - taken
    assert index.counts.tolist()[1:3] == [2 * LANES - taken + 99, 0]
    assert index.counts[4] == 3 * many - with_row


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_an_id_that_fills_a_batch_takes_one_slot(impl, device):
    number = 1_000_000 if device.type == "cuda" else 1_000
    index = SlotIndex.empty([LANES], device=device)
    few, table = index.buckets.new_ones(1), index.first[:, None]
    for id in (2**63 - 1, -(2**63)):
        ids = torch.full((1, number), id, device=device)
        assert place(index, few, table, ids, impl=impl).rows.unique().numel() == 1
    assert index.counts.tolist() == [0, 2, 0, 0, 0]


def batch_of(generator, number, spread):
    """Tables ``[3, 1]`` and ids ``[3, number]`` of a power law, some of them extreme."""
    ids = (torch.rand(3, number, generator=generator) ** 4 * spread).long()
    if number > 8:
        ids[0, : len(EDGES)] = torch.tensor(EDGES)
        ids[1, 3:6] = 10**12
    return torch.arange(3)[:, None], ids


@pytest.mark.parametrize(
    ("eviction", "admission", "sharing"),
    [
        (Eviction("lfu", half_life=3), Admission(), 0),
        pytest.param(Eviction("lru"), Admission(after=2), 0, marks=pytest.mark.slow),
        pytest.param(Eviction("age", age=3), Admission(chance=0.4), 0, marks=pytest.mark.slow),
        (Eviction("score"), Admission(after=3, chance=0.8), 3),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_the_kernels_do_exactly_the_same(eviction, admission, sharing, monkeypatch):
    if eviction.rule in ("lfu", "age"):  # all rounds by as many programs as the first one
        monkeypatch.setattr("dlrm.kernels.dynamic.index.FEW", 0)
    few, device = torch.tensor([1, 2, 3]), "cuda" if torch.cuda.is_available() else "cpu"
    sizes, generator = [134] if sharing else [32, 32, 70], torch.Generator().manual_seed(0)
    expected = SlotIndex.empty(sizes, eviction, admission, sharing=sharing)
    found = SlotIndex.empty(sizes, eviction, admission, torch.device(device), sharing=sharing)
    for number in (0, 1, 50, 50, 40, 50):
        tables, ids = batch_of(generator, number, 400)
        end = None
        if number == 40:  # bags: a table for each id, and padding
            tables, ids = tables.expand_as(ids).reshape(-1), ids.reshape(-1).int()
            end = torch.tensor([100])
        both = []
        for index, impl in ((expected, "torch"), (found, "triton")):
            where = [value.to(index.ids.device) for value in (few, tables, ids)]
            here = end if end is None else end.to(index.ids.device)
            placed = place(index, *where, end=here, impl=impl)
            at = placed.missing[: int(placed.number)].long()
            own = where[1].expand_as(where[2]).reshape(-1)[at], where[2].reshape(-1)[at]
            own = {*zip(*(key.tolist() for key in own), strict=True)}
            own = own if admission.chance == 1 else None  # those without luck may be among them
            both.append((placed.rows[: 100 if end is not None else None].tolist(), own))
            assert placed.rows.tolist() == find_rows(index, *where, impl=impl).tolist() or end
        assert both[0] == both[1]
        for name in ("ids", "scores", "sketch", "time", "counts"):
            assert torch.equal(getattr(expected, name), getattr(found, name).cpu()), name
    assert expected.counts[2] > 0
    if sharing:
        used = expected.ids != EMPTY
        assert torch.equal(expected.columns[used], found.columns.cpu()[used])
        ids = expected.ids ^ expected.salts[expected.columns.long()]
        assert (ids[used].abs() < 2**33).float().mean() > 0.9
        assert len(expected.columns[used].unique()) == 3


@pytest.mark.gpu
def test_the_kernels_do_the_same_with_many_ids(device):
    """More than all programs of a GPU take at once, most of them new in each step."""
    number = 300_000
    few, tables = torch.tensor([1, 2], device=device), torch.arange(2, device=device)[:, None]
    both = [SlotIndex.empty([number * 2, number // 60], device=device) for _ in range(2)]
    for step in range(4):
        ids = torch.randint(number, (2, number), device=device) + step * number // 2
        placed = []
        for index, impl in zip(both, ("torch", "triton"), strict=True):
            placed.append(place(index, few, tables, ids, impl=impl))
        assert torch.equal(placed[0].rows, placed[1].rows)
        for name in ("ids", "scores", "counts"):
            assert torch.equal(getattr(both[0], name), getattr(both[1], name)), name
    assert both[0].counts[2] > 0
