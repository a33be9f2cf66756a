"""The hash is uniform, and its offsets are the same in Triton and PyTorch."""

import pytest
import torch

from dlrm.kernels.lookup.hashing import hash32, hashed_offsets, hashed_offsets_torch


def test_different_keys_stay_different():
    assert len(hash32(torch.arange(1_000_000)).unique()) == 1_000_000
    assert hash32(torch.tensor(0)) == 0
    assert hash32(torch.arange(-5, 5)).min() >= 0
    assert hash32(torch.tensor([2**40 + 3, 2**62])).max() < 2**32


def test_every_bit_of_a_key_turns_half_of_the_bits():
    keys = torch.randint(2**32, (2000,))
    for bit in range(32):
        turned = hash32(keys) ^ hash32(keys ^ (1 << bit))
        share = sum(((turned >> place) & 1).double().mean() for place in range(32)) / 32
        assert share == pytest.approx(0.5, abs=0.03), bit


def test_neighbours_are_spread_evenly():
    counts = (hash32(torch.arange(100_000)) % 97).bincount(minlength=97).double()
    assert ((counts - counts.mean()).square() / counts.mean()).sum() < 97 + 4 * (2 * 97) ** 0.5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("pieces", "block"), [(1, 1), (4, 1), (3, 1), (1, 64), (1, 10**12)])
@pytest.mark.parametrize(
    ("first", "ids"),
    [((3, 1), (3, 700)), ((7,), (90, 7)), ((50,), (50,)), ((), (2, 3)), ((), ()), ((2, 1), (2, 0))],
)
def test_places_are_those_of_pytorch(first, ids, pieces, block, dtype, device):
    first = torch.randint(5000, first, device=device)
    ids = torch.randint(2**31 - 1, ids, device=device).to(dtype)
    expected = hashed_offsets_torch(first, ids, pieces, 5000, block=block)
    found = hashed_offsets(first, ids, pieces, 5000, block=block, impl="triton")
    assert found.shape == (*ids.shape, pieces)
    assert torch.equal(found, expected)
    assert ((found >= 0) & (found < 5000)).all()


def test_shapes_that_only_broadcast_work_too(device):
    first, ids = torch.tensor([[5], [9]], device=device), torch.arange(7, device=device)
    found = hashed_offsets(first, ids, 2, 100, impl="triton")
    assert torch.equal(found, hashed_offsets_torch(first, ids, 2, 100))


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_an_id_come_before_the_array(transposed, device):
    first = torch.tensor([0, 5, 9], device=device)
    ids, rows = torch.randint(2**62, (2, 3, 40), device=device)
    ids, rows = ids.t(), (rows % 30).t()
    if not transposed:
        ids, rows = ids.contiguous(), rows.contiguous()
    given = {"start": 100, "rows": rows, "few": 20}
    found = hashed_offsets(first, ids, 4, 60, impl="triton", **given)
    assert torch.equal(found, hashed_offsets_torch(first, ids, 4, 60, **given))
    own = rows >= 20
    assert torch.equal(found[own][:, 0], 4 * (rows[own] - 20))
    assert ((found[~own] >= 100) & (found[~own] < 160)).all()
