"""Where a process computes."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """The device of an option like ``auto``, ``cpu`` or ``cuda:1``."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device is {name!r}, it must be auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {name}, but there is no CUDA GPU: use --device cpu")
    return device
