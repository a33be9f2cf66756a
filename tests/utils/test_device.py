import pytest
import torch

from dlrm.utils import device, program


def test_a_gpu_is_used_only_with_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert device.pick_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device is cuda, but Triton is not installed"):
        device.pick_device("cuda")
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    assert device.pick_device("auto") == torch.device("cuda")


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_bytes(platform, unit, monkeypatch):
    resource = pytest.importorskip("resource")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(program.sys, "platform", platform)
    assert program.peak_process_memory() == usage.ru_maxrss * unit
