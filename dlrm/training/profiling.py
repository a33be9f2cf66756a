"""How fast a run is, how much memory it takes, and where its time goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, schedule
from tqdm import tqdm

from dlrm.data.schema import Meta
from dlrm.distributed.peer_memory import bytes_held
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import is_out_of_memory
from dlrm.utils.program import peak_process_memory

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("start", "compile", "train", "data_wait", "validate", "checkpoint", "test", "end")
"""Where the time of a run goes: imports and building; steps that compile or are captured; the other
steps; waiting for rows; metrics of validation rows; what checkpoints hold up; metrics of test rows;
and everything after the last step."""


def progress_bar(total: float, done: float, mode: str, *, silent: bool) -> tqdm:
    """A progress bar that counts samples; it updates rarely if the output is not a terminal.

    Until it has more to say, it says that the first steps are compiled, which can take half a
    minute; ``mode`` is that of the step.
    """
    return tqdm(
        total=total,
        initial=done,
        unit=" samples",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        postfix=None if mode == "eager" else "compiling first",
        disable=silent,
    )


class Clock:
    """Where the time of a run goes, from the start of its process on.

    Every moment belongs to one of :data:`PARTS`. Compiling and waiting for data happen within
    training and are measured elsewhere; they are taken off it.

    Args:
        data: the training loader; ``wait_seconds`` is the time that its consumer has waited.
        graphs: of the step; ``preparing_seconds`` is the time that compiling and capturing took.
        began: when the process started, as :func:`time.perf_counter` has it; by default now.
        before: :meth:`state` of the run that is resumed.

    Attributes:
        samples: that this process has trained on.
    """

    def __init__(
        self,
        data: Any,
        graphs: Any,
        began: float | None = None,
        before: Mapping[str, float] | None = None,
    ) -> None:
        self.samples = 0
        self._data = data
        self._graphs = graphs
        self._before = dict(before or {})
        self._first_wait = data.wait_seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part = "start"
        self._since = began or time.perf_counter()
        self._last_lap = self._loop()

    def begin(self, part: str) -> None:
        """Count the time from now on as a part."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block as a part, within another one."""
        outer = self._part
        self.begin(name)
        try:
            yield
        finally:
            self.begin(outer)

    def lap(self) -> dict[str, float]:
        """Speed since the last lap."""
        loop = self._loop()
        last, self._last_lap = self._last_lap, loop
        return self._speed({name: loop[name] - last[name] for name in loop})

    def state(self) -> dict[str, float]:
        """Samples, seconds, and seconds of waiting since the start of the run, for a checkpoint."""
        return {name: value + self._before.get(name, 0) for name, value in self._loop().items()}

    def total(self) -> dict[str, float]:
        """Speed since the start of the run, if it has trained; and the seconds of each part since
        the start of the process, and of all."""
        state, speed = self.state(), {}
        if state["samples"]:
            speed = self._speed(state) | {"speed/train_seconds": state["seconds"]}
        loop, parts = self._loop(), dict(self._seconds)

        parts["compile"] = self._graphs.preparing_seconds
        parts["data_wait"] += loop["wait"]  # besides the time in which there was no next day
        parts["train"] -= parts["compile"] + loop["wait"]
        parts = {"total": sum(parts.values()), **parts}
        return speed | {f"seconds/{name}": seconds for name, seconds in parts.items()}

    def _loop(self) -> dict[str, float]:
        """Samples, seconds and waiting of the training loop in this process."""
        self.begin(self._part)
        wait = self._data.wait_seconds - self._first_wait
        return {"samples": self.samples, "seconds": self._seconds["train"], "wait": wait}

    @staticmethod
    def _speed(loop: Mapping[str, float]) -> dict[str, float]:
        seconds = max(loop["seconds"], 1e-9)
        return {
            "speed/samples_per_second": loop["samples"] / seconds,
            "speed/data_wait_share": loop["wait"] / seconds,
        }


def read_trace(path: Path) -> pd.DataFrame:
    """The operations in a trace that torch.profiler exported.

    Returns:
        A row for each CPU operation, GPU kernel and GPU copy: ``name``, ``kind``
        (``cpu_op``, ``kernel``, ``gpu_memcpy``, ``gpu_memset``), ``lane`` (the thread or stream),
        ``start`` and ``ms``, both in milliseconds; the first start is 0.
    """
    import pandas as pd  # which takes a third of a second

    kinds = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in kinds]
    trace = pd.DataFrame(events, columns=["name", "cat", "tid", "ts", "dur"])
    trace = trace.rename(columns={"cat": "kind", "tid": "lane", "ts": "start", "dur": "ms"})
    trace["start"] = (trace["start"] - trace["start"].min()) / 1e3  # from microseconds
    trace["ms"] /= 1e3
    return trace.sort_values("start", ignore_index=True)


class Profiler:
    """A torch.profiler trace of a few steps after some warm-up steps.

    Writes ``profile/trace.json`` (open it in Perfetto or chrome://tracing) and
    ``profile/operations.txt``, the most expensive operations, to the directory of the run.

    Args:
        directory: of the run.
        device: of the model.
        active: whether to profile at all.
    """

    def __init__(self, directory: Path, device: torch.device, *, active: bool = True) -> None:
        self._profile: profile | None = None
        if not active:
            return
        self._directory = directory / "profile"
        self._directory.mkdir(parents=True, exist_ok=True)
        self.trace = self._directory / "trace.json"
        self._sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        self._profile = profile(
            schedule=schedule(wait=5, warmup=3, active=5, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
            acc_events=True,
        )
        self._table: str | None = None
        self._profile.start()

    def _write(self, trace: profile) -> None:
        self._table = trace.key_averages().table(sort_by=self._sort, row_limit=25)
        with atomic_write(self.trace) as temporary:
            trace.export_chrome_trace(str(temporary))
        with atomic_write(self._directory / "operations.txt") as temporary:
            temporary.write_text(self._table)

    def step(self) -> None:
        """Mark the end of a training step."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> str:
        """End profiling; returns the most expensive operations and how to open the trace."""
        if self._profile is None:
            return ""
        self._profile.stop()
        if self._table is None:  # a trace may be left from before the run was resumed
            return "the run was too short for a profile, which needs 13 steps"
        return (
            f"{self.trace}: open it at https://ui.perfetto.dev or chrome://tracing\n{self._table}"
        )


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of the process and of the GPU, in bytes."""
    peak = peak_process_memory()
    peaks = {} if peak is None else {"memory/process_peak": float(peak)}
    if device.type == "cuda":
        peaks["memory/gpu_peak"] = float(torch.cuda.max_memory_allocated(device))
        peaks["memory/gpu_peak"] += bytes_held(device)
    return peaks


@contextmanager
def out_of_memory_advice(data: str, embedding_dim: int) -> Iterator[None]:
    """Report a lack of memory with the largest table, and how to use less memory.

    Raises:
        ValueError: there is not enough memory for the block.
    """
    try:
        yield
    except (RuntimeError, MemoryError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        meta = Meta.read(data, allow_outside=True)  # reads no rows
        rows, table = max(zip(meta.cardinalities, meta.tables, strict=True))
        size = 4e-6 * embedding_dim * rows
        raise ValueError(
            f"out of memory: the largest table, {table}, has {rows:,} rows, {size:,.0f} MB if "
            "dense, plus the state of the optimizer; compress it with --emb and --budget, keep it "
            "in host memory with --emb offload, or lower --batch_size"
        ) from None
