"""Row updates and look-ups through a cache, by the kernels: the bits of those without one."""

import itertools

import pytest
import torch

from dlrm.kernels.cached_rows import CachedRows, cached_rows
from dlrm.kernels.host import mapped
from dlrm.kernels.rows import update_rows
from dlrm.rules import RULES, make_rule

ROWS, DIM = 60, 5


def in_host_memory(value, device):
    """The same values in host memory, as a tensor of the device."""
    if device.type == "cpu":
        return value.clone()
    return mapped(value.shape, value.dtype, device)[1].copy_(value)


def make(device, capacity, rule, dtype=torch.float32):
    """Rows, and the same rows behind a cache, each with its states."""
    rule = make_rule(rule)
    value = torch.randn(ROWS, DIM, device=device).to(dtype)
    cached = CachedRows(in_host_memory(value, device), capacity, half_life=3, impl="triton")
    cached.start()
    widths = [1 if per_row else DIM for per_row in rule.states.values()]
    states = [torch.zeros(ROWS, width, device=device) for width in widths]
    return rule, value, states, cached, [cached.new_rows(width, torch.float32) for width in widths]


@pytest.mark.parametrize(
    ("rule", "capacity"), [*((rule, 7) for rule in RULES), ("adam", 0), ("adam", ROWS)]
)
def test_updates_equal_those_without_a_cache(device, rule, capacity):
    rule, value, states, cached, host_states = make(device, capacity, rule)
    weight, lr = cached.tensors[0][0], torch.tensor(0.1, device=device)
    for index in range(4):
        rows = (torch.rand(20, device=device) ** 2 * ROWS).long()
        grads = torch.randn(20, DIM, device=device)
        found = cached.lookup(rows[None], sparse=True, training=True)
        assert torch.equal(found[:, 0], value[rows]), index
        update_rows(rule, value, rows, grads, states, lr=lr, impl="triton")
        update_rows(rule, weight, rows, grads, host_states, lr=lr, cached=cached, impl="triton")
    assert cached.index.owners.ge(0).sum() >= min(capacity, 20)
    cached.flush()
    for mine, other in zip([weight, *host_states], [value, *states], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_beside_the_step_change_nothing(device, dtype):
    rule, value, states, cached, host_states = make(device, 20, "adagrad", dtype)
    weight, lr = cached.tensors[0][0], torch.tensor(0.1, device=device)
    seeds = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    batches = [(torch.rand(50, device=device) ** 2 * ROWS).long() for _ in range(301)]
    for index, (rows, coming) in enumerate(itertools.pairwise(batches)):
        grads = torch.randn(50, DIM, device=device)
        cached.begin_round(None if index else (rows[None], None), (coming[None], None))
        found = cached.lookup(rows[None], sparse=True, training=True, in_round=True)
        assert torch.equal(found[:, 0], value[rows])
        update_rows(rule, value, rows, grads, states, lr=lr, seed=seeds[0])
        update_rows(rule, weight, rows, grads, host_states, lr=lr, cached=cached, seed=seeds[1])
    cached.flush()
    assert torch.equal(weight, value)
    assert torch.equal(host_states[0], states[0])


def test_the_cache_is_found_at_its_parameter():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert cached_rows(weight) is None
    weight.cached_rows = CachedRows(weight, 1)
    assert cached_rows(weight) is weight.cached_rows
