"""Packed rows: records, rounding, and kernels against PyTorch."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.kernels.lookup.pool import MODES, lookup_bags
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables, rows_of_torch
from dlrm.kernels.update import sparse as kernel
from dlrm.kernels.update.packed import (
    PackedParameter,
    PackedRows,
    chunks_to_write,
    packed_rows,
    record_bytes,
)
from dlrm.kernels.update.sparse import update_rows
from dlrm.utils.bags import Bags
from tests.kit import GPU, VARIANTS, combinations

SMALL = {kernel: {"TILE": 64}}
ROWS = 40
WIDE = {"int8": ROWS, "int4": 0, "mixed": 7}
every_format = pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)


def table(wide, dim, device="cpu", rows=ROWS):
    """A table of normal weights, rounded to what is stored."""
    weight = PackedParameter(PackedRows.empty(rows, dim, wide, device))
    for _, part in chunks_to_write(weight, 0, rows):
        part.normal_()
    return weight


def values(weight):
    return weight.packed.read(torch.arange(len(weight), device=weight.device))


@given(st.data(), st.integers(1, 33), st.integers(0, ROWS))
def test_records_hold_every_integer_and_scale(data, dim, wide):
    packed = PackedRows.empty(ROWS, dim, wide)
    size = data.draw(st.integers(0, ROWS))
    rows = torch.randperm(ROWS)[:size]
    highest = packed.highest(rows).expand(size, dim)
    integers = ((torch.rand(size, dim) * 2 - 1) * highest).round()
    scale = torch.randn(size).bfloat16().float()
    packed.write_packed(rows, integers, scale)
    found = packed.read_packed(rows)
    assert torch.equal(found[0], integers)
    assert torch.equal(found[1], scale)
    others = torch.ones(ROWS, dtype=torch.bool).index_fill(0, rows, False).nonzero()[:, 0]
    assert packed.read(others).eq(0).all()
    assert len(packed.data) == wide * record_bytes(dim, 8) + (ROWS - wide) * record_bytes(dim, 4)


def test_bytes_of_a_record():
    assert [record_bytes(dim, 8) for dim in (1, 3, 4, 16, 128)] == [4, 6, 6, 18, 130]
    assert [record_bytes(dim, 4) for dim in (1, 3, 4, 5, 16, 128)] == [4, 4, 4, 6, 10, 66]


@every_format
def test_written_rows_have_about_the_least_error(wide):
    weight, exact = table(wide, 16), torch.randn(ROWS, 16)
    rows = torch.arange(ROWS)
    weight.packed.write(rows, exact)
    error = (values(weight) - exact).square().sum()
    largest = exact.abs().amax(1) / weight.packed.highest(rows)[:, 0]
    plain = (exact / largest[:, None]).round() * largest[:, None]
    assert error <= 1.1 * (plain - exact).square().sum()  # plain ones are exact at 1 of 16
    assert error < 16 * ROWS * largest.square().mean() / 8


@combinations(form=[*WIDE], impl=["triton", "torch"])
def test_rounding_is_unbiased_and_rows_without_a_step_stay(device, form, impl):
    weight = table(WIDE[form], 8, device)
    before, total = values(weight), torch.zeros(ROWS, 8, device=device)
    rows = torch.arange(0, ROWS, 2, device=device)
    grads = torch.randn(len(rows), 8, device=device)
    grads[0] = 0
    seed, lr = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(0.03, device=device)
    repeats = 400 if GPU else 100 if impl == "torch" else 12
    step, records = 0.03 * grads, weight.packed.data.clone()
    for _ in range(repeats):
        weight.packed.data.copy_(records)
        update_rows("sgd", weight, rows, grads, lr=lr, seed=seed, impl=impl)
        total += values(weight) - before
        seed += 1
    mean, scale = total / repeats, weight.packed.read_packed(torch.arange(ROWS, device=device))[1]
    limit = 5 * 0.6 * scale[:, None] / repeats**0.5  # the deviation of one is half a scale or less
    assert ((mean[::2] + step).abs() < limit[::2]).all()
    assert mean[1::2].eq(0).all()
    assert mean[0].eq(0).all()
    assert mean[2::2].ne(0).any()


@pytest.mark.usefixtures("nan_in_new_memory")
@combinations(name=[*VARIANTS], form=[*WIDE])
def test_kernels_update_as_pytorch(device, assert_close, name, form):
    rule, dim = VARIANTS[name], 5
    weight = table(WIDE[form], dim, device)
    other = copy.deepcopy(weight)
    states = [
        [
            torch.zeros(ROWS, 1 if per_row else dim, device=device)
            for per_row in rule.states.values()
        ]
        for _ in range(2)
    ]
    for step in range(2 if GPU else 1):
        rows = torch.randint(-1, ROWS, (40,), device=device)
        grads = torch.randn(40, dim, device=device)
        lr = torch.tensor(0.1, device=device)
        for own, state, impl in ((weight, states[0], "triton"), (other, states[1], "torch")):
            update_rows(rule, own, rows, grads, state, lr=lr, impl=impl)
        for mine, theirs, kept in zip(*states, rule.states, strict=True):
            assert_close(mine, theirs, kept, factor=4 ** (step + 1))
        # What is within a rounding error of the middle of two integers may go either way.
        scale = weight.packed.read_packed(torch.arange(ROWS, device=device))[1][:, None]
        off = (values(weight) - values(other)).abs()
        assert (off <= 1.01 * scale).all()
        assert off.gt(1e-5).float().mean() < 0.01
        weight.packed.data.copy_(other.packed.data)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_row_keeps_its_scale_while_it_fits(device, impl):
    weight = table(2, 4, device, rows=4)
    every = torch.arange(4, device=device)
    for scaled, kept in ((1.0, True), (0.5, True), (0.2, False), (1.01, False)):
        start = torch.tensor([[1.0, -0.5, 0.25, 0.0]], device=device).repeat(4, 1)
        highest = weight.packed.highest(every)
        weight.packed.write_packed(every, (start * highest).round(), (1 / highest[:, 0]))
        before = weight.packed.read_packed(every)[1]
        grads = (1 - scaled) * values(weight)
        lr = torch.ones((), device=device)
        update_rows("sgd", weight, every, grads, lr=lr, impl=impl)
        after = weight.packed.read_packed(every)[1]
        assert torch.equal(before, after) == kept
        largest = values(weight).abs().amax(1)
        assert ((largest - scaled).abs() <= 0.51 * after).all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@every_format
def test_nan_and_infinity_stay_in_their_row(device, wide, impl):
    weight = table(wide, 4, device)
    before = values(weight)
    grads = torch.zeros(4, 4, device=device)
    grads[0, 1], grads[1, 3] = torch.nan, torch.inf
    rows, lr = torch.tensor([3, 39, 5, 38], device=device), torch.ones((), device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(2):  # and for good
        update_rows("sgd", weight, rows, grads, lr=lr, seed=seed, impl=impl)
        broken = values(weight).isnan().all(1)
        assert broken.nonzero()[:, 0].tolist() == [3, 39]
        assert torch.equal(values(weight)[~broken], before[~broken])
        grads.zero_()


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=pytest.mark.slow), "torch"])
def test_accumulators_in_bf16_are_rounded_without_bias(device, impl):
    weight = table(0, 4, device)
    rows, lr = torch.arange(ROWS, device=device).repeat(2), torch.zeros((), device=device)
    grads = torch.full((2 * ROWS, 4), 0.05, device=device)  # 0.01 in all; 256 + 0.01 is 256 in bf16
    state = torch.full((ROWS, 1), 256.0, dtype=torch.bfloat16, device=device)
    seed = torch.zeros((), dtype=torch.int64, device=device)
    repeats = 2000 if GPU else 500 if impl == "torch" else 40
    for _ in range(repeats):
        update_rows("rowwise_adagrad", weight, rows, grads, [state], lr=lr, seed=seed, impl=impl)
        seed += 1
    rise, expected = state.float().mean() - 256, 0.01 * repeats
    assert abs(rise - expected) < 5 * (2 * expected / ROWS) ** 0.5


@pytest.mark.usefixtures("nan_in_new_memory")
@every_format
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_look_ups_give_the_rows_and_their_gradients(device, wide, dim):
    weight = table(wide, dim, device)
    plain = values(weight).requires_grad_()
    rows = torch.randint(ROWS, (3, 6), device=device)
    for impl in ("triton", "torch"):
        found, expected = lookup(weight, rows, impl=impl), lookup(plain, rows, impl=impl)
        assert torch.equal(found, expected)
        grad = torch.randn_like(found)
        (mine,) = torch.autograd.grad(found, weight, grad)
        (theirs,) = torch.autograd.grad(expected, plain, grad)
        assert torch.equal(mine._indices(), theirs._indices())
        assert torch.equal(mine._values(), theirs._values())


SIZES = [3, 10, 27]
PARTS = [2, 4, 1]  # rows of each in the first part of the weight


def two_parts(device, **options):
    """Where the rows of the three tables lie."""
    wide = torch.tensor(PARTS, device=device)
    sizes = torch.tensor(SIZES, device=device)
    starts, narrow = wide.cumsum(0) - wide, 7 + (sizes - wide).cumsum(0) - (sizes - wide)
    return TableRows(starts, num_wide=wide, narrow_starts=narrow, **options)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("sharing", ["none", "modulo", "last"])
def test_tables_in_two_parts_use_every_row_once(device, impl, sharing):
    weight = table(7, 8, device)
    sizes = torch.tensor(SIZES, device=device)
    options = {"modulo": {"modulo": sizes}, "last": {"last": sizes - 1}}.get(sharing, {})
    tables = two_parts(device, **options)
    ids = torch.stack([torch.arange(27, device=device) % rows for rows in SIZES])
    out = lookup_tables(weight, tables, ids, impl=impl)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    rows = grad._indices()[0].view(27, 3)
    assert torch.equal(weight.packed.read(rows.reshape(-1)).view_as(out), out)
    assert sorted(rows.flatten().unique().tolist()) == list(range(ROWS))
    for column, own in enumerate(PARTS):  # the first ids, and the shared one before them
        firsts = [SIZES[column] - 1, *range(own - 1)] if sharing == "last" else range(own)
        assert rows[list(firsts), column].tolist() == list(
            range(tables.starts[column], tables.starts[column] + own)
        )


@pytest.mark.parametrize("mode", MODES)
def test_kernels_pool_packed_rows(device, assert_close, mode):
    weight = table(7, 8, device)
    plain = values(weight).requires_grad_()
    tables = two_parts(device)
    lengths = torch.tensor([0, 2, 3, 1, 4, 0], device=device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    counts = zip(SIZES, (2, 4, 4), strict=True)
    ids = torch.cat([torch.randint(n, (k,), device=device) for n, k in counts])
    of_table = torch.tensor([0] * 2 + [1] * 4 + [2] * 4, device=device)
    rows = rows_of_torch(ids, of_table, tables)
    scale = torch.rand(len(ids), device=device).requires_grad_() if mode == "sum" else None
    found = lookup_bags(weight, tables, Bags(ids, offsets, scale), mode=mode, impl="triton")
    expected = lookup_bags(
        plain, TableRows(torch.zeros_like(tables.starts[:1])), Bags(rows, offsets, scale),
        mode=mode, impl="torch",
    ).view(3, 2, 8).transpose(0, 1)  # fmt: skip
    assert_close(found, expected)
    grad = torch.randn_like(found)
    inputs = [] if scale is None else [scale]
    mine = torch.autograd.grad(found, [weight, *inputs], grad)
    theirs = torch.autograd.grad(expected, [plain, *inputs], grad)
    for one, other in zip(mine, theirs, strict=True):
        assert_close(one.to_dense(), other.to_dense(), factor=2)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_have_rows_of_their_own(again):
    weight = table(7, 8)
    before = values(weight)
    copied = again(weight)
    assert torch.equal(values(copied), before)
    weight.packed.data.zero_()
    assert torch.equal(values(copied), before)
    assert copied.shape == weight.shape
    assert packed_rows(copied) is copied.packed


def test_there_are_no_rows_for_pytorch_to_change():
    weight = table(7, 8)
    assert weight.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.add_(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    lookup(weight, torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="single memory location"):
        optimizer.step()
