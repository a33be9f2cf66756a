"""Run the project's programs in processes of their own, as a benchmark measures them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.benchmarks.harness import ROOT


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """Time and memory of a program."""

    seconds: float
    core_seconds: float
    """Of all threads: depends less on what else the machine does."""
    peak_bytes: int
    """The process's own memory, on Linux. (That of a process counts what its parent held.)"""
    output: str
    """Text that it printed."""


def run_program(
    program: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> ProgramRun:
    """Run a program of the project, for example ``scripts/predict.py``.

    Args:
        program: its file, relative to the project.
        arguments: its arguments.
        environment: its environment variables; by default those of this process.

    Raises:
        ValueError: it failed. Its error is on stderr.
    """
    command = [sys.executable, str(ROOT / program), *map(str, arguments)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise ValueError(f"{program} ended with status {process.returncode}")
    return ProgramRun(
        seconds=seconds,
        core_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        output=output,
    )
