"""What benchmarks share: inputs, timing, the environment, and how results are written."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dlrm.data.batch import Batch, fixed_bags
from dlrm.utils.atomic import atomic_write
from dlrm.utils.cpus import cpu_count
from dlrm.utils.offsets import offsets_of
from dlrm.utils.program import Parser

ROOT = Path(__file__).parents[2]
EXPONENT = 1.05  # of the power law
# At the start; above 0 if other programs ran as well. Windows can't say.
LOAD_BEFORE = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


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


def parse_on_gpu(parser: Parser, argv: Sequence[str] | None) -> Namespace:
    """Parse the options of a benchmark that needs a GPU; without one, exit with status 2."""
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    return options


def draw_ids(
    rows: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    skewed: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random ids of tables with these numbers of rows, ``[F, size]`` int32.

    They are uniform or, if skewed, log-uniform: id i is about i + 1 times as rare as id 0.
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


def draw_bags(
    rows: Sequence[int],
    bag_sizes: Sequence[int],
    size: int,
    device: torch.device | str,
    *,
    ragged: bool = False,
    generator: torch.Generator | None = None,
) -> Batch:
    """A random multi-hot batch, its ids skewed; see :func:`draw_batch`.

    Args:
        rows: of each table.
        bag_sizes: ids of each bag of each table.
        size: samples B.
        device: of the batch.
        ragged: lengths are random, from 0 to twice ``bag_sizes``, which are their means.
        generator: of the random numbers.
    """
    one_hot = draw_batch(rows, size, device, generator=generator)
    offsets, bounds = fixed_bags(bag_sizes, size, device)
    if ragged:
        means = torch.tensor(bag_sizes, device=device).repeat_interleave(size)
        uniform = torch.rand(len(means), device=device, generator=generator)
        offsets = offsets_of((uniform * (2 * means + 1)).long())
        bounds = tuple(offsets[::size].tolist())
    ids = [
        draw_ids([table], end - begin, device, generator=generator)[0]
        for table, (begin, end) in zip(rows, pairwise(bounds), strict=True)
    ]
    sizes = None if ragged else tuple(bag_sizes)
    return replace(one_hot, ids=torch.cat(ids), offsets=offsets, bounds=bounds, bag_sizes=sizes)


def power_law(rows: int, lookups: int, device: str = "cuda") -> Tensor:
    """Ids from a power law over the rows of a table, ``[lookups]`` int64."""
    uniform = torch.rand(lookups, device=device, dtype=torch.float64)
    power = 1 - EXPONENT
    return (((rows**power - 1) * uniform + 1) ** (1 / power)).long().clamp(1, rows) - 1


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


def captured_milliseconds(works: Sequence[Callable[[], object]]) -> float:
    """Median milliseconds of one of ``works``, all captured in one CUDA graph.

    They do the same on different inputs, so that no input is still in the GPU's cache.
    """
    from triton.testing import do_bench_cudagraph

    def all_in_turn() -> None:
        for work in works:
            work()

    torch.cuda.synchronize()  # the timing uses another stream, which doesn't wait for the inputs
    return do_bench_cudagraph(all_in_turn, return_mode="median") / len(works)


def release() -> None:
    """Free the memory of dropped models and graphs, and what was compiled for them."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def copy_bandwidth() -> float:
    """Bytes per second that a copy on the GPU reads and writes: the limit of its memory."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    fastest = min(captured_milliseconds([copy]) for copy in copies)
    return 2 * source.nbytes / fastest * 1e3


def write(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a result and its environment as JSON, atomically; NaN and infinity become null."""
    path = Path(path)
    text = json.dumps({"environment": environment(), **result})
    plain = json.loads(text, parse_constant=lambda _: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(plain, indent=1) + "\n")
