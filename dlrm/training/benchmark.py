"""What benchmarks share: inputs, where they ran, how a GPU is timed, how results are written."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import cpu_count

ROOT = Path(__file__).parents[2]
LOAD_BEFORE = round(os.getloadavg()[0], 1)  # at the start; above 0: other programs ran as well


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
    with suppress(FileNotFoundError):  # of git, which a container may lack
        git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return git.stdout.strip() or None
    return None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def draw_ids(
    rows: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    skewed: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random ids of tables of so many rows, ``[F, size]`` int32.

    They are uniform, or log-uniform, which makes id i about i + 1 times as rare as id 0.
    """
    many = torch.tensor(rows, device=device, dtype=torch.float64)[:, None]
    shape = len(rows), size
    uniform = torch.rand(shape, device=device, dtype=torch.float64, generator=generator)
    ids = (many + 1) ** uniform - 1 if skewed else many * uniform
    return ids.minimum(many - 1).int()


def draw_batch(
    rows: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    skewed: bool = True,
    generator: torch.Generator | None = None,
) -> Batch:
    """A random batch with 13 dense features, a quarter of its labels 1; see :func:`draw_ids`."""
    ids = draw_ids(rows, size, device, skewed=skewed, generator=generator)
    dense = torch.randn(13, size, device=device, generator=generator)
    labels = torch.rand(size, device=device, generator=generator) < 0.256
    return Batch(dense, ids, labels.float())


def gpu_milliseconds(run: Callable[[int], object], *, warm_up: int = 10, steps: int = 50) -> float:
    """Median milliseconds of ``run(i)`` on the GPU over ``steps`` calls, by events.

    ``i`` counts the calls, so that ``run`` can take its inputs in turn.
    """
    for index in range(warm_up):
        run(index)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for index in range(steps):
        run(warm_up + index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    return statistics.median(marks[i].elapsed_time(marks[i + 1]) for i in range(steps))


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
    """:func:`gpu_milliseconds` or :func:`cpu_milliseconds`, as the device asks for."""
    timed = gpu_milliseconds if torch.device(device).type == "cuda" else cpu_milliseconds
    return timed(run, **counts)


def queued_milliseconds(run: Callable[[int], object], *, warm_up: int = 4, steps: int = 8) -> float:
    """As :func:`gpu_milliseconds`, without what launching from Python costs.

    The GPU is kept waiting until the calls are queued, so that it goes from one to the next. A
    queue holds about 1,000 launches.
    """
    for index in range(warm_up):
        run(index)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(warm_up)
    seconds = steps * (time.perf_counter() - began)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e9 * seconds))  # twice that long at 2 GHz
    marks[0].record()
    for index in range(steps):
        run(warm_up + index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    return statistics.median(marks[i].elapsed_time(marks[i + 1]) for i in range(steps))


def captured_milliseconds(works: Sequence[Callable[[], object]], *, repeats: int = 20) -> float:
    """Median milliseconds of one of ``works``, replayed in turn from one CUDA graph.

    The works are the same on different inputs, so that none finds its own in the cache; in a graph
    no launch waits for Python.
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
    times = gpu_milliseconds(lambda _: graph.replay(), warm_up=1, steps=repeats)
    return times / len(works)


def release() -> None:
    """Give the memory of dropped models and graphs back; forget what was compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def copy_bandwidth() -> float:
    """Bytes a second, read and written, that a GPU streams: the ceiling of what moves memory."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest = min(captured_milliseconds([way] * 4) for way in ways)
    return 2 * source.nbytes / fastest * 1e3


def write(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result and its environment as JSON, whole or not at all.

    What is not a number becomes null: JSON has no word for it.
    """
    path = Path(path)
    text = json.dumps({"environment": environment(), **result})
    plain = json.loads(text, parse_constant=lambda _: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(plain, indent=1) + "\n")
