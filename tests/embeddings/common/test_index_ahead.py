"""A copy of an index that places batches before the index does."""

import copy

import pytest
import torch

from dlrm.embeddings.common.index_ahead import IndexAhead
from dlrm.kernels.dynamic.index import find_rows, place
from dlrm.kernels.dynamic.slot_index import Admission, SlotIndex
from dlrm.utils.bags import Bags


def of_step(index, few, tables, ids):
    """The rows that a step looks up; of tables that share rows, new ids get theirs after it."""
    before = find_rows(index, few, tables, ids)
    after = place(index, few, tables, ids).rows
    return torch.stack([after] if index.salts is None else [before, after])


def batch_of(size, device):
    return (torch.rand(2, size, device=device) ** 3 * 500).long()


@pytest.mark.parametrize("sharing", [0, 2])
@pytest.mark.parametrize("bags", [False, True])
def test_it_gives_the_rows_of_the_steps_that_follow(bags, sharing, device):
    slots = [260] if sharing else [60, 200]
    index = SlotIndex.empty(slots, admission=Admission(after=2), device=device, sharing=sharing)
    few, tables = torch.tensor([1, 3], device=device), torch.arange(2, device=device)[:, None]
    ahead = IndexAhead(index, few)
    for _ in range(3):  # windows of batches, some of one shape, some of others
        ahead.follow(index)
        batches = [batch_of(size, device) for size in (64, 64, 9, 64, 65, 64, 9, 9, 64)]
        if bags:
            coming = [Bags.one_each(ids) for ids in batches]
            rows = [
                ahead.place_bags(each.tables(2), each.ids, each.offsets[-1:]).unflatten(1, (2, -1))
                for each in coming
            ]
        else:
            rows = [ahead.place(tables, ids) for ids in batches]
        for ids, found in zip(batches, rows, strict=True):
            assert torch.equal(of_step(index, few, tables, ids), found)
    assert index.counts[2] > 0


def test_a_copy_has_none(device):
    index = SlotIndex.empty([60], device=device)
    assert copy.deepcopy({"ahead": IndexAhead(index, index.buckets)}) == {"ahead": None}
