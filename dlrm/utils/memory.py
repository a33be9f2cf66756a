"""Memory that is free, of this machine and of a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors on ``device`` may take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_of_machine(), _of_container())


def _of_machine() -> int:
    """Memory that is free, or used by files that can be read again."""
    if sys.platform == "win32":
        return _of_windows()
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    # macOS does not tell a process: half of the memory is a careful guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class MemoryStatus(ctypes.Structure):
    """The MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "total_page", "free_page")),
        *((name, ctypes.c_uint64) for name in ("total_virtual", "free_virtual", "extended")),
    )


def _of_windows() -> int:
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.free)


def _of_container() -> int:
    """Memory up to the limit of the control group, in which containers run; files are free."""
    for limit, used, counts, inactive in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most, now = (int((CGROUP / name).read_text()) for name in (limit, used))
            lines = (CGROUP / counts).read_text().splitlines()
        except (OSError, ValueError):  # there is no such group, or the limit is "max"
            continue
        numbers = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return max(0, most - now + int(numbers.get(inactive, 0)))
    return sys.maxsize
