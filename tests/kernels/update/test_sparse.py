"""Row updates against the same rules in float64, and the order that they merge entries in."""

import pytest
import torch

from dlrm.kernels.update import sparse as kernel
from dlrm.kernels.update.row_sort import RowSorter, SortedRows, sort_rows, sort_rows_together
from dlrm.kernels.update.sparse import update_rows, update_rows_torch
from tests.kit import GPU, SLOW, VARIANTS, captured, combinations, first

SMALL = {kernel: {"TILE": 256, "MANY": 2}}  # and several parts in each tile


def states_of(rule, rows, dim, device):
    """Zeros in the shapes that the rule keeps its state in; steps as integers."""
    return [
        torch.zeros(rows, 1 if per_row else dim, device=device).to(
            torch.int32 if name == "steps" else torch.float32
        )
        for name, per_row in rule.states.items()
    ]


def double(tensors):
    return [t.double() if t.is_floating_point() else t.clone() for t in tensors]


def check(assert_close, name, rows, dim, steps):
    """Compare a step for each list of ids with the same in float64; the rows after and before."""
    rule, device = VARIANTS[name], steps[0].device
    weight = torch.randn(rows, dim, device=device)
    value, states = weight.clone(), states_of(rule, rows, dim, device)
    exact, exact_states = weight.double(), double(states)
    lr = torch.tensor(10.0 if name == "adadelta" else 0.1, device=device)  # its first are tiny
    for ids in steps:
        grads = torch.randn(len(ids), dim, device=device)
        update_rows(rule, value, ids, grads, states, lr=lr, impl="triton")
        update_rows_torch(rule, exact, ids, grads.double(), exact_states, lr=lr.double())
    assert_close(value - weight, exact - weight, "weight", factor=10)
    for state, found, expected in zip(rule.states, states, exact_states, strict=True):
        assert_close(found, expected, state, dtype=torch.float32, factor=10)
    return value, weight


def draw(pattern, rows, entries, device):
    if pattern == "skewed":
        return (torch.rand(entries, device=device) ** 8 * rows).long()
    if pattern == "one row":
        return torch.full((entries,), rows - 1, device=device)
    if pattern == "distinct":
        return torch.randperm(max(rows, entries), device=device)[:entries] % rows
    if pattern == "left out":  # more than a tile of them
        return (torch.randint(4 * rows, (entries,), device=device) - 3 * rows).clamp(min=-1)
    return torch.randint(rows, (entries,), device=device)


@pytest.fixture(params=[1, 4000] if GPU else [1])
def scale(request, monkeypatch):
    """Small sizes cut into the smallest tiles, large ones (on a GPU) into those of the kernel."""
    if request.param == 1:
        monkeypatch.setattr(kernel, "TILE", 256)
        monkeypatch.setattr(kernel, "MANY", 2)
    return request.param


PATTERNS = [
    ("skewed", 83, 16 if GPU else 4),
    ("one row", 70, 5),
    ("distinct", 33, 4),
    ("uniform", 1, 20),
    ("uniform", 40, 33 if GPU else 9),
    ("left out", 97, 12 if GPU else 3),
]
CASES = [  # how entries are merged does not depend on the rule
    *(("sgd", *pattern) for pattern in PATTERNS),
    *((name, *PATTERNS[-1]) for name in VARIANTS if name != "sgd"),
    *(
        pytest.param(name, *pattern, marks=pytest.mark.slow)
        for name in ("adagrad", "rowwise_adagrad")
        for pattern in [*PATTERNS[:-1], ("skewed", 83, 16), ("uniform", 64, 33)]
    ),
]


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize(("name", "pattern", "entries", "dim"), CASES)
def test_steps_match_float64(device, scale, assert_close, name, pattern, entries, dim):
    rows, entries = 50 * scale, entries * scale
    ids = [draw(pattern, rows, entries, device) for _ in range(3 if GPU else 2)]
    check(assert_close, name, rows, dim, ids)


def test_a_row_has_the_gradients_of_all_tiles_that_it_lies_in(device, monkeypatch):
    """There are more tiles than the second kernel adds up in one round."""
    monkeypatch.setattr(kernel, "TILE", 1)
    monkeypatch.setattr(kernel, "MANY", 10**9)  # tiles of 4 entries, 64 tiles a round
    entries = 16 * 64 + 40
    weight, lr = torch.zeros(3, 4, device=device), torch.ones((), device=device)
    ids = torch.ones(entries, dtype=torch.int64, device=device)
    ids[:7] = 0
    grads = torch.full((entries, 4), -1.0, device=device)
    update_rows("sgd", weight, ids, grads, lr=lr, impl="triton")
    assert weight[:, -1].tolist() == [7, entries - 7, 0]


@pytest.fixture
def runs(monkeypatch):
    """Rows as wide lists are updated, in small tiles."""
    monkeypatch.setattr(kernel, "RUNS_COLUMNS", 1)
    monkeypatch.setattr(kernel, "RUNS_ENTRIES", 1)
    monkeypatch.setattr(kernel, "RUNS_ELEMENTS", 64)
    monkeypatch.setattr(kernel, "RUNS_TILES", 6)


@pytest.mark.usefixtures("nan_in_new_memory", "runs")
@pytest.mark.parametrize(
    ("name", "pattern"),
    [  # how entries are merged does not depend on the rule
        *(("sgd", pattern) for pattern in ("skewed", "one row", "left out")),
        *(("adam", pattern) for pattern in ("one row", "left out")),
        *(pytest.param(name, "skewed", marks=SLOW) for name in VARIANTS if name != "sgd"),
    ],
)
def test_runs_match_float64(device, assert_close, name, pattern):
    check(assert_close, name, 40, 12, [draw(pattern, 40, 97, device) for _ in range(2)])


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad"])
def test_runs_of_every_length_are_summed(device, monkeypatch, assert_close, name):
    """Short runs side by side, long ones alone, and such that fill tiles, in one list."""
    lengths = torch.tensor([1, 1, 1, 40, 2, 7, 8, 9, 1, 16, 17, 1, 31, 32, 33, 5, 96, 1, 3, 1])
    monkeypatch.setattr(kernel, "RUNS_TILES", int(lengths.sum()) // 20)  # of 32 entries
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    ids = rows[torch.randperm(len(rows))].to(device)
    value, weight = check(assert_close, name, len(lengths) + 2, 4, [ids])
    assert torch.equal(value[-2:], weight[-2:])


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_equal_rows_are_summed_before_the_rule(device, impl):
    weight = torch.zeros(3, 4, device=device)
    ids = torch.tensor([1, 0, 1], device=device)
    grads = torch.tensor([[1.0], [5.0], [10.0]], device=device).expand(3, 4).contiguous()
    update_rows("sgd", weight, ids, grads, lr=torch.tensor(1.0, device=device), impl=impl)
    assert weight[:, 0].tolist() == [-5, -11, 0]
    sums = torch.zeros(3, device=device)
    one = torch.tensor(1.0, device=device)
    update_rows("rowwise_adagrad", weight, ids, grads, [sums], lr=one, impl=impl)
    assert sums.tolist() == [25, 121, 0]


def test_entries_below_zero_are_left_out_whatever_their_gradient(device):
    ids = torch.tensor([-1, 2, -1, 0], device=device)
    lr = torch.tensor(1.0, device=device)
    grads = torch.ones(4, 4, device=device)
    grads[ids < 0] = torch.nan
    for impl in ("triton", "torch"):
        weight = torch.zeros(3, 4, device=device)
        update_rows("sgd", weight, ids, grads, lr=lr, impl=impl)
        assert weight[:, 0].tolist() == [-1, 0, -1]


@pytest.mark.parametrize("dim", [6, 300] if GPU else [3])  # several warps share a wide row
@first("name", ["adam", *(name for name in VARIANTS if name != "adam")])
def test_other_rows_keep_every_bit_and_runs_are_equal(device, scale, name, dim):
    rule = VARIANTS[name]
    rows, entries = 40 * scale, 45 * scale
    weight = torch.randn(rows, dim, device=device)
    ids = draw("skewed", rows // 2, entries, device)
    grads = torch.randn(entries, dim, device=device)
    results = []
    for _ in range(4 if GPU else 2):
        value, states = weight.clone(), states_of(rule, rows, dim, device)
        lr = torch.tensor(0.1, device=device)
        update_rows(rule, value, ids, grads, states, lr=lr, impl="triton")
        results.append((value, *states))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
    untouched = torch.ones(rows, dtype=torch.bool, device=device)
    untouched[ids] = False
    assert torch.equal(results[0][0][untouched], weight[untouched])
    assert not any(state[untouched].any() for state in results[0][1:])


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_bfloat16_rounds_without_bias(device, impl):
    rows = 4096 if GPU else 128
    ids, step = torch.arange(rows, device=device), 1 / 1024  # an eighth of bf16's spacing above 1
    grads = torch.full((rows, 4), -step, device=device)
    lr = torch.tensor(1.0, device=device)
    nearest = torch.ones(rows, 4, device=device, dtype=torch.bfloat16)
    update_rows("sgd", nearest, ids, grads, lr=lr, impl=impl)
    assert (nearest == 1).all()
    seed = torch.zeros((), dtype=torch.int64, device=device)
    value = torch.ones_like(nearest)
    update_rows("sgd", value, ids, grads, lr=lr, seed=seed, impl=impl)
    again = torch.ones_like(nearest)
    update_rows("sgd", again, ids, grads, lr=lr, seed=seed + 1, impl=impl)
    assert set(value.unique().tolist()) == {1.0, 1.0078125}
    share = (value > 1).double().mean().item()
    assert abs(share - 1 / 8) < 5 * (1 / 8 * 7 / 8 / value.numel()) ** 0.5
    assert not torch.equal(value, again)


def test_plan_is_used_and_equal_rows_keep_their_order(device):
    ids = torch.tensor([3, 1, 3, 0, 1], device=device)
    plan = sort_rows(ids, 5)
    assert plan.rows.tolist() == [0, 1, 1, 3, 3]
    assert plan.order.tolist() == [3, 1, 4, 0, 2]
    assert plan.rows.dtype == torch.int32
    assert sort_rows(ids, 2**31).rows.dtype == torch.int64
    weight, grads = torch.zeros(5, 4, device=device), torch.ones(5, 4, device=device)
    lr = torch.tensor(1.0, device=device)
    update_rows("sgd", weight, ids, grads, lr=lr, sorted_rows=plan, impl="triton")
    assert weight[:, 0].tolist() == [-1, -2, 0, -2, 0]


def test_no_entries(device):
    weight = torch.ones(3, 4, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    lr = torch.tensor(1.0, device=device)
    for impl in ("triton", "torch"):
        update_rows("sgd", weight, empty, torch.empty(0, 4, device=device), lr=lr, impl=impl)
    assert (weight == 1).all()


@pytest.mark.parametrize("rows", [[7, 1, 40], [7, 2**31 - 9, 40]], ids=["int32", "int64"])
def test_tables_whose_rows_are_sorted_together(device, rows):
    """Each as by itself; entries that are left out stay with their table."""
    count = 900 if GPU else 60
    drawn = [
        torch.randint(-1, 5 if number > 40 else number, (count,), device=device) for number in rows
    ]
    drawn[1] = drawn[1].int()
    drawn[1][0] = rows[1] - 1  # beyond 32 bits with the rows of the table in front
    plans = sort_rows_together(list(zip(drawn, rows, strict=True)))
    for entries, number, plan in zip(drawn, rows, plans, strict=True):
        alone = sort_rows(entries, number)
        assert torch.equal(plan.rows - plan.base, alone.rows)
        assert torch.equal(plan.order - plan.first, alone.order)
        if number > 40:  # no room for more
            continue
        weight, grads = torch.zeros(40, 3, device=device), torch.randn(count, 3, device=device)
        expected, lr = weight.clone(), torch.tensor(1.0, device=device)
        update_rows("sgd", weight, entries, grads, lr=lr, sorted_rows=plan, impl="triton")
        update_rows("sgd", expected, entries, grads, lr=lr, sorted_rows=alone, impl="triton")
        assert torch.equal(weight, expected)
        assert weight.any()


@combinations(batch=[1, 20, 32], dtype=[torch.int32, torch.int64], transposed=[False, True])
def test_short_lists_are_sorted_table_by_table(device, batch, dtype, transposed):
    """As the whole list by itself: the tables stand behind one another."""
    tables, height = 3, 2**30 if dtype == torch.int64 else 9
    ids = torch.randint(9, (batch, tables), device=device) + (height - 9)
    rows = (ids + height * torch.arange(tables, device=device)).to(dtype)
    rows = rows.t().contiguous().t() if transposed else rows
    left_out = torch.tensor([2, -1, 2, 0], device=device)
    both = [(rows, tables * height), (left_out, 3)]
    found, other = sort_rows_together(both, impl="triton")
    alone = sort_rows(rows.t().flatten() if transposed else rows.flatten(), tables * height)
    assert torch.equal(found.rows, alone.rows)
    assert torch.equal(found.order, alone.order)
    assert found.rows.dtype == alone.rows.dtype
    assert other.rows.tolist() == [-1, 0, 2, 2]
    assert other.order.tolist() == [1, 3, 0, 2]
    same = sort_rows_together(both, impl="torch")[0]
    assert torch.equal(same.rows - same.base, alone.rows)
    assert torch.equal(same.order - same.first, alone.order)


@pytest.mark.parametrize("wide", [False, True])
def test_entries_between_others_are_left_out(device, request, wide):
    """As in a list of all rows in order, of which some have no gradient."""
    if wide:
        request.getfixturevalue("runs")
    rows, lr = torch.randint(27, (96,), device=device).sort().values, torch.ones((), device=device)
    rows = torch.where(rows % 3 > 0, rows, -2)
    grads = torch.randn(96, 4, device=device)
    grads[rows < 0] = torch.nan
    plan = SortedRows(rows, torch.arange(96, device=device))
    found, expected = (torch.zeros(27, 4, device=device) for _ in range(2))
    update_rows("sgd", found, rows, grads, lr=lr, sorted_rows=plan, impl="triton")
    update_rows("sgd", expected, rows, grads, lr=lr, impl="torch")
    torch.testing.assert_close(found, expected)
    assert found.any()


def test_a_sorter_without_a_gpu_sorts_nothing():
    weight, rows = torch.zeros(3, 2), torch.arange(3)
    with RowSorter("cpu") as sorter:
        sorter.submit(weight, rows)
        assert sorter.result(weight, rows) is None


def test_messages():
    weight, grads, lr = torch.zeros(3, 4), torch.zeros(2, 4), torch.tensor(0.1)
    ids = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="unknown optimizer 'adagard', did you mean 'adagrad'"):
        update_rows("adagard", weight, ids, grads, lr=lr)
    with pytest.raises(ValueError, match=r"adam on a table \(3, 4\) needs states of \[12, 12, 3\]"):
        update_rows("adam", weight, ids, grads, lr=lr)
    with pytest.raises(ValueError, match=r"grads have shape \(2, 5\), they must be \[n, 4\]"):
        update_rows("sgd", weight, ids, torch.zeros(2, 5), lr=lr)
    for impl in ("triton", "torch"):
        with pytest.raises(ValueError, match=r"rows have shape \(1,\), they must be \[2\]"):
            update_rows("sgd", weight, ids[:1], grads, lr=lr, impl=impl)
        with pytest.raises(ValueError, match=r"rows must be integers, got torch\.float32"):
            update_rows("sgd", weight, ids.float(), grads, lr=lr, impl=impl)
    with pytest.raises(ValueError, match="weight and states must be contiguous"):
        update_rows("sgd", torch.zeros(4, 3).t(), ids, grads, lr=lr)
    with pytest.raises(ValueError, match="impl is 'cuda'"):
        update_rows("sgd", weight, ids, grads, lr=lr, impl="cuda")


@pytest.mark.gpu
def test_flat_index_beyond_two_to_the_31():
    rows = 2**27 + 5
    weight = torch.zeros(rows, 16, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([0, rows - 1, 3, rows - 1, 2**26 + 1], device="cuda")
    grads = torch.ones(5, 16, device="cuda")
    update_rows("sgd", weight, ids, grads, lr=torch.tensor(1.0, device="cuda"))
    assert weight[ids.unique()].float()[:, 15].tolist() == [-1, -1, -1, -2]
    assert weight.sum(dtype=torch.float64).item() == -80


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1500, 3000])  # sorted table by table, and by passes
def test_a_sorter_inside_a_graph(batch, assert_close):
    from dlrm.kernels.lookup.tables import RowContext, TableRows, lookup_tables

    weight = torch.randn(1000, 16, device="cuda").requires_grad_()
    start, lr = weight.detach().clone(), torch.tensor(0.1, device="cuda")
    ids = torch.randint(500, (2, batch), device="cuda")
    starts = torch.tensor([0, 500], device="cuda")
    sorter = RowSorter()

    def step():
        with sorter:
            lookup_tables(
                weight, TableRows(starts), ids, context=RowContext(sorter=sorter)
            ).square().sum().backward()
            rows, values = weight.grad._indices()[0], weight.grad._values()
            plan = sorter.result(weight, rows)
            assert plan is not None
            update_rows("sgd", weight.data, rows, values, lr=lr, sorted_rows=plan)
            assert sorter.result(weight, rows.clone()) is None
            assert sorter.result(weight.detach(), rows) is None
            weight.grad = None

    replay, _ = captured(step)
    weight.data.copy_(start)
    exact = start.double()
    for _ in range(3):
        ids.copy_(torch.randint(500, (2, batch), device="cuda"))
        replay()
        flat = (ids + starts[:, None]).view(-1)
        update_rows_torch("sgd", exact, flat, 2 * exact[flat], lr=lr.double())
    assert_close(weight.detach() - start, exact - start, "weight", factor=10)
