"""Free memory of this machine and of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Return the bytes that new tensors on ``device`` may take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(psutil.virtual_memory().available, _of_container())


def _of_container() -> int:
    """Return the memory left in the control group of a container; cached files count as free."""
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
