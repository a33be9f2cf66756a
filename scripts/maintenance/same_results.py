"""Show that a change of the code changes no result, to the last digit.

    python scripts/maintenance/same_results.py record before.json     # before the change
    python scripts/maintenance/same_results.py compare before.json    # after it

Both make small data and train many short runs with the programs of the tree in the working
directory, and read nothing but the files that the programs write. To record another tree, or one
from before this script, start the script by its path from there. On a GPU (``--device cuda``) runs
with ``--deterministic true`` must be equal to the last digit, the others within a tolerance. What
is run stands in same_results_runs.py.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import operator
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import same_results_runs as runs  # type: ignore[import-not-found]
import torch
from pyarrow import parquet

ROOT = Path.cwd()  # the tree that is recorded

TOLERANCE = 0.02  # relative, for runs on a GPU without --deterministic true
TIMED = ("time", "seconds/", "speed/", "memory/", "cache/link_share")  # not the same twice
RACED = ("cache/",)  # on a GPU neither, as threads race for a cache
SHOWN = 3  # differing values of an entry


def program(name: str, *arguments: object) -> str:
    """Run a program of the tree in this process; returns what it prints."""
    out, errors = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            status = importlib.import_module(name).main([str(value) for value in arguments])
        except SystemExit as stop:
            status = stop.code
    if status:
        raise RuntimeError(f"{name} ended with {status}: {errors.getvalue().strip()}")
    return out.getvalue()


def flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested JSON by name."""
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        yield name, values
        return
    for key, value in values.items():
        yield from flat(value, f"{name} {key}".strip())


def digest(content: bytes) -> str:
    """A short text that differs for all that differs."""
    return hashlib.sha256(content).hexdigest()[:16]


def two_processes(argv: Sequence[str]) -> None:
    """Train with two processes of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "train.py"), *argv], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


class Recorder:
    """Makes the results of a tree below the working directory, a temporary one.

    Args:
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.ignored = TIMED if device == "cpu" else (*TIMED, *RACED)
        self.runs = runs.CPU_RUNS if device == "cpu" else runs.GPU_RUNS
        made = runs.DATA if device == "cpu" else ("synthetic",)
        measured = ("evaluated", "predicted") if device == "cpu" else ()
        self.names = [*(f"data_{name}" for name in made), *self.runs, *measured]
        self._values: dict[str, dict[str, Any]] = {}

    def values(self, name: str) -> dict[str, Any]:
        """All values of an entry, which is made when it is first asked for."""
        if name not in self._values:
            made = self._train if name in self.runs else self._measure
            made = self._rows if name.startswith("data_") else made
            self._values[name] = made(name)
        return self._values[name]

    def exact(self, name: str) -> bool:
        """Whether the same code gives the same bits."""
        return self.device == "cpu" or name not in self.runs or "deterministic" in self.runs[name]

    def _make(self, name: str) -> None:
        """Make a directory of data if it is not there."""
        if Path(name).exists():
            return
        for other in runs.NEEDS.get(name, ()):
            self._make(other)
        if name == "multi_hot":
            runs.multi_hot(Path("synthetic"), Path(name))
        program(*runs.DATA[name].format(device=self.device).split())

    def _rows(self, name: str) -> dict[str, Any]:
        """A digest of each column of each file of data, and what its JSON says."""
        directory = Path(name.removeprefix("data_"))
        self._make(directory.name)
        found: dict[str, Any] = {}
        for path in sorted(directory.rglob("*")):
            if path.suffix == ".parquet":
                table = parquet.read_table(path)
                for column in table.column_names:
                    values = f"{table[column].type} {table[column].to_pylist()}"
                    found[f"{path.name} {column}"] = digest(values.encode())
            elif path.suffix == ".txt":
                found[path.name] = digest(path.read_bytes())
            elif path.suffix == ".json":
                found |= flat(json.loads(path.read_text()), path.name)
        return found

    def _train(self, name: str) -> dict[str, Any]:
        """The log of a run, step by step, and the kinds of its tables."""
        options: dict[str, Any] = dict(self.runs[name])
        for option in {"resume", "init_from"} & options.keys():
            self.values(options[option])
            options[option] = f"runs/{options[option]}"
        run = Path(options.get("resume", f"runs/{name}"))
        if "resume" not in options:
            options = runs.COMMON | options | {"name": name, "device": self.device}
            self._make(options["data"])

        argv = [f"--{option}={value}" for option, value in options.items()]
        torch.use_deterministic_algorithms(False)  # which an earlier run may have switched on
        if name.startswith("processes_"):
            two_processes(argv)
        else:
            program("train", *argv)

        found: dict[str, Any] = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            step = entry.pop("step")
            kept = {key: value for key, value in entry.items() if not key.startswith(self.ignored)}
            found |= flat(kept, f"step {step}")

        if other := runs.MUST_EQUAL.get(name):
            expected = self.values(other)
            wrong = [k for k in expected if "train/loss" in k and expected[k] != found.get(k)]
            if wrong:
                raise RuntimeError(f"{wrong[0]} is not that of {other}")
        return found | dict(flat(json.loads((run / "result.json").read_text())["tables"]))

    def _measure(self, name: str) -> dict[str, Any]:
        """The metrics of a trained model, measured again, or a digest of its predictions."""
        self.values("unstopped")
        given = "runs/unstopped", "synthetic"
        if name == "evaluated":
            return dict(flat(json.loads(program("evaluate", *given, "--device", self.device))))
        program("predict", *given, "scores.parquet", "--device", self.device)
        table = parquet.read_table("scores.parquet")
        return {name: digest(table[name].to_numpy().tobytes()) for name in table.column_names}


def setting(device: str) -> dict[str, Any]:
    """Everything but the code that results may depend on."""
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{module.__name__: str(module.__version__) for module in (torch, np, pa)},
    }


def record(device: str, only: Sequence[str] | None) -> dict[str, Any]:
    """Make all entries, or those that ``only`` names; returns what a recording holds."""
    recorder = Recorder(device)
    if unknown := [name for name in only or () if name not in recorder.names]:
        raise SystemExit(f"no entry {', '.join(unknown)}: there are {', '.join(recorder.names)}")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for --deterministic; read only once
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

    package = importlib.import_module("dlrm").__file__
    if not Path(package or "").is_relative_to(ROOT):
        raise SystemExit(f"{package} is not in {ROOT}: start this in the directory of train.py")

    git = "git describe --always --dirty --abbrev=40"  # through a shell: git may not be there
    said = subprocess.run(git, shell=True, cwd=ROOT, capture_output=True, text=True).stdout

    entries = {}
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        for name in only or recorder.names:
            start = time.perf_counter()

            try:
                values = recorder.values(name)
            except Exception as error:
                values = {"failed": f"{type(error).__name__}: {error}"}
            entries[name] = {"exact": recorder.exact(name), "values": values}
            seconds = time.perf_counter() - start
            print(f"{seconds:6.1f} s  {name}", values.get("failed", ""), flush=True)
    return {"setting": setting(device), "commit": said.strip() or "unknown", "entries": entries}


def nearly(one: Any, other: Any) -> bool:
    """Equal, or two numbers that are so within the tolerance."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=TOLERANCE) if numbers else bool(one == other)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """Print the values in which entries differ; returns how many entries differ or failed."""
    differing = 0
    for name, entry in now.items():
        old, new = before[name]["values"], entry["values"]
        same = operator.eq if entry["exact"] else nearly
        keys = [key for key in old | new if not same(old.get(key), new.get(key))]
        for key in keys[:SHOWN]:
            print(f"{name:28} {key:32} {old.get(key)!r:22} {new.get(key)!r}")
        if len(keys) > SHOWN:
            print(f"{name:28} {len(keys)} of {len(old | new)} values differ")
        differing += bool(keys) or "failed" in new
    return differing


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="make all entries and write them to FILE")
    comparing = commands.add_parser("compare", help="make the entries of FILE again and compare")
    for command in (recording, comparing):
        command.add_argument("file", metavar="FILE", type=Path)
        command.add_argument("--only", nargs="+", metavar="NAME", help="these entries alone")
    recording.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    comparing.add_argument(
        "--anyway", action="store_true", help="on another machine or with other versions too"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns 1 if a run failed or a value differs."""
    options = arguments().parse_args(argv)
    torch.set_num_threads(1)
    if options.command == "record":
        now = record(options.device, options.only)
        options.file.write_text(json.dumps(now, indent=1) + "\n")
        failed = sum("failed" in entry["values"] for entry in now["entries"].values())
        print(f"{options.file}: {len(now['entries'])} entries of {now['commit']}, {failed} failed")
        return int(failed > 0)

    before = json.loads(options.file.read_text())
    there, here = before["setting"], setting(before["setting"]["device"])
    if there != here and not options.anyway:
        raise SystemExit(f"recorded with {there}\nbut here are {here}\n--anyway compares them")

    names = options.only or list(before["entries"])
    if unknown := [name for name in names if name not in before["entries"]]:
        raise SystemExit(f"{options.file} has no entry {', '.join(unknown)}")

    now = record(there["device"], names)
    differing = compare(before["entries"], now["entries"])
    print(f"before: {before['commit']}\nnow:    {now['commit']}")
    print(f"{differing} of {len(names)} entries differ" if differing else "all entries are equal")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
