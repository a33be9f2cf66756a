"""The memory that is free, on a machine and in a container."""

from types import SimpleNamespace

import pytest
import torch

from dlrm.utils import device
from dlrm.utils.device import free_memory

CPU = torch.device("cpu")


def test_is_the_memory_of_this_machine():
    free = free_memory(CPU)
    assert 1 << 26 < free < 1 << 50


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1 GB available, and a directory for its control group."""
    available = SimpleNamespace(available=1 << 30)
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    return tmp_path


def test_on_a_machine_without_containers(machine):
    assert free_memory(CPU) == 1 << 30
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("123456\n")
    assert free_memory(CPU) == 1 << 30


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_a_container(machine, version):
    names = ["memory.max", "memory.current", "memory.stat"]
    if version == 1:
        (machine / "memory").mkdir()
        names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"]
        names = [f"memory/{name}" for name in names]
    inactive = "inactive_file" if version == 2 else "total_inactive_file"
    for name, text in zip(names, ("300000\n", "120000\n", f"{inactive} 20000\n"), strict=True):
        (machine / name).write_text(text)
    assert free_memory(CPU) == 200_000
    (machine / names[1]).write_text("400000\n")
    assert free_memory(CPU) == 0


@pytest.mark.gpu
def test_of_a_gpu_with_what_the_allocator_holds():
    device = torch.device("cuda")
    before = free_memory(device)
    tensor = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert before - free_memory(device) >= 1 << 28
    del tensor
    assert abs(free_memory(device) - before) < 1 << 26
