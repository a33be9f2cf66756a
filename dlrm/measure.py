"""Times of GPU work, and what they were taken on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

Work = Callable[[], Any]


def time_captured(works: Sequence[Work], *, repeats: int = 20) -> float:
    """Median time of one of ``works`` in ms, all of them replayed in turn from one CUDA graph.

    Args:
        works: the same work on different inputs, so that none finds its own in the cache.
        repeats: replays of the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    return _median(graph.replay, repeats) / len(works)


def time_eager(works: Sequence[Work], *, repeats: int = 20) -> float:
    """Median time of one of ``works`` in ms, called from Python in turn, launches included."""

    def all_in_turn() -> None:
        for work in works:
            work()

    all_in_turn()
    return _median(all_in_turn, repeats) / len(works)


def _median(work: Work, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the device: the ceiling of what streams."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_captured([lambda: target.copy_(source)] * 4) / 1e3)


def provenance() -> dict[str, str]:
    """Device, versions, commit and date, to stand beside measured figures."""
    import triton

    root = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
    }
