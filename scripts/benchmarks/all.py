"""Measure everything on this machine again, and write all figures to one JSON file.

    python scripts/benchmarks/all.py --device cuda --output benchmarks/all_h200.json
    python scripts/benchmarks/all.py --device cpu --only step prepare --output all_cpu.json

Each benchmark runs in a process of its own and ends after its own limit; what it has measured by
then is kept. If the file is there and has the same commit and machine, only what is missing in it
is measured: a run that was stopped, or that ran out of ``--budget-seconds``, is continued. The
figures of a benchmark are those that ``scripts/benchmarks/run.py`` writes for it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks.harness import Record, environment

RUN = Path(__file__).parent / "run.py"
KINDS = "auto block cafe dense drop dynamic hash qr robe tt"
RULES = "sgd rowwise_adagrad adam"


@dataclass(frozen=True)
class Entry:
    """A benchmark with its options."""

    command: str
    seconds: int = 300
    """The most that it may take."""
    gpus: int = 1
    """GPUs that it needs; from 2 on, it starts a process for each."""


ON_GPU = {
    "step": Entry(f"step --precisions bf16 --rules {RULES} --kinds {KINDS}", 900),
    "step_packed": Entry(
        f"step --precisions bf16 --kinds dense --rules {RULES} --batches 16384 65536 "
        "--dtypes fp32 int8 int4",
        600,
    ),
    "mlperf": Entry("mlperf --bags fixed ragged", 600),
    "lookup": Entry("lookup"),
    "rules": Entry("lookup --one-table", 600),
    "tt": Entry("tt --variants tf32"),
    "basis": Entry("basis"),
    "dynamic": Entry("dynamic", 600),
    "offload": Entry(
        "offload --variants dense offload 'offload, 1.5%' --rules sgd rowwise_adagrad adam", 600
    ),
    "offload_large": Entry("offload --large --variants 'offload, 1.5%' --rules sgd", 600),
    "distributed": Entry("distributed", 600, gpus=2),
    "loader": Entry("loader"),
    "loader_multi_hot": Entry("loader --multi-hot --rows 300000"),
    "whole_run": Entry("whole_run", 600),
    "predict": Entry("predict", 600),
}
ON_CPU = {
    "step": Entry("step --precisions fp32 bf16 --batches 2048 --kinds dense tt qr block"),
    "basis": Entry("basis"),
    "export": Entry("export", 900),
    "loader": Entry("loader"),
    "loader_multi_hot": Entry("loader --multi-hot --rows 300000"),
    "prepare": Entry("prepare --rows 1000000 5000000", 600),
    "prepare_csv": Entry("prepare --csv --rows 1000000", 600),
    "predict": Entry("predict", 600),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="what to measure")
    add("--output", type=path_arg, required=True, help="JSON file to write")
    names = sorted(ON_GPU.keys() | ON_CPU.keys())
    add("--only", nargs="+", choices=names, help="these, also if they are measured (default: all)")
    add("--budget-seconds", type=positive_arg, help="start nothing after that (default: no limit)")
    add("--small", action="store_true", help="try everything out with tiny inputs")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; measure the CPU with --device cpu")
    return exit_status(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Measure what is missing.

    Raises:
        ValueError: a benchmark failed. The others are measured nevertheless.
    """
    record = open_record(options.output)
    start, failed = time.monotonic(), []
    for name, entry in (ON_GPU if options.device == "cuda" else ON_CPU).items():
        if name not in options.only if options.only else record["results"].get(name):
            continue
        left = (options.budget_seconds or float("inf")) - (time.monotonic() - start)
        if left <= 0 or entry.gpus > max(1, torch.cuda.device_count()):
            print(f"{name}: not measured: no {'time' if left <= 0 else 'second GPU'}", flush=True)
            continue
        result, error = run(entry, options, min(left, entry.seconds))
        print(f"{name}: {error or 'done'} after {result['seconds']:.0f} s", flush=True)
        record["results"][name] = result
        record.save()
        failed += [name] if error and error != "stopped" else []
    if failed:
        raise ValueError(f"these benchmarks failed: {', '.join(failed)}")


def open_record(output: Path) -> Record:
    """The record with what the file has of the same commit and machine."""
    record = Record(output)
    record["results"] = {}
    if output.is_file():
        before, now = json.loads(output.read_text()), environment()
        if all(before["environment"][key] == now[key] for key in ("commit", "device", "cores")):
            record["results"] = before["results"]
    record.save()
    return record


def run(
    entry: Entry, options: argparse.Namespace, limit: float
) -> tuple[dict[str, Any], str | None]:
    """Run a benchmark; returns what it measured, and what went wrong."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        command = [sys.executable, str(RUN), *shlex.split(entry.command), "--output", str(output)]
        if entry.gpus > 1:
            command[1:1] = ["-m", "torch.distributed.run", f"--nproc-per-node={entry.gpus}"]
        command += ["--device", options.device]
        command += ["--small"] if options.small else []

        start, error = time.monotonic(), None
        process = subprocess.Popen(command)
        try:
            if status := process.wait(limit):
                error = f"failed with status {status}"
        except subprocess.TimeoutExpired:
            error = "stopped"
        finally:
            process.terminate()
            process.wait()
        result = json.loads(output.read_text()) if output.is_file() else {}

    result.pop("environment", None)
    result |= {"command": entry.command, "seconds": round(time.monotonic() - start, 1)}
    return result | ({"error": error} if error else {}), error


if __name__ == "__main__":
    sys.exit(main())
