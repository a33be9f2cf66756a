"""Tables in host memory with a cache of rows: the same as dense ones to the last bit."""

import copy
import itertools
import pickle
import weakref

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.embeddings import build
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.offload import row_cache
from dlrm.kernels.offload.pinned_memory import in_host_memory
from dlrm.kernels.update.packed import stored_rows
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.training.step import TrainStep
from dlrm.utils.bags import Bags
from tests.kit import combinations, optimizers_of

SIZES = [7, 40, 3]
DIM = 4
CACHES = [0, 1, 9, 30, 10**6]  # rows; a batch of 8 has up to 24 distinct ones of 50
SOME = (1, 2, 4, 0)  # batches of prefetch windows, 0 for none


def pair(rule="sgd", cache_rows=9, dtype=torch.float32, impl=None, **options):
    """A dense group and an offloaded one with the same rows, each with its optimizer."""
    groups, optimizers = [], []
    for kind, own in (("dense", {}), ("offload", {"cache_rows": cache_rows, "half_life": 4})):
        torch.manual_seed(3)
        packed = dtype if isinstance(dtype, str) else None
        group = build(kind, SIZES, DIM, dtype=packed, **own)
        group = group if packed else group.to(dtype)
        if kind == "offload":
            group.cached.impl = impl
        groups.append(group)
        optimizers.append(RowOptimizer(group.parameters(), rule, lr=0.1, **options))
    return groups, optimizers


def draw(batch=8):
    """Skewed ids, as a batch has them."""
    rows = torch.tensor(SIZES)[:, None]
    return (torch.rand(len(SIZES), batch) ** 2 * rows).long()


def step(group, optimizer, *batches, context=NO_CONTEXT):
    """Train a group on the sum of some batches; returns its output for the last one."""
    for ids in batches:
        out = group(ids, context=context)
        (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.detach()


def step_alike(groups, optimizers, *batches, context=NO_CONTEXT):
    """Train both groups on some batches; their outputs must be equal."""
    pairs = zip(groups, optimizers, strict=True)
    assert torch.equal(*(step(*pair, *batches, context=context) for pair in pairs))


def train(groups, optimizers, steps, windows=SOME):
    """Train both groups alike, in prefetch windows of so many batches."""
    sizes = list(itertools.islice(itertools.cycle(windows), steps))
    batches = [[draw() for _ in range(max(size, 1))] for size in sizes]
    done = 0
    for index, now in enumerate(batches):
        context = begin_window(groups[1], sizes, batches, index)
        for ids in now:
            step_alike(groups, optimizers, ids, context=context)
        done += len(now)
        if done >= steps:
            break


def begin_window(group, sizes, batches, index):
    """Begin a window, which the one before knew of; returns the context of its look-ups."""
    if not sizes[index]:
        return NO_CONTEXT
    now = [] if index and sizes[index - 1] else batches[index]
    last = index + 1 == len(sizes) or not sizes[index + 1]
    coming = [] if last else batches[index + 1]
    group.begin_window(now, coming)
    return LookupContext(rows_fetched=True)


def assert_equal_states(groups, optimizers):
    dense, offload = groups
    assert torch.equal(dense.state_dict()["weight"], offload.state_dict()["weight"])
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, states[1][index][name]), name


EQUAL = [
    *(("adam", rows, torch.float32, windows, {}) for rows in CACHES for windows in [(3,), SOME]),
    *(("adam", 9, torch.float32, windows, {}) for windows in [(1,), (0,)]),
    *((rule, 6, torch.float32, SOME, {}) for rule in RULES if rule != "adam"),
    ("sgd", 6, torch.float32, SOME, {"momentum": 0.9, "weight_decay": 0.1}),
    ("rmsprop", 6, torch.float32, SOME, {"momentum": 0.5}),
    *((rule, 6, torch.bfloat16, SOME, {}) for rule in ("sgd", "adagrad")),  # rounded by chance
    *((rule, 6, "int8", SOME, {}) for rule in ("sgd", "adagrad")),
]


@pytest.mark.parametrize(("rule", "cache_rows", "dtype", "windows", "options"), EQUAL)
def test_training_equals_dense_to_the_last_bit(rule, cache_rows, dtype, windows, options):
    groups, optimizers = pair(rule, cache_rows, dtype, **options)
    train(groups, optimizers, 40, windows)
    assert_equal_states(groups, optimizers)


@pytest.mark.parametrize(
    ("cache_rows", "dtype"),
    [
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        (9, torch.float32),
        (9, "int8"),
        (30, torch.float32),
    ],
)
def test_the_kernels_move_rows_as_pytorch_does(device, cache_rows, dtype):
    if device.type == "cuda":
        pytest.skip("the interpreter's; on a GPU see below")
    groups, optimizers = pair("adam", cache_rows, dtype, impl="triton")
    train(groups, optimizers, 12)
    assert_equal_states(groups, optimizers)


def test_gradients_of_several_look_ups_may_be_accumulated():
    groups, optimizers = pair("adagrad", 9)
    for _ in range(40):
        step_alike(groups, optimizers, draw(), draw(), draw())
    assert_equal_states(groups, optimizers)


def test_evaluation_reads_the_present_rows_and_moves_none():
    groups, optimizers = pair("adagrad", 9)
    train(groups, optimizers, 10)
    dense, offload = (group.eval() for group in groups)
    before = offload.cached.index.slot_to_row.clone(), offload.cached.index.traffic.clone()
    for _ in range(5):
        ids = draw(30)
        assert torch.equal(dense(ids), offload(ids))
    assert torch.equal(dense.to_dense(1), offload.to_dense(1))
    assert torch.equal(before[0], offload.cached.index.slot_to_row)
    assert torch.equal(before[1], offload.cached.index.traffic)


def test_ids_may_lie_in_memory_in_any_order():
    (dense, offload), _ = pair()
    turned = torch.arange(6).view(2, 3).t()
    assert torch.equal(offload.rows(1, turned), dense.rows(1, turned))
    one_hot = draw(2).t().contiguous().t()
    bags = Bags(torch.tensor([1, 2, 0]), torch.arange(4))
    offload.begin_window([one_hot, bags], [])
    assert offload.rows_ready


def test_bags_are_fetched_ahead_too():
    groups, optimizers = pair("adagrad", 9)
    bags = []
    for _ in range(21):
        offsets = torch.randint(1, 4, (len(SIZES) * 5,)).cumsum(0)
        offsets = torch.cat([offsets.new_zeros(1), offsets])
        bags.append(Bags(torch.randint(3, (int(offsets[-1]),)), offsets))
    for index in range(20):
        if index % 2 == 0:
            now = [] if index else bags[:2]
            groups[1].begin_window(now, bags[index + 2 : index + 4])
        step_alike(groups, optimizers, bags[index], context=LookupContext(rows_fetched=True))
    assert_equal_states(groups, optimizers)


@combinations(cache_rows=[0, 5, 50], dtype=[torch.float32, "int8"])
def test_state_loads_into_any_cache_and_into_dense(cache_rows, dtype):
    groups, optimizers = pair("adam", 9, dtype)
    train(groups, optimizers, 20)
    states = [copy.deepcopy(part.state_dict()) for part in (groups[1], optimizers[1])]
    others = pair("adam", cache_rows, dtype)
    train(*others, 7)  # so that there is something in the cache to forget
    for group, optimizer in zip(*others, strict=True):
        group.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    train(*others, 20)
    assert_equal_states(*others)


def test_a_state_may_be_overwritten_in_place():
    groups, optimizers = pair("adagrad", 9)
    train(groups, optimizers, 5)
    for group, optimizer in zip(groups, optimizers, strict=True):
        group.state_dict()["weight"].fill_(0.5)
        optimizer.state_dict()["state"][0]["sum"].zero_()
    train(groups, optimizers, 5)
    assert_equal_states(groups, optimizers)


def test_loaded_rows_replace_cached_ones():
    (_, offload), optimizers = pair("sgd", 50)
    step(offload, optimizers[1], draw())
    weights = [torch.randn(rows, DIM) for rows in SIZES]
    offload.load_dense(weights)
    assert torch.equal(offload.to_dense(1), weights[1])
    step(offload, optimizers[1], draw())
    offload.reset_parameters()
    assert offload.to_dense(1).abs().max() <= 40**-0.5


def test_loaded_rows_are_copied_into_the_cached_parameter():
    groups, optimizers = pair()
    train(groups, optimizers, 3)
    weight, other = groups[1].weight, torch.randn(sum(SIZES), DIM)
    groups[1].load_state_dict({"weight": other}, assign=True)
    assert groups[1].weight is weight
    ids = draw()
    assert torch.equal(groups[1](ids)[0, 0], other[ids[0, 0]])


def test_a_trained_group_may_be_copied_converted_and_trained_by_any_optimizer():
    (dense, offload), optimizers = pair("sgd", 9)
    train((dense, offload), optimizers, 10)
    twin = copy.deepcopy(offload)
    assert torch.equal(twin.to_dense(1), dense.to_dense(1))
    assert not twin.cached.active
    others = [torch.optim.SGD(group.parameters(), lr=0.1) for group in (dense, twin)]
    step_alike((dense, twin), others, draw())  # these know nothing of caches: the copy's rests
    assert torch.equal(dense.to_dense(1), twin.to_dense(1))
    step(offload, optimizers[1], draw())
    wide = offload.double()
    assert wide.to_dense(1).dtype == torch.float64
    again = RowOptimizer(wide.parameters(), "adagrad")
    step(wide, again, draw())
    assert wide.cached.active


def pickled(both):
    return pickle.loads(pickle.dumps(both))


@combinations(
    again=[copy.deepcopy, pickled], optimizer_first=[False, True], dtype=[torch.float32, "int8"]
)
def test_a_group_and_its_optimizer_may_be_copied_together(again, optimizer_first, dtype):
    (_, group), (_, optimizer) = pair("adam", 9, dtype)
    for _ in range(10):
        step(group, optimizer, draw())
    both = (optimizer, group) if optimizer_first else (group, optimizer)
    twins = again(both)
    twin, of_twin = twins[::-1] if optimizer_first else twins
    assert torch.equal(twin.to_dense(1), group.to_dense(1))
    for _ in range(5):
        step_alike((group, twin), (optimizer, of_twin), draw())
    assert torch.equal(twin.to_dense(1), group.to_dense(1))
    again = RowOptimizer(twin.parameters(), "sgd", lr=0.1)  # the copy's cache works, too
    step(twin, again, draw())
    assert twin.cached.active


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_copy_is_made_in_host_memory(device, dtype):
    group = build("offload", [300_000], 16, dtype=dtype).to(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    twin = copy.deepcopy(group)
    assert in_host_memory(stored_rows(twin.weight))
    assert torch.cuda.max_memory_allocated() - before < group.footprint()[0]["host"] / 10
    ids = torch.arange(0, 300_000, 1000, device=device)
    assert torch.equal(twin.rows(0, ids), group.rows(0, ids))


def test_another_optimizer_may_take_over():
    groups, optimizers = pair("adagrad", 9)
    train(groups, optimizers, 10)
    others = [torch.optim.SGD(group.parameters(), lr=0.1) for group in groups]
    later = [RowOptimizer(group.parameters(), "adam", lr=0.1) for group in groups]
    for steppers in (later, others, optimizers, later):
        for _ in range(5):
            step_alike(groups, steppers, draw())
        assert torch.equal(groups[0].to_dense(1), groups[1].to_dense(1))


def test_a_cache_that_has_stopped_holds_no_memory():
    (_, offload), (_, optimizer) = pair()
    step(offload, optimizer, draw())
    index = weakref.ref(offload.cached.index.row_to_slot)
    offload.double()
    assert index() is None
    assert set(offload.footprint()[0]) == {"host"}
    optimizer = RowOptimizer(offload.parameters(), lr=0.1)
    step(offload, optimizer, draw())
    assert set(offload.footprint()[0]) == {"host", "cache", "index"}


def test_dense_gradients_update_cached_rows_too():
    torch.manual_seed(0)
    groups = [build(kind, SIZES, DIM, sparse=False) for kind in ("dense", "offload")]
    groups[1].load_state_dict(groups[0].state_dict())
    optimizers = [RowOptimizer(group.parameters(), "adagrad", lr=0.1) for group in groups]
    for _ in range(5):
        step_alike(groups, optimizers, draw())
    assert torch.equal(groups[0].to_dense(1), groups[1].to_dense(1))


def test_the_warmest_rows_stay():
    group = build("offload", [100], DIM, cache_rows=20)
    optimizer = RowOptimizer(group.parameters(), "sgd", lr=0.1)
    hot = torch.arange(15)
    for index in range(40):
        cold = 15 + (torch.arange(5) + 5 * index) % 85  # each once in 17 steps
        ids = torch.cat([hot, cold])[None] if index % 2 else cold[None]
        step(group, optimizer, ids)
    owners = set(group.cached.index.slot_to_row.tolist())
    assert owners.issuperset(hot.tolist())


def test_small_tables_stay_in_the_cache_as_a_whole():
    (_, group), (_, optimizer) = pair("adagrad", 30)  # 10 of them would be more than a quarter
    for index in range(20):
        batches = [draw() for _ in range(3)]
        group.begin_window(batches, [])
        assert torch.equal(group.cached.slots[-3:], torch.arange(3, dtype=torch.int32))
        for ids in batches:
            step(group, optimizer, ids, context=LookupContext(rows_fetched=True))
        if index % 5 == 3:  # the cache is empty afterwards
            group.state_dict()
            assert (group.cached.slots < 0).all()
    stats = group.cache_stats()
    assert stats["lookups"] == 20 * 3 * 24
    assert 1 / 3 < stats["hits"] / stats["lookups"] < 0.9
    assert stats["bytes_in"] > stats["bytes_out"] > 0


def test_stats_and_footprint_tell_what_the_cache_does():
    group = build("offload", [10], 4, cache_rows=4)
    assert group.footprint() == [{"host": 160}]
    assert group.cache_stats() == {}
    optimizer = RowOptimizer(group.parameters(), "adagrad")
    index = 4 * 10 + 4 * 3 * 4 + 4 + 2 * 4 + 5 * 8  # of rows, of slots, clock, demand, counters
    assert group.footprint() == [{"host": 160, "cache": 4 * 4 * 4 * 2, "index": index}]
    for ids in ([[0, 1, 1]], [[1, 2, 3]], [[4, 5, 6]]):
        step(group, optimizer, torch.tensor(ids))
    stats = group.cache_stats()
    assert (stats["lookups"], stats["hits"], stats["steps"]) == (9, 1, 3)
    assert stats["bytes_in"] == (2 + 2 + 3) * 32  # a row and its state
    assert stats["bytes_out"] == 3 * 32


def test_a_window_is_as_long_as_the_cache_and_memory_on_the_way_allow(monkeypatch):
    small, large = (build("offload", [10**6], 1, cache_rows=rows) for rows in (1000, 10**5))
    assert [small.window_size(lookups) for lookups in (1, 300, 1000, 10**4)] == [96, 6, 1, 1]
    assert [large.window_size(lookups) for lookups in (1, 10**4, 10**5, 10**6)] == [96, 19, 1, 1]
    assert build("offload", [10**6], 1, cache_rows=0).window_size(1) == 0
    whole = build("offload", [10**6], 1, cache_rows=10**6)
    assert [whole.window_size(lookups) for lookups in (10**6, 10**7, 10**9)] == [32, 3, 1]

    # The GPU may have too little memory for so many rows.
    monkeypatch.setattr(row_cache, "slots_that_fit", lambda dim, device: 1000)
    RowOptimizer(large.parameters(), "sgd")
    assert [large.window_size(lookups) for lookups in (1, 300, 1000, 10**4)] == [96, 6, 1, 1]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("distinct", "batches"), [(1, 48), (8, 6), (19, 2), (50, 1)])
def test_windows_follow_the_rows_that_they_need(device, impl, distinct, batches):
    """The rows of two windows take up to 97 of 100 slots."""
    with device:
        group = build("offload", [10_000], 1, cache_rows=100)
    group.cached.impl = impl if device.type == "cpu" else None
    RowOptimizer(group.parameters(), "sgd")
    now = [torch.arange(distinct, device=device).repeat(10)[None]]
    for first in range(1000, 7000, 1000):  # a batch looks up each of its rows 10 times
        size = group.window_size(10 * distinct)
        rows = torch.arange(first, first + size * distinct, device=device).repeat(10)
        group.begin_window(now, [rows[None]])
        now = []
        if device.type == "cuda":
            torch.cuda.synchronize()
    assert group.window_size(10 * distinct) == batches


@pytest.mark.gpu
def test_a_captured_step_fetches_ahead_and_equals_dense(device):
    losses, tables = [], []
    for kind, options in (("dense", {}), ("offload", {"cache_rows": 700})):
        torch.manual_seed(0)
        with device:
            model = DLRM(
                4, [50, 9000, 400], 8, [(kind, options)] * 3, bottom_mlp=[16], top_mlp=[16]
            )
        run = TrainStep(model, optimizers_of(model, "adagrad", lr=0.05), mode="graph")
        sizes = torch.tensor([[50], [9000], [400]], device=device)
        batches = []
        for _ in range(31):
            ids = (torch.rand(3, 256, device=device) ** 3 * sizes).long()
            batches.append(Batch(torch.randn(4, 256, device=device), ids, ids[0].lt(9).float()))
        losses.append([run(batch)["loss"].item() for batch in run.prefetcher(batches)])
        tables.append(model.sparse_arch.groups[0].to_dense(1))
    assert losses[0] == losses[1]
    assert torch.equal(*tables)
    stats = model.sparse_arch.groups[0].cache_stats()
    assert stats["bytes_in"] > stats["bytes_out"] > 0
