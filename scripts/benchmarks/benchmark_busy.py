"""Time ``train.py --emb tt`` on an idle and on a busy CPU, with and without bounded spinning.

    python scripts/benchmarks/benchmark_busy.py --output benchmarks/busy_cpu.json

Compared are the programs as they start (see ``dlrm/utils/startup.py``) and PyTorch's default; with
``--ways``, also threads that never spin (``OMP_WAIT_POLICY=passive``) and one thread. On a busy
machine one process per core counts, or multiplies matrices as another training run does, in threads
that spin. Runs alternate. Of each way, idle, the fastest training and the fastest whole run count,
as what disturbs a run only adds to it; busy, the medians of three, as a run's luck goes either way.
Last, the whole of a first run is timed, which makes the demo data, on an idle machine and with one
busy core. It takes nine minutes on two idle cores; ``taskset -c`` chooses them. The JSON is written
after each part, so that one that is ended has a result.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlrm.training import benchmark
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg, path_arg

WAYS: dict[str, dict[str, str]] = {
    "ours": {},
    "default": {"OMP_DISPLAY_ENV": "false"},  # any variable of OpenMP: nothing is changed
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


COUNT = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that is busy until the one that started it has ended."""

MULTIPLY = """
import os, torch
parent, x = os.getppid(), torch.ones(512, 512)
while os.getppid() == parent: (x @ x).relu()
"""
"""The same, with the threads of PyTorch."""

KINDS = ("training", "whole")
"""Of times."""

NEIGHBOURS = {"counting": COUNT, "training": MULTIPLY}


@contextmanager
def busy(processes: int, program: str = COUNT) -> Iterator[None]:
    """Processes that run a program while the block runs."""
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command, env=_clean()) for _ in range(processes)]
    time.sleep(3)  # they import PyTorch
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(way: str, steps: int, directory: Path) -> tuple[float, float]:
    """Seconds of training, and of the whole program."""
    command = [sys.executable, "train.py", "--emb", "tt", "--name", way, "--device", "cpu"]
    command += ["--output", str(directory), "--max_steps", str(steps), "--checkpoint", "false"]
    start = time.perf_counter()
    environment = _clean() | WAYS[way]
    subprocess.run(command, cwd=benchmark.ROOT, env=environment, check=True, capture_output=True)
    whole = time.perf_counter() - start
    result = json.loads((directory / way / "result.json").read_text())
    return result["metrics"]["speed/train_seconds"], whole


def first_run() -> float:
    """Seconds of a first run with the default options, in an empty directory."""
    command = [sys.executable, str(benchmark.ROOT / "train.py"), "--emb", "tt", "--device", "cpu"]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(command, cwd=directory, env=_clean(), check=True, capture_output=True)
    return round(time.perf_counter() - start, 2)


def _clean() -> dict[str, str]:
    """The environment without variables of OpenMP."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}


def measure(
    repeats: int, steps: int, ways: Sequence[str], of: Callable[[Sequence[float]], float]
) -> dict[str, dict[str, float]]:
    """Seconds of alternating runs of each way.

    Args:
        repeats: runs of each way.
        steps: training steps of a run.
        ways: some of ``WAYS``.
        of: what is taken of the repeats.
    """
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            with tempfile.TemporaryDirectory() as directory:
                seconds[way].append(run(way, steps, Path(directory)))
            training, whole = seconds[way][-1]
            print(f"{way:10} training {training:6.2f} s, whole {whole:6.2f} s", flush=True)
    return {
        way: {name: round(of(c), 2) for name, c in zip(KINDS, zip(*s, strict=True), strict=True)}
        | {"runs": len(s)}
        for way, s in seconds.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print the ratios, and write the JSON."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=path_arg, help="where the JSON goes")
    parser.add_argument("--steps", type=count_arg, default=80, help="training steps of a run")
    parser.add_argument("--repeats", type=count_arg, default=7, help="runs of each way, idle")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["ours", "default"], help="(ours default)"
    )
    parser.add_argument(
        "--neighbours", nargs="*", choices=NEIGHBOURS, default=list(NEIGHBOURS), help="(all)"
    )
    options = parser.parse_args(argv)
    steps = options.steps
    with tempfile.TemporaryDirectory() as directory:
        run("ours", 1, Path(directory))  # makes the data, and fills the disk cache
    found: dict[str, Any] = {"unit": "s", "steps": steps}

    def note(state: str, times: dict[str, dict[str, float]]) -> None:
        found[state] = times
        if {"ours", "default"} <= times.keys():
            ratios = {k: round(times["default"][k] / times["ours"][k], 3) for k in KINDS}
            found[f"{state}_times_faster_than_default"] = ratios
            print(state, "times faster than the default:", ratios, flush=True)
        if options.output:
            benchmark.write(options.output, found)

    note("idle", measure(options.repeats, steps, options.ways, min))
    for name in options.neighbours:
        with busy(cpu_count(), NEIGHBOURS[name]):
            note(f"busy_{name}", measure(3, steps, options.ways, statistics.median))
    for state, processes in (("idle", 0), ("one_busy_core", 1)):
        with busy(processes):
            found.setdefault("first_run", {})[state] = first_run()
        print("first run:", found["first_run"], flush=True)
        if options.output:
            benchmark.write(options.output, found)


if __name__ == "__main__":
    main()
