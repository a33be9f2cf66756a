"""Sums of what peers hold: here all of them on one device."""

import pytest
import torch

from dlrm.kernels.peer_sum import sum_peers
from tests.kernels.lookup.test_peer import ring


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("count", [1, 2500])
def test_all_peers_get_the_same_bits(device, impl, count):
    """Sums are computed in the order of the ranks, wherever they begin."""
    held = [torch.randn(count, device=device) * 10**rank for rank in range(3)]
    expected = held[0] + held[1] + held[2]
    for rank in range(3):
        out = torch.full((count,), torch.nan, device=device)
        sum_peers(ring(held, rank), rank, out, impl=impl)
        assert torch.equal(out, expected)
