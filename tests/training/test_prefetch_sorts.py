"""Look-ups that are sorted ahead: each batch's once, next to the step of the one before."""

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.kernels.lookup.peer import SortedLookups
from dlrm.kernels.update.row_sort import sort_rows
from dlrm.training.prefetch import SortPrefetcher


class Arch:
    """Tables of which peers hold one; it remembers what it was asked to do."""

    def __init__(self):
        self.sorted = []

    def sort(self, ids):
        self.sorted.append(ids)
        return [SortedLookups(sort_rows(ids.reshape(-1), 99), ids.sum(1))]


def draw(size, device, offsets=None):
    ids = torch.randint(99, (3, size), device=device)
    return Batch(torch.randn(4, size, device=device), ids, torch.ones(size, device=device), offsets)


def check(prepared, batch):
    """What a step is given are the look-ups of its batch."""
    assert prepared.batch is batch
    (lookups,) = prepared.context.lookups
    flat = batch.ids.view(-1)
    assert lookups.sorted_rows.rows.tolist() == flat.sort().values.tolist()
    assert flat[lookups.sorted_rows.order].tolist() == lookups.sorted_rows.rows.tolist()
    assert lookups.shift.tolist() == batch.ids.sum(1).tolist()


def test_each_batch_is_sorted_once(device):
    arch = Arch()
    batches = [draw(size, device) for size in (20, 20, 20, 7, 20)]
    prefetcher = SortPrefetcher(arch, device)
    for index, prepared in enumerate(prefetcher(batches)):
        assert device.type == "cuda" or len(arch.sorted) == index + 1
        check(prepared, batches[index])
        assert prefetcher.samples_held == (batches[index + 1].size if index < 4 else 0)
    if device.type == "cpu":  # a GPU replays what was captured from copies
        assert all(ids is batch.ids for ids, batch in zip(arch.sorted, batches, strict=True))


def test_what_was_sorted_stays_while_the_next_batch_is(device):
    """Recordings take turns: the look-ups of a step are read until it has ended."""
    batches = [draw(20, device) for _ in range(9)]
    last = None
    for index, prepared in enumerate(SortPrefetcher(Arch(), device)(batches)):
        if last is not None:
            check(last, batches[index - 1])
        check(prepared, batches[index])
        last = prepared


def test_the_sort_of_the_next_batch_begins_when_the_step_is_under_way(device):
    """And before anything else is asked of the source, which may wait for data."""
    arch, given = Arch(), [draw(20, device) for _ in range(3)]
    known = []

    def source():
        for batch in given:
            known.append(len(arch.sorted))
            yield batch

    assert len(list(SortPrefetcher(arch, device)(source()))) == 3
    assert known == [0, 0, 2]


def test_a_single_batch_is_sorted_before_its_step(device):
    arch = Arch()
    prefetcher = SortPrefetcher(arch, device)
    first, second, third = (draw(20, device) for _ in range(3))
    iteration = prefetcher([first, third])
    check(next(iteration), first)
    check(prefetcher.prepare(second), second)
    check(next(iteration), third)
    assert device.type == "cuda" or len(arch.sorted) == 3  # a recording calls it too


def test_what_was_sorted_for_a_step_that_never_came_is_forgotten(device):
    first, second, third = (draw(20, device) for _ in range(3))

    def source():
        yield first
        yield second
        raise OSError("damaged file")

    prefetcher = SortPrefetcher(Arch(), device)
    with pytest.raises(OSError, match="damaged"):
        list(prefetcher(source()))
    check(prefetcher.prepare(third), third)


def test_bags_of_ids_go_without(device):
    arch = Arch()
    bags = draw(20, device, offsets=torch.arange(61, device=device))
    one_hot = draw(20, device)
    first, second, third = SortPrefetcher(arch, device)([one_hot, bags, one_hot])
    check(first, one_hot)
    assert not second.context.lookups
    check(third, one_hot)
    assert len(arch.sorted) == 2
