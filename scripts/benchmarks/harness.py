"""Timers, the environment of a measurement, and its record as JSON, for every benchmark."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dlrm.utils.atomic import atomic_write
from dlrm.utils.cpus import cpu_count

ROOT = Path(__file__).parents[2]
LOAD_BEFORE = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
"""Load when the program started: above 0 if other programs ran too. Unknown on Windows."""
DIGITS = 5  # of the figures in a record
READIES = 10  # runs of works that something must be made ready for


class Record(dict[str, Any]):
    """The result of a benchmark, written again after each row so that a stopped run has one too.

    Args:
        output: the JSON file; None: print the rows only.
    """

    def __init__(self, output: Path | None = None) -> None:
        super().__init__()
        self.output = output

    def note(self, **values: Any) -> None:
        """Add values that hold for the whole benchmark, and write the file."""
        self.update({name: rounded(value) for name, value in values.items()})
        self.save()

    def add(self, row: Mapping[str, Any], to: str = "results", show: Sequence[str] = ()) -> None:
        """Append a row to a list of results, print it, and write the file.

        Args:
            row: figures by name.
            to: the list.
            show: what to print of the row; nothing: all.
        """
        kept = rounded(dict(row))
        self.setdefault(to, []).append(kept)
        print(json.dumps({name: kept[name] for name in show or kept if name in kept}), flush=True)
        self.save()

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.output is not None:
            write(self.output, self)


def rounded(value: Any) -> Any:
    """Numbers, also inside dictionaries and lists, with the digits of a measurement."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result and its environment as JSON, atomically; NaN and infinity become null."""
    path = Path(path)
    text = json.dumps({"environment": environment(), **result})
    plain = json.loads(text, parse_constant=lambda _: None)

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(plain, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """The machine, the versions, the commit and the date of a measurement.

    ``$DLRM_COMMIT`` names the commit where the project is a copy without its git history.
    """
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "pyarrow": pa.__version__}
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        versions["triton"] = version("triton")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "cpu": _cpu_name(),
        "cores": cpu_count(),
        "load_before": LOAD_BEFORE,
        "versions": versions,
        "commit": os.environ.get("DLRM_COMMIT") or _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(FileNotFoundError):  # a container may lack git
        git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return git.stdout.strip() or None
    return None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu_milliseconds(run: Callable[[int], object], *, warm_up: int = 10, steps: int = 50) -> float:
    """Median milliseconds of ``run(i)`` on the GPU over ``steps`` calls, measured with events.

    Unlike ``triton.testing.do_bench``, which flushes the cache before each call and so hides its
    launches, this measures calls as they follow one another in training.

    Args:
        run: gets the number of the call, to choose its inputs by.
        warm_up: calls that are not measured.
        steps: calls that are measured.
    """
    for index in range(warm_up):
        run(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]

    torch.cuda.synchronize()
    events[0].record()
    for index in range(steps):
        run(warm_up + index)
        events[index + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def cpu_milliseconds(run: Callable[[int], object], *, warm_up: int = 5, steps: int = 30) -> float:
    """As :func:`gpu_milliseconds`, on the CPU."""
    for index in range(warm_up):
        run(index)

    times = []
    for index in range(steps):
        began = time.perf_counter()
        run(warm_up + index)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def milliseconds(run: Callable[[int], object], device: torch.device | str, **counts: int) -> float:
    """:func:`gpu_milliseconds` or :func:`cpu_milliseconds`, depending on the device."""
    timed = gpu_milliseconds if torch.device(device).type == "cuda" else cpu_milliseconds
    return timed(run, **counts)


def captured_milliseconds(
    works: Sequence[Callable[[], object]], ready: Callable[[], object] | None = None
) -> float:
    """Median milliseconds of one of ``works``, all captured in one CUDA graph.

    They do the same on different inputs, so that no input is still in the GPU's cache. Without a
    GPU, as in tests, they are called in turn.

    Args:
        works: what is measured.
        ready: called before each run of all of them, and not measured.
    """
    if not torch.cuda.is_available():
        return cpu_milliseconds(lambda index: works[index % len(works)](), warm_up=1, steps=2)
    from triton.testing import do_bench_cudagraph

    def all_in_turn() -> None:
        for work in works:
            work()

    torch.cuda.synchronize()  # the timing uses another stream, which doesn't wait for the inputs
    if ready is not None:
        all_in_turn()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_in_turn()
        times = []
        for _ in range(READIES):
            ready()
            times.append(gpu_milliseconds(lambda _: graph.replay(), warm_up=0, steps=1))
        return statistics.median(times) / len(works)
    return do_bench_cudagraph(all_in_turn, return_mode="median") / len(works)


def kernel_milliseconds(
    run: Callable[[int], object], steps: int = 8, ready: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Time of the kernels of a step on the GPU: ``kernel_ms``, ``launches``, and ``kernels``, the
    milliseconds by name, the costliest first.

    Args:
        run: a step; gets its number.
        steps: how many are measured.
        ready: called once the profiler runs, to wait for other processes.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        if ready is not None:
            ready()
        for index in range(steps):
            run(index)
        torch.cuda.synchronize()

    spent: Counter[str] = Counter()
    launches = 0
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:
            spent[event.key] += event.self_device_time_total / steps / 1e3
            launches += event.count
    kernels = dict(spent.most_common())
    return {"kernel_ms": spent.total(), "launches": launches // steps, "kernels": kernels}


def copy_bandwidth() -> float:
    """Bytes per second that a copy reads and writes on the GPU: the limit of its memory."""
    on_gpu = torch.cuda.is_available()
    source = torch.ones(2**28 if on_gpu else 2**20, device="cuda" if on_gpu else "cpu")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest = min(captured_milliseconds([copy]) for copy in copies)
    return 2 * source.nbytes / fastest * 1e3


def release() -> None:
    """Free the memory of dropped models and graphs, and what was compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def require(right: bool, message: str) -> None:
    """End a benchmark whose result is wrong: its times would mean nothing.

    Raises:
        ValueError: ``right`` is false.
    """
    if not right:
        raise ValueError(f"{message}: nothing is reported")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, relative to that of ``expected``."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
