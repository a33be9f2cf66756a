"""The processor, known without PyTorch: programs that only prepare data start a second earlier."""

from __future__ import annotations

import os


def cpu_count() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
