"""CPU cores, GPUs and memory of this machine."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def pick_device(name: str) -> torch.device:
    """Return the device ``auto``, ``cpu``, ``cuda`` or ``cuda:1``; make a GPU the current one.

    Under torchrun, ``auto`` and ``cuda`` mean the GPU with the local rank of the process.

    Raises:
        ValueError: there is no such device, or one GPU is named for several processes.
    """
    # Triton can be missing where there is a GPU, as on Windows.
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and find_spec("triton") else "cpu"
    try:
        device = torch.device(name)
        usable = device.type in ("cpu", "cuda")
    except RuntimeError:
        usable = False
    if not usable:
        raise ValueError(f"--device is {name!r}, it must be auto, cpu, cuda or cuda:1")
    if device.type == "cpu":
        return device

    if not torch.cuda.is_available():
        raise ValueError(f"--device is {name}, but there is no CUDA GPU: use --device cpu")
    if not find_spec("triton"):
        raise ValueError(
            f"--device is {name}, but Triton is not installed, which the GPU's kernels are written "
            "in: install it, or use --device cpu"
        )

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return _gpu_of_process(device, name)

    if device.index is not None:
        last = torch.cuda.device_count() - 1
        if device.index > last:
            raise ValueError(f"--device is {device}, but the last GPU is cuda:{last}")
        torch.cuda.set_device(device)  # kernels run there, and graphs are captured
    return device


def _gpu_of_process(device: torch.device, name: str) -> torch.device:
    """Return the GPU of this process, one of several of a job."""
    if device.index is not None:
        raise ValueError(
            f"--device is {name} for every process: use --device cuda, and CUDA_VISIBLE_DEVICES to "
            "choose among the GPUs"
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > torch.cuda.device_count():
        raise ValueError(
            f"there are {processes} processes on this host and {torch.cuda.device_count()} GPUs: "
            "lower --nproc-per-node, or use --device cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on any device."""
    of_memory = (MemoryError, torch.OutOfMemoryError)
    # The second text is for 2**63 bytes, the last for a size of 2**63.
    texts = ("allocate memory", "Storage size calculation overflowed", "Overflow when unpacking")
    return isinstance(error, of_memory) or any(text in str(error) for text in texts)


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
