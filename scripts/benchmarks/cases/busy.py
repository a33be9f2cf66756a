"""Time ``train.py --emb tt`` on an idle and on a busy CPU, with and without bounded spinning.

    python scripts/benchmarks/run.py busy --output benchmarks/busy_cpu.json

Compared are the programs as they start (see ``dlrm/utils/startup.py``) and PyTorch's default. A
busy machine runs one more process per core, which counts, or multiplies matrices in threads that
spin, as another training run does. Runs alternate. Idle, the fastest of the runs counts, since
whatever disturbs a run only adds to it; busy, the median, since luck goes either way. It takes
eight minutes on two idle cores; ``taskset -c`` chooses them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness

SMALL = "--steps 1 --repeats 1 --neighbours"
WAYS: dict[str, dict[str, str]] = {
    "ours": {},
    "default": {"OMP_DISPLAY_ENV": "false"},  # any variable of OpenMP: nothing is changed
}
KINDS = ("training", "whole")  # of times
BUSY_REPEATS = 3
COUNT = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that is busy until the one that started it has ended."""
MULTIPLY = """
import os, torch
parent, x = os.getppid(), torch.ones(512, 512)
while os.getppid() == parent: (x @ x).relu()
"""
"""The same, with the threads of PyTorch."""
NEIGHBOURS = {"counting": COUNT, "training": MULTIPLY}


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--steps", type=count_arg, default=80, help="training steps of a run")
    add("--repeats", type=count_arg, default=7, help="runs of each way, idle")
    add("--neighbours", nargs="*", choices=NEIGHBOURS, default=list(NEIGHBOURS))


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure the idle and the busy machine."""
    with tempfile.TemporaryDirectory() as directory:
        run("ours", 1, Path(directory))  # makes the data, and fills the disk cache
    record.note(unit="s", steps=options.steps)

    def note(state: str, repeats: int, of: Callable[[Sequence[float]], float]) -> None:
        times = seconds_of(repeats, options.steps, of)
        ratios = {k: round(times["default"][k] / times["ours"][k], 3) for k in KINDS}
        record.note(**{state: times, f"{state}_times_faster_than_default": ratios})
        print(state, "times faster than the default:", ratios, flush=True)

    note("idle", options.repeats, min)
    for name in options.neighbours:
        with busy(cpu_count(), NEIGHBOURS[name]):
            note(f"busy_{name}", BUSY_REPEATS, statistics.median)


def seconds_of(
    repeats: int, steps: int, of: Callable[[Sequence[float]], float]
) -> dict[str, dict[str, float]]:
    """Seconds of alternating runs of each way.

    Args:
        repeats: runs of each way.
        steps: training steps of a run.
        of: what is taken of the repeats.
    """
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _, way in product(range(repeats), WAYS):
        with tempfile.TemporaryDirectory() as directory:
            training, whole = run(way, steps, Path(directory))
        seconds[way].append((training, whole))
        print(f"{way:10} training {training:6.2f} s, whole {whole:6.2f} s", flush=True)

    found = {}
    for way, times in seconds.items():
        training, whole = (round(of(column), 2) for column in zip(*times, strict=True))
        found[way] = {"training": training, "whole": whole, "runs": len(times)}
    return found


def run(way: str, steps: int, directory: Path) -> tuple[float, float]:
    """Seconds of training, and of the whole program."""
    command = [sys.executable, "train.py", "--emb", "tt", "--name", way, "--device", "cpu"]
    command += ["--output", str(directory), "--max_steps", str(steps), "--checkpoint", "false"]
    environment = _clean() | WAYS[way]
    start = time.perf_counter()
    subprocess.run(command, cwd=harness.ROOT, env=environment, check=True, capture_output=True)
    whole = time.perf_counter() - start
    result = json.loads((directory / way / "result.json").read_text())
    return result["metrics"]["speed/train_seconds"], whole


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


def _clean() -> dict[str, str]:
    """The environment without variables of OpenMP."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
