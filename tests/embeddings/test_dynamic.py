"""Rows that belong to the ids that occur."""

import copy
from itertools import pairwise

import pytest
import torch

from dlrm.data.schema import HASHED
from dlrm.embeddings import build
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.common.context import LookupContext
from dlrm.embeddings.dynamic import Dynamic
from dlrm.kernels.dynamic.slot_index import EMPTY, LANES
from dlrm.kernels.update.rules import OPTIONS
from dlrm.optim import RowOptimizer
from dlrm.utils.bags import Bags


def step(group, optimizer, ids, factor=1.0):
    out = group(ids)
    (factor * out).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


def bags_of(generator, sizes, batch):
    lengths = torch.randint(4, (len(sizes) * batch,), generator=generator)
    tables = torch.arange(len(sizes)).repeat_interleave(batch).repeat_interleave(lengths)
    ids = (torch.rand(len(tables), generator=generator) * torch.tensor(sizes)[tables]).long()
    return Bags(ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))


@pytest.mark.parametrize("rule", sorted(OPTIONS))
@pytest.mark.parametrize("bags", [False, True])
def test_it_trains_as_dense_to_the_bit(rule, bags):
    sizes, generator = [300, 5, 1], torch.Generator().manual_seed(0)
    dense, dynamic = build("dense", sizes, 8), build("dynamic", sizes, 8)
    dynamic.load_dense([dense.to_dense(table) for table in range(3)])
    optimizers = [RowOptimizer(group.parameters(), rule, lr=0.1) for group in (dense, dynamic)]
    for _ in range(5):
        ids = torch.stack([torch.randint(rows, (40,), generator=generator) for rows in sizes])
        ids = bags_of(generator, sizes, 40) if bags else ids
        found = [step(*each, ids) for each in zip((dense, dynamic), optimizers, strict=True)]
        assert torch.equal(*found)
    assert torch.equal(dense.to_dense(0), dynamic.to_dense(0))
    assert dynamic.id_counts()["inserted"] == 0


@pytest.mark.parametrize("dtype", [None, "int8", "int4", torch.bfloat16])
def test_a_row_is_reset_with_its_state_when_another_id_gets_it(dtype):
    packed = dtype if isinstance(dtype, str) else None
    group = Dynamic([HASHED], 6, rows=LANES, shared=1, evict="lru", dtype=packed)
    group = group.bfloat16() if dtype is torch.bfloat16 else group
    optimizer = RowOptimizer(group.parameters(), "adam", lr=0.1)
    first = torch.arange(LANES)[None]
    start = step(group, optimizer, first)  # fills the table
    trained = group(first.clone()).detach()
    assert not torch.equal(trained, start)

    new = step(group, optimizer, first + 1000)  # all others leave
    assert group.id_counts()["evicted"] == LANES
    fresh = copy.deepcopy(group)
    again = step(group, optimizer, first)
    assert torch.equal(again, start), "an id that comes back starts from its first row"
    state = next(iter(optimizer.state.values()))
    assert state["steps"].max() == 1
    assert not torch.equal(new, start)
    assert torch.equal(fresh(first + 1000)[:, 0], fresh.rows(0, first[0] + 1000))


def test_looking_does_not_change_anything():
    group = Dynamic([HASHED, 40], 4, rows=[40, 64])
    group(torch.randint(-(2**63), 2**63 - 1, (2, 30)))
    before = copy.deepcopy(group.state_dict())
    ids = torch.randint(-(2**63), 2**63 - 1, (2, 100))
    with torch.no_grad():
        group(ids)
    group.eval()(ids)
    group.train().rows(0, ids)
    after = group.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_ids_without_a_row_share_few_of_their_table():
    group = Dynamic([HASHED, HASHED], 4, rows=64, shared=3).eval()
    found = group(torch.arange(500).expand(2, 500))
    rows = [set(map(tuple, found[:, table].tolist())) for table in range(2)]
    assert [len(each) for each in rows] == [3, 3]
    assert not rows[0] & rows[1]


@pytest.mark.parametrize("options", [{}, {"cache_share": 0.5}, {"dtype": "int8"}], ids=str)
def test_shared_rows_in_pieces_differ_and_learn(options):
    torch.manual_seed(0)
    rows = {"rows": [32, 32], "shared": [6, 2], "evict": "age"}  # so that none leaves
    group = Dynamic([HASHED, 40], 8, **rows, pieces=4, **options)
    optimizer, total = RowOptimizer(group.parameters(), "sgd", lr=0.1), (2 * 32 + 6 + 2) * 4
    assert group.weight.shape == (total, 2)
    assert "pieces" not in str(group.footprint())
    assert sum(sum(t.values()) for t in group.footprint()) >= total * (4 if options else 8)
    known = torch.arange(32)
    others = 1000 + torch.arange(64)
    for _ in range(8):  # takes all slots
        step(group, optimizer, known.expand(2, 32))
    assert group.id_counts()["inserted"] == 64
    every = torch.cat([known, others]).expand(2, 96)

    # Of 64 ids that share 32 pieces of 4 kinds hardly two have all of them in common.
    group.eval()
    before = group(every).detach()
    assert len(before[32:, 0].unique(dim=0)) > 60
    assert len(before[32:].unflatten(2, (4, 2)).flatten(0, 2).unique(dim=0)) <= 32
    bags = Bags(every.flatten(), torch.arange(0, 193, 3))
    expected = before.transpose(0, 1).unflatten(1, (-1, 3)).sum(2).transpose(0, 1)
    torch.testing.assert_close(group(bags), expected)
    weighted = group(every, per_sample_weights=torch.full((2, 96), 2.0))
    torch.testing.assert_close(weighted, 2 * before)

    # Training an id without a row changes others in the pieces that they share, and no own row.
    group.train()
    (100 * group(others[:2].expand(2, 2))).sum().backward()
    optimizer.step()
    after = group.eval()(every).detach()
    changed = (after != before).unflatten(2, (4, 2)).any(3)  # [96, F, pieces]
    assert changed[32:34].all()
    assert 0 < changed[34:].float().mean() < 1
    assert not changed[:32].any()


@pytest.mark.parametrize("options", [{}, {"cache_share": 0.5}, {"dtype": "int8"}], ids=str)
def test_an_id_with_pieces_starts_from_those_that_it_shared(options):
    group = Dynamic([HASHED], 8, rows=4000, shared=6, pieces=4, admit=4, **options)
    optimizer = RowOptimizer(group.parameters(), "rowwise_adagrad", lr=0.1)
    ids = torch.arange(10)[None]
    for _ in range(3):
        step(group, optimizer, ids)
    shared = group.eval()(ids)
    optimizer.state_dict()  # writes back what is cached
    (state,) = (each["sum"].view(-1) for each in optimizer.state.values())
    table = torch.tensor(0)
    before = state[group.stored_rows(table, ids[0])[1]]
    assert group.id_counts()["inserted"] == 0

    # In the step in which they get rows they share theirs for the last time.
    group.train()
    found = step(group, optimizer, ids)
    assert group.id_counts()["inserted"] == 10
    own = group.eval()(ids).detach()
    optimizer.state_dict()
    for each in (found, own):
        torch.testing.assert_close(each, shared, rtol=0, atol=0.01 if "dtype" in options else 0)
    assert not group.id_counts()["found"]
    assert torch.equal(state[group.stored_rows(table, ids[0])[1]], before)


def test_pieces_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"pieces is 3; set --dynamic\.pieces to a divisor.*, 8"):
        Dynamic([HASHED], 8, rows=32, pieces=3)
    with pytest.raises(ValueError, match=r"pieces is -1; set --dynamic\.pieces"):
        Dynamic([HASHED], 8, rows=32, pieces=-1)


@pytest.mark.parametrize(("admit", "chance"), [(3, 1.0), (1, 0.3)])
def test_new_ids_wait_for_admission(admit, chance):
    group = Dynamic([HASHED], 4, rows=1000, admit=admit, chance=chance)
    ids = torch.arange(200)[None]
    inserted = []
    for _ in range(4):
        group(ids)
        inserted.append(group.id_counts()["inserted"])
    counts = group.id_counts()
    assert counts["waiting"] + counts["found"] + inserted[-1] == 800
    if admit == 3:  # a few by chance earlier, as counts may be too high
        assert inserted[1] < 60
        assert inserted[2] == inserted[3] == 200
    else:
        assert 30 < inserted[0] < 90 < inserted[2] < 180
    group(torch.zeros(1, 5, dtype=torch.int64))  # five times in one step
    assert group.id_counts()["inserted"] >= inserted[-1]


def test_ids_that_find_no_room_are_counted_and_share_rows():
    group = Dynamic([HASHED], 4, rows=LANES, shared=1)
    ids = torch.cat([torch.arange(LANES + 10), torch.tensor([EMPTY])])[None]
    out = group(ids)
    counts = group.id_counts()
    assert counts == {
        "found": 0, "inserted": LANES, "evicted": 0, "waiting": 0, "not_placed": 11,
    }  # fmt: skip
    without = (group.local_rows(torch.zeros(1, dtype=torch.int64), ids)[0] == 0).nonzero()[:, 0]
    assert len(without) == 11
    assert len(out[without, 0].unique(dim=0)) == 1


def test_a_user_gives_the_score():
    group = Dynamic([HASHED], 4, rows=LANES, evict="score")
    for score, begin in ((5, 0), (9, 16), (7, 100)):
        group.set_clock(score)
        group(torch.arange(begin, begin + 16)[None])
    group.set_clock(1)
    group(torch.arange(200, 216)[None])  # in place of those of score 7, as 5 left before
    held = set(group.index.ids.tolist())
    assert held == {*range(16, 32), *range(200, 216)}


def test_a_user_gives_the_score_of_each_look_up():
    group = Dynamic([HASHED, HASHED], 4, rows=LANES, evict="score")
    ids = torch.cat([torch.arange(LANES), torch.arange(4)])
    scores = torch.cat([torch.arange(LANES) + 100, torch.tensor([500, 0, -1, 2**40])])
    group.set_clock(torch.stack([scores, scores.flip(0)]))
    group(torch.stack([ids, ids.flip(0)]))
    group.set_clock(torch.full((2, 3), 7))
    group(torch.arange(200, 203).expand(2, 3))  # those of the lowest scores leave: 101, 102, 104
    group.set_clock(9)
    group(torch.arange(300, 302).expand(2, 2))  # and those of 7, but for one
    held = group.index.ids.view(2, LANES).tolist()
    kept = set(range(LANES)) - {1, 2, 4}
    for own in held:
        assert kept < set(own)
        assert len({200, 201, 202} & set(own)) == 1
        assert {300, 301} < set(own)

    group.set_clock(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"scores have shape \(2, 3\) and the ids \(2, 5\)"):
        group(torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"evicted by lfu: set --dynamic\.evict score"):
        Dynamic([HASHED], 4, rows=1).set_clock(torch.ones(1, 3))


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_the_rows_of_a_window_are_those_that_its_steps_will_use(padding_idx):
    generator = torch.Generator().manual_seed(0)
    group = Dynamic([HASHED] * 2, 4, rows=64, admit=2, cache_share=1.0, padding_idx=padding_idx)
    optimizer, context = RowOptimizer(group.parameters(), "adam"), LookupContext(rows_fetched=True)
    assert group.footprint()[0]["host"] == 66 * 4 * 4
    state = {name: value.nbytes for name, value in group.state_dict().items() if name != "weight"}
    both = 2 * sum(state.values()) - state["_seed"] + group.cached.nbytes()[1]
    assert sum(table["index"] for table in group.footprint()) == both
    windows = []
    for _ in range(20):
        windows.append([torch.randint(90, (2, 20), generator=generator) for _ in range(4)])
        windows[-1][1] = bags_of(generator, [90, 9], 20)
    for number, (window, following) in enumerate(pairwise(windows)):
        group.begin_window([] if group.rows_ready else window, following)
        for batch in window:
            group(batch, context=context).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tables = batch.tables(2) if isinstance(batch, Bags) else torch.arange(2)[:, None]
            ids = batch.ids if isinstance(batch, Bags) else batch
            rows = group.local_rows(tables, ids) + 66 * tables
            slots = group.cached.slots[rows[ids != padding_idx]].long()
            assert (group.cached.index.last_used[slots] >= group.cached.index.step).all()
        if number in (9, 14):  # then the window ends
            group.state_dict() if number == 9 else group.place(window[0])
            assert not group.rows_ready
    assert group.id_counts()["evicted"] > 500
    with pytest.raises(ValueError, match=r"leave out set_clock or --dynamic\.cache_share"):
        group.set_clock(3)


def test_two_runs_are_equal_and_a_restored_one_continues():
    torch.manual_seed(0)
    batches = [(torch.rand(2, 64) ** 3 * 300).long() - 20 for _ in range(12)]

    def run(group, optimizer, batches):
        return [step(group, optimizer, ids) for ids in batches]

    def make():
        torch.manual_seed(1)
        group = Dynamic([HASHED, 300], 4, rows=60, admit=2, half_life=3)
        return group, RowOptimizer(group.parameters(), "adam", lr=0.1)

    whole, again, parts = run(*make(), batches), run(*make(), batches), make()
    assert all(map(torch.equal, whole, again))
    run(*parts, batches[:6])
    restored = make()
    for new, old in zip(restored, parts, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert all(map(torch.equal, whole[6:], run(*restored, batches[6:])))


def test_hot_ids_stay_where_others_come_and_go():
    group = Dynamic([HASHED], 4, rows=64, half_life=20)
    hot = torch.arange(40)
    for number in range(60):
        group(torch.cat([hot, torch.arange(40) + 100 * (number + 1)])[None])
    kept = torch.isin(hot, group.index.ids)
    assert kept.float().mean() > 0.9
    for number in range(200):  # and leave when they are used no more
        group((torch.arange(20) + 10**6 + number % 10)[None].repeat(1, 2))
        group((torch.arange(40) + 10**7 + 50 * number)[None])
    assert torch.isin(hot, group.index.ids).float().mean() < 0.1


def test_ids_that_fade_leave_where_others_come():
    group, faded = Dynamic([HASHED], 4, rows=64, half_life=10**6), torch.arange(20)
    for _ in range(50):
        group(faded[None])
    for number in range(150):
        group((torch.arange(40) + 100 * (number + 1))[None])
    assert not torch.isin(faded, group.index.ids).any()


def test_tables_of_known_ids_take_no_more_than_they_need_and_others_must_be_told():
    group = Dynamic([10, 1000, HASHED], 4, rows=500)
    assert group.num_slots == (13, 500, 500)
    state = group.state_dict()
    size = sum(tensor.nbytes for tensor in state.values())
    assert sum(sum(table.values()) for table in group.footprint()) == size
    with pytest.raises(ValueError, match=r"number of ids is unknown.*set --dynamic\.rows"):
        Dynamic([HASHED], 4)
    with pytest.raises(ValueError, match="hashed texts: there is no dense table"):
        group.to_dense(2)
    found = Dynamic.for_budget(Budget([HASHED, 20], 4, 100_000))
    assert found[1] is None
    group = Dynamic([HASHED], 4, **found[0])
    assert 95_000 < sum(group.footprint()[0].values()) <= 100_000 - 20 * 16


@pytest.mark.parametrize("dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("size", [40_000, 400_000, 4_000_000])
def test_a_budget_is_divided_by_how_many_ids_occurred(size, dtype):
    """Where few ids fit, the others share more rows, in pieces, and few are admitted."""
    seen = [9000, 2000, 40, 1]
    budget = Budget([HASHED] * 4, 16, size, values=seen, dtype=dtype or "fp32")
    found = Dynamic.for_budget(budget)
    rows, shared = ([own[name] for own in found] for name in ("rows", "shared"))
    (chance,) = {own.get("chance", 1.0) for own in found}
    (pieces,) = {own.get("pieces", 0) for own in found}
    assert rows == sorted(rows, reverse=True)
    group = Dynamic(
        [HASHED] * 4, 16, rows=rows, shared=shared, chance=chance, pieces=pieces, dtype=dtype
    )
    taken = sum(sum(table.values()) for table in group.footprint())
    assert (0.97 if pieces else 0.8) * size < taken <= size
    alone = Dynamic.for_budget(budget, pieces=0)
    assert alone[0]["rows"] > alone[3]["rows"]
    if size == 40_000 and dtype != "int4":
        assert shared[0] > rows[0] == rows[2]
        assert (chance, pieces) == (0.01, 4)
    else:
        assert alone == found
        assert shared[0] < rows[0] / 16
        assert (chance, pieces) == (1, 0)

    given = {"shared": 5, "chance": 0.3, "pieces": 2}
    for own in Dynamic.for_budget(Budget([HASHED], 16, size, values=[9000]), **given):
        assert own.items() >= given.items()
    with pytest.raises(ValueError, match=r"too small .*leave out --dynamic\.pieces"):
        Dynamic.for_budget(Budget([HASHED] * 4, 16, 2000), pieces=0)


def test_a_budget_has_room_for_the_ids_that_occur_most():
    """Of a table of few ids all have room, of one whose ids occur equally often fewer."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(1, 3, (40_000,), generator=generator)
    skewed = 4000 // torch.arange(1, 4001)
    counts = [flat, skewed, torch.full((90,), 400)]
    seen = [len(own) for own in counts]
    found = Dynamic.for_budget(Budget([HASHED] * 3, 16, 800_000, counts=counts, values=seen))
    rows = [own["rows"] for own in found]
    assert rows[2] >= 90
    assert rows[1] > 1000
    assert 1000 < rows[0] < 10_000
    group = Dynamic([HASHED] * 3, 16, rows=rows, shared=[own["shared"] for own in found])
    assert sum(sum(table.values()) for table in group.footprint()) <= 800_000
