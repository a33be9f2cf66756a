"""The rows with which new ids start."""

import pytest
import torch

from dlrm.kernels.dynamic.new_rows import NewIds, SharedPieces, first_values, reset_rows
from dlrm.kernels.dynamic.slot_index import Placed
from dlrm.kernels.lookup.hashing import hashed_offsets_torch
from dlrm.kernels.lookup.tables import TableRows
from dlrm.kernels.update.cached_slots import CachedSlots, cache_of
from dlrm.kernels.update.packed import (
    PackedParameter,
    PackedRows,
    read_rows,
    stored_rows,
    write_rows,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weight_of(kind, rows, dim):
    if isinstance(kind, torch.dtype):
        return torch.full((rows, dim), 5.0, dtype=kind, device=DEVICE)
    wide = {"int8": rows, "int4": 9}[kind]
    return PackedParameter(PackedRows.empty(rows, dim, wide, DEVICE))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize(
    ("dim", "sharded", "cache"), [(1, False, 0), (6, False, 0), (6, True, 0), (6, False, 2)]
)
def test_only_the_rows_of_new_ids_are_reset(kind, dim, sharded, cache):
    if cache and kind == "int4":
        pytest.skip("rows of two widths have no cache")
    weights = [weight_of(kind, 40, dim) for _ in range(2)]
    tables = torch.tensor([[0], [1]], device=DEVICE)
    ids = torch.tensor([[3, -1, 3], [2**63 - 1, 7, 8]], device=DEVICE)
    rows = torch.tensor([[4, 5, 4], [1, 0, 12]], device=DEVICE)
    missing = torch.tensor([2, 3, 5, 4, 0, 0], dtype=torch.int32, device=DEVICE)
    number = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    few = torch.tensor([2, 1], device=DEVICE)  # so that the fourth of them got no slot
    start = TableRows(torch.tensor([0, 20], device=DEVICE))
    if sharded:  # these rows, and others elsewhere that are not reset: 4 of table 0, 1 of table 1
        held = torch.tensor([[4, 10], [1, 8]], device=DEVICE)
        start = TableRows(torch.tensor([4, 30], device=DEVICE), held=held)
    bounds = torch.tensor([0.1, 0.37], device=DEVICE)
    seed = torch.tensor(11, device=DEVICE)

    found = []
    for weight, impl in zip(weights, ("torch", "triton"), strict=True):
        before = read_rows(weight, torch.arange(40, device=DEVICE))
        states = [
            torch.ones(40, dim, device=DEVICE),
            torch.ones(40, 1, dtype=torch.bfloat16, device=DEVICE),
            torch.ones(40, dtype=torch.int32, device=DEVICE),
        ]
        placed, cached, every = Placed(rows, missing, number), None, torch.arange(40, device=DEVICE)
        if cache:  # of rows 4 and 5, of which the other values are old
            slots = torch.full((40,), -1, dtype=torch.int32, device=DEVICE)
            slots[4:6] = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
            states[2] = states[2][:, None]
            hosts = (stored_rows(weight), *states)
            tensors = [(host, cache_of(host, cache).copy_(host[:cache])) for host in hosts]
            cached = CachedSlots(slots=slots, tensors=tensors)
        new_ids = NewIds(placed, tables, ids, few, bounds)
        reset_rows(weight, states, start, new_ids, seed, cached=cached, impl=impl)
        after = read_rows(weight, every)
        if cached is not None:
            assert torch.equal(after[4:6], before[4:6])
            after = cached.read(0, every)
            if isinstance(kind, str):
                after = weight.packed.of_records(after).read(every)
            states = [cached.read(index + 1, every) for index in range(len(states))]
        new = torch.zeros(40, dtype=torch.bool, device=DEVICE)
        new[[4, 32] if sharded else [4, 21, 32]] = True
        assert torch.equal(after[~new], before[~new])
        for state in states:
            assert torch.equal(state.reshape(40, -1)[:, 0] == 0, new)
        found.append(after[new])

    own = missing[[0, 2] if sharded else [0, 1, 2]].long()
    exact = first_values(
        tables.expand(2, 3).reshape(-1)[own], ids.reshape(-1)[own], bounds, seed, dim
    )
    assert exact.abs().max() <= 0.37
    if isinstance(kind, torch.dtype):
        assert torch.equal(found[0], exact.to(kind))
        close = 2**-7 if kind is torch.bfloat16 else 0  # which Triton's interpreter cuts off
        torch.testing.assert_close(found[0], found[1], rtol=close, atol=0)
    else:  # one of several scales in PyTorch
        step = exact.abs().amax(1, keepdim=True) / (127 if kind == "int8" else 7)
        assert all(((part - exact).abs() <= 1.5 * step + 1e-6).all() for part in found)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8", "int4"], ids=str)
@pytest.mark.parametrize("cache", [0, 4])
def test_rows_that_start_from_others_copy_them_with_their_state(kind, cache):
    if cache and kind == "int4":
        pytest.skip("rows of two widths have no cache")
    weight = weight_of(kind, 40, 6)
    every = torch.arange(40, device=DEVICE)
    values = torch.randn(40, 6, device=DEVICE)
    write_rows(weight, every, values)
    ids = torch.tensor([[3, 8, 3], [5, 7, 9]], device=DEVICE)
    rows = torch.tensor([[4, 0, 4], [12, 5, 1]], device=DEVICE)  # two are shared
    missing = torch.tensor([0, 1, 3, 4], dtype=torch.int32, device=DEVICE)
    number = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    pieces = SharedPieces(torch.tensor([0, 7], device=DEVICE), size=16, start=24, number=2)
    ids_of_new = torch.tensor([3, 5], device=DEVICE)
    sources = hashed_offsets_torch(pieces.first, ids_of_new, 2, 16, start=24).view(-1)
    new = NewIds(
        Placed(rows, missing, number),
        torch.tensor([[0], [1]], device=DEVICE),
        ids,
        torch.tensor([2, 2], device=DEVICE),
        torch.ones(2, device=DEVICE),
    )
    start = TableRows(torch.zeros(2, dtype=torch.int64, device=DEVICE))

    for impl in ("torch", "triton"):
        state, cached = every[:, None].float().repeat(1, 6), None
        if cache:  # the sources, and the row of one of the new ids
            slots = torch.full((40,), -1, dtype=torch.int32, device=DEVICE)
            slots[sources[0]], slots[4] = 3, 0
            hosts = stored_rows(weight), state
            tensors = [(host, cache_of(host, cache)) for host in hosts]
            for host, own in tensors:
                own[3], own[0] = host[sources[0]], host[4]
            cached = CachedSlots(slots=slots, tensors=tensors)
        seed = torch.tensor(11, device=DEVICE)
        reset_rows(weight, [state], start, new, seed, pieces=pieces, cached=cached, impl=impl)
        found = read_rows(weight, every) if cached is None else cached.read(0, every)
        if cache and kind == "int8":
            found = weight.packed.of_records(found).read(every)
        of_state = state if cached is None else cached.read(1, every)
        source = every.clone()
        source[[4, 5, 20, 21]] = sources
        assert torch.equal(of_state[:, 0].long(), source)
        step = values.abs().amax(1)[source, None] / 100 if kind == "int8" else 0.01
        if kind == "int4":  # the first nine have 8 bits
            step = values.abs().amax(1)[source, None] / 6
        assert ((found.float() - values[source]).abs() <= step).all()


def test_first_values_fill_their_range_evenly():
    ids = torch.arange(20_000)
    values = first_values(ids * 0, ids, torch.ones(1), torch.tensor(5), 4)
    assert values.min() < -0.999
    assert values.max() > 0.999
    assert values.mean().abs() < 0.01
    assert (values.var() - 1 / 3).abs() < 0.01
    assert len(values.unique()) > 79_000
    assert torch.corrcoef(values.t()).fill_diagonal_(0).abs().max() < 0.03
