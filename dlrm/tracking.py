"""What a run reports: TensorBoard, JSON lines, and the directory that holds them."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pandas as pd
import torch
from torch.profiler import profile, schedule
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from dlrm.files import whole


def _json(values: Mapping[str, float]) -> dict[str, float | None]:
    """Values with null for what is not a number, which JSON has no word for."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


HPARAM_GROUPS = ("test", "embeddings", "speed")


class Tracker:
    """Writes every number twice: to TensorBoard and, the same, to ``metrics.jsonl``.

    Args:
        directory: of the run; made if it is not there.
        step: where a resumed run goes on; entries beyond it, of steps that were lost when the
            run was interrupted, are dropped from both files.
    """

    def __init__(self, directory: Path, *, step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        if step is not None and self.path.exists():
            lines = [json.loads(line) for line in self.path.read_text().splitlines()]
            kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
            with whole(self.path) as temporary:
                temporary.write_text("".join(kept))
        self._writer = SummaryWriter(str(directory), purge_step=None if step is None else step + 1)
        self._lines = self.path.open("a", buffering=1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers under names like ``train/loss``; the part before the slash groups them."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        entry = {"step": step, "time": round(time.time(), 3), **_json(values)}
        self._lines.write(json.dumps(entry) + "\n")

    def text(self, name: str, text: str) -> None:
        """Record a text, shown as preformatted."""
        self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()))

    def finish(
        self, options: Mapping[str, Any], final: Mapping[str, float], hidden: Collection[str] = ()
    ) -> None:
        """Record the run's options and final metrics for comparisons, and close the files.

        They go to ``result.json`` and, without the ``hidden`` options, which do not tell runs
        apart, to TensorBoard's hparams page.
        """
        told = {name: value for name, value in options.items() if name not in hidden}
        flat = pd.json_normalize(told).iloc[0].items()
        plain = {
            str(name): value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flat
        }
        shown = {name: final[name] for name in final if name.split("/")[0] in HPARAM_GROUPS}
        writer = self._writer._get_file_writer()
        for summary in hparams(plain, shown):
            writer.add_summary(summary)
        result = {"run": self.path.parent.name, "options": dict(options), "metrics": _json(final)}
        with whole(self.path.with_name("result.json")) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")
        self.close()

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Clock:
    """Training time, without evaluations: samples per second and the share spent on waiting.

    Args:
        data: a loader, whose ``wait_seconds`` say how long its consumer waited.
    """

    def __init__(self, data: Any) -> None:
        self.samples = 0
        self._data = data
        self._start = self._mark = time.perf_counter()
        self._lap_samples, self._lap_wait = 0, data.wait_seconds
        self._first_wait = data.wait_seconds

    def lap(self) -> dict[str, float]:
        """Figures since the last lap."""
        now, wait = time.perf_counter(), self._data.wait_seconds
        values = self._figures(
            self.samples - self._lap_samples, now - self._mark, wait - self._lap_wait
        )
        self._mark, self._lap_samples, self._lap_wait = now, self.samples, wait
        return values

    def total(self) -> dict[str, float]:
        """Figures since the beginning."""
        seconds = time.perf_counter() - self._start
        wait = self._data.wait_seconds - self._first_wait
        return self._figures(self.samples, seconds, wait) | {"speed/train_seconds": seconds}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside."""
        began = time.perf_counter()
        yield
        pause = time.perf_counter() - began
        self._start += pause
        self._mark += pause

    @staticmethod
    def _figures(samples: int, seconds: float, wait: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)
        return {
            "speed/samples_per_second": samples / seconds,
            "speed/data_wait_share": wait / seconds,
        }


class Profiler:
    """A torch.profiler trace of a few steps, after some that warm up.

    Writes ``profile/trace.json`` (open it in chrome://tracing or Perfetto) and
    ``profile/operations.txt``, the costliest operations, into the run's directory.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory / "profile"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        self._profile = profile(
            schedule=schedule(wait=5, warmup=3, active=5, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._table = "the run was too short to be profiled: 13 steps are needed"
        self._profile.start()

    def _write(self, trace: profile) -> None:
        trace.export_chrome_trace(str(self._directory / "trace.json"))
        self._table = trace.key_averages().table(sort_by=self._sort, row_limit=25)
        (self._directory / "operations.txt").write_text(self._table)

    def step(self) -> None:
        """A training step has ended."""
        self._profile.step()

    def close(self) -> str:
        """End profiling; returns the table of the costliest operations."""
        self._profile.stop()
        return self._table


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory of the process and of the GPU, in bytes."""
    peaks = {"memory/process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
    if device.type == "cuda":
        peaks["memory/gpu_peak"] = float(torch.cuda.max_memory_allocated(device))
    return peaks
