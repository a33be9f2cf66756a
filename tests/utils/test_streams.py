"""Work on a second stream: after what it needs, before what needs it."""

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.data.device_prefetch import queue_on, receive
from dlrm.utils.streams import PURPOSES, side_stream_of, stream_of


def slow_sum(x):
    """A chain of matrix products that keeps a GPU busy; its result is the sum of ``x``."""
    eye = torch.eye(len(x), device=x.device)
    for _ in range(20):
        x = eye @ x
    return x.sum()


@pytest.mark.parametrize("event", [False, True])
def test_both_sides_see_what_came_before_them_or_an_event(event, device):
    side = side_stream_of(torch.ones(1, device=device).device)
    for step in range(5):
        x = torch.full((512, 512), float(step), device=device)
        total = slow_sum(x)
        begin = side.record_event() if event else None
        here = slow_sum(torch.ones_like(x)) if event else x.sum()
        with side.fork(after=begin):
            parallel = 2 * total
        side.join()
        assert (parallel + here).item() == (2 * step + (1 if event else step)) * 512 * 512


def test_backward_passes_of_both_sides_meet(device):
    side = side_stream_of(torch.ones(1, device=device).device)
    x = torch.randn(256, 256, device=device, requires_grad=True)
    with side.fork():
        parallel = slow_sum(x * x)
    here = (3 * x).sum()
    side.join()
    (parallel + here).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + 3, rtol=1e-3, atol=1e-3)


def test_without_waiting_the_side_continues_after_its_own_work(device):
    side = side_stream_of(torch.ones(1, device=device).device)
    x = torch.ones(512, 512, device=device)
    with side.fork():
        total = slow_sum(x)
    with side.fork(wait=False):
        doubled = 2 * total
    side.join()
    assert doubled.item() == 2 * 512 * 512


def test_there_is_one_side_per_device(device):
    own = torch.ones(1, device=device).device
    assert side_stream_of(own) is side_stream_of(torch.zeros(1, device=device).device)


@pytest.mark.gpu
def test_streams_for_two_purposes_are_never_the_same():
    device = torch.device("cuda")
    streams = {purpose: stream_of(device, purpose) for purpose in PURPOSES}
    assert len({stream.cuda_stream for stream in streams.values()}) == len(PURPOSES)
    same = torch.device("cuda", torch.cuda.current_device())
    for _ in range(40):  # PyTorch has 32, and begins again
        torch.cuda.Stream()
        assert {purpose: stream_of(same, purpose) for purpose in PURPOSES} == streams


@pytest.mark.gpu
def test_batches_of_many_epochs_are_loaded_on_a_stream_of_their_own(device):
    """A loader that took a new stream for each epoch would come to that of the sorts, and write its
    batches over sorted rows that an update still reads.
    """
    others = {stream_of(device, purpose).cuda_stream for purpose in PURPOSES if purpose != "loads"}

    def batches():
        assert torch.cuda.current_stream().cuda_stream not in others
        ids = torch.zeros(1, 2, dtype=torch.int64)
        yield [(Batch(torch.zeros(1, 2), ids, torch.zeros(2)).to(device), 0)]

    for _ in range(40):
        (((batch, _),),) = receive(queue_on(stream_of(device, "loads"), batches()), device)
        assert batch.labels.is_cuda


@pytest.mark.gpu
def test_a_graph_keeps_the_fork(device):
    side = side_stream_of(torch.ones(1, device=device).device)
    x = torch.ones(512, 512, device=device)

    def work():
        begin = side.record_event()
        here = x.sum()
        with side.fork(after=begin):
            parallel = slow_sum(x)
        side.join()
        return parallel, here

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parallel, here = work()
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert parallel.item() == here.item() == value * 512 * 512
