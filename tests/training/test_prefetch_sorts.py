"""Look-ups that are sorted ahead: each batch's once, in the same place, whatever was announced."""

from contextlib import suppress

import torch

from dlrm.data.batch import Batch
from dlrm.distributed.peer_lookup import SortedLookups
from dlrm.kernels.update.row_sort import sort_rows
from dlrm.training.prefetch import SortPrefetcher


class Arch:
    """Tables of which peers hold one; it remembers what it was asked to do."""

    def __init__(self):
        self.sorted, self.used = [], []

    def sort(self, ids):
        self.sorted.append(ids)
        return [SortedLookups(sort_rows(ids.reshape(-1), 99), ids.sum(1))]

    def use(self, lookups):
        self.used = list(lookups)


def draw(size, device, offsets=None):
    ids = torch.randint(99, (3, size), device=device)
    return Batch(torch.randn(4, size, device=device), ids, torch.ones(size, device=device), offsets)


def check(arch, batch):
    """What the step under way is given are the look-ups of its batch."""
    (lookups,) = arch.used
    flat = batch.ids.view(-1)
    assert lookups.plan.rows.tolist() == flat.sort().values.tolist()
    assert flat[lookups.plan.order].tolist() == lookups.plan.rows.tolist()
    assert lookups.shift.tolist() == batch.ids.sum(1).tolist()
    return [tensor.data_ptr() for tensor in lookups.tensors]


def test_each_batch_is_sorted_once_and_read_in_one_place(device):
    arch = Arch()
    sorts = SortPrefetcher(arch, device)
    batches = [draw(size, device) for size in (20, 20, 20, 7, 20)]
    places = []
    for index, batch in enumerate(batches):
        with sorts.step(batch, batches[index + 1 :]):
            assert len(arch.sorted) == index + 1
            places.append(check(arch, batch))
        assert not arch.used
    assert [ids is batch.ids for ids, batch in zip(arch.sorted, batches, strict=True)] == [True] * 5
    assert places[0] == places[1] == places[2] == places[4] != places[3]


def test_a_batch_that_was_not_announced_is_sorted_before_its_step(device):
    arch = Arch()
    sorts = SortPrefetcher(arch, device)
    first, second, third = (draw(20, device) for _ in range(3))
    with sorts.step(first, [third]):
        pass
    with sorts.step(second, []):
        check(arch, second)
    with sorts.step(third, []):
        check(arch, third)
    assert len(arch.sorted) == 4


def test_bags_of_ids_go_without(device):
    arch = Arch()
    sorts = SortPrefetcher(arch, device)
    bags = draw(20, device, offsets=torch.arange(61, device=device))
    one_hot = draw(20, device)
    with sorts.step(one_hot, [bags]):
        check(arch, one_hot)
    with sorts.step(bags, [one_hot]):
        assert not arch.used
    assert len(arch.sorted) == 2
    with suppress(KeyError), sorts.step(one_hot, []):
        check(arch, one_hot)
        raise KeyError
    assert not arch.used
    assert len(arch.sorted) == 2
