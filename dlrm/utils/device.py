"""What the machine offers."""

from __future__ import annotations

import os

import torch


def cpu_count() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pick_device(name: str) -> torch.device:
    """The device of an option like ``auto``, ``cpu`` or ``cuda:1``, which becomes the current GPU.

    Under torchrun ``auto`` and ``cuda`` are the GPU of the process's number on its host.

    Raises:
        ValueError: no such device, or one for all of several processes.
    """
    local, several = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"--device is {name!r}, it must be auto, cpu, cuda or cuda:1")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"--device is {name}, but there is no CUDA GPU: use --device cpu")
    if not several:
        if device.index is not None:
            _use(device)
        return device
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
    return torch.device("cuda", local)


def _use(device: torch.device) -> None:
    """Make a GPU the current one, on which kernels start and graphs are captured."""
    last = torch.cuda.device_count() - 1
    if device.index > last:
        raise ValueError(f"--device is {device}, but the last GPU is cuda:{last}")
    torch.cuda.set_device(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has no room, on any device, or that none could have."""
    known = (MemoryError, torch.OutOfMemoryError)
    told = ("allocate memory", "Storage size calculation overflowed", "Overflow when unpacking")
    # the second from 2**63 bytes, the last from a size of 2**63
    return isinstance(error, known) or any(text in str(error) for text in told)
