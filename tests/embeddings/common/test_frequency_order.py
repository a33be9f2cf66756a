import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.embeddings.common.frequency_order import FrequencyOrder


def test_counts_are_compared_over_all_tables():
    counts = [torch.tensor([9, 5, 5, 1]), torch.tensor([7, 6]), torch.tensor([5, 2, 2])]
    order = FrequencyOrder(counts)
    assert len(order) == 9
    assert order.first(0) == [0, 0, 0]
    assert order.first(3) == [1, 2, 0]
    assert order.first(5) == [3, 2, 0]
    assert order.first(9) == [4, 2, 3]


COUNTS = st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=4)


@given(COUNTS, st.integers(0, 40))
def test_it_is_that_of_a_stable_sort_of_single_ids(counts, number):
    sizes = torch.tensor([len(own) for own in counts])
    counts = [torch.tensor(own, dtype=torch.int64) for own in counts]
    order = torch.cat(counts).argsort(descending=True, stable=True)[:number]
    table = torch.arange(len(counts)).repeat_interleave(sizes)[order]
    assert FrequencyOrder(counts).first(number) == table.bincount(minlength=len(counts)).tolist()
