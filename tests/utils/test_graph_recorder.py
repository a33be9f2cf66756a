"""Recorded work."""

import gc

import pytest
import torch

from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.utils.graph_recorder import GraphRecorder


@pytest.mark.gpu
def test_pinned_memory_in_garbage_ends_no_capture(device):
    ones, garbage = torch.ones(5, device=device), []
    garbage.append((garbage, mapped_tensor([5])))

    def run():
        out = ones + 1
        assert [[] for _ in range(100_000)]  # Python collects garbage by the number of objects
        return out

    recorder = GraphRecorder(torch.device(device))
    recorder.warm_up(run)
    gc.collect()
    del garbage
    replay, out = recorder.record(run)
    replay()
    assert out.tolist() == [2] * 5
    assert gc.isenabled()
