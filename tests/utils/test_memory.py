"""The memory that is free, on a machine and in a container."""

import sys

import pytest
import torch

from dlrm.utils import memory
from dlrm.utils.memory import free_memory

CPU = torch.device("cpu")


def test_is_the_memory_of_this_machine():
    free = free_memory(CPU)
    assert 1 << 26 < free < 1 << 50


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1 GB available of 2 GB, and a directory for its control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
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


def test_guess_where_nothing_is_told(machine, monkeypatch):
    monkeypatch.setattr(memory, "MEMINFO", machine / "none")
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__, raising=False)
    assert free_memory(CPU) == 4096 * 500


@pytest.mark.gpu
def test_of_a_gpu_with_what_the_allocator_holds():
    device = torch.device("cuda")
    before = free_memory(device)
    tensor = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert before - free_memory(device) >= 1 << 28
    del tensor
    assert abs(free_memory(device) - before) < 1 << 26
