"""Plant known faults one at a time, and record which of them the tests catch.

    python scripts/maintenance/plant_faults.py check
    python scripts/maintenance/plant_faults.py run --out results.json
    python scripts/maintenance/plant_faults.py run --out fast.json --whole --tests "-m 'not slow'"

faults.yaml, next to this program, lists the faults: plausible mistakes, each of which changes what
the project does. "check" verifies that each can still be planted. "run" plants each in a copy of
the project and runs pytest there: first the test files most likely to catch it and, with --whole,
all tests if these pass. A smaller test suite is as good as a larger one if it catches as many.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FAULTS = Path(__file__).with_name("faults.yaml")
ROOT = Path(__file__).parents[2]
CHECK = "tests/scripts/test_plant_faults.py"  # fails with any fault in place
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--ignore={CHECK}")
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5  # exit statuses of pytest


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of one file that makes the project wrong."""

    name: str
    file: str
    find: str
    """Text that occurs exactly once in the file."""
    replace: str
    """What is planted in its place."""
    why: str
    """The consequence, in one line."""
    tests: list[str]
    """The test files most likely to catch it."""

    def problems(self, tree: Path) -> list[str]:
        """Why the fault can't be planted in a tree; nothing if it can."""
        missing = [path for path in (self.file, *self.tests) if not (tree / path).is_file()]
        found = [f"{path} does not exist" for path in missing]
        if self.file not in missing:
            times = (tree / self.file).read_text().count(self.find)
            if times != 1:
                found.append(f"{self.file} has {self.find!r} {times} times, it must have it once")
        return [f"{self.name}: {problem}" for problem in found]

    def plant(self, tree: Path) -> None:
        """Make the change in a tree."""
        path = tree / self.file
        path.write_text(path.read_text().replace(self.find, self.replace))


def read_faults(tree: Path) -> list[Fault]:
    """The faults, all of which can be planted in ``tree``.

    Raises:
        ValueError: a name is given twice, or a fault can't be planted; with a line for each.
    """
    faults = [Fault(**entry) for entry in yaml.safe_load(FAULTS.read_text())]
    problems = [problem for fault in faults for problem in fault.problems(tree)]
    for name, times in Counter(fault.name for fault in faults).items():
        if times > 1:
            problems.append(f"{name}: {times} faults have this name")
    if problems:
        raise ValueError("\n".join([*problems, f"correct {FAULTS.name}"]))
    return faults


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """A copy of the files of a tree that git does not ignore, removed in the end.

    A directory "shared" next to the tree, where tests look for data, is next to the copy as well.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        copy = Path(directory) / "project"
        for name in filter(None, names.split("\0")):
            if (tree / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / name, copy / name)
        if (tree.parent / "shared").is_dir():
            (copy.parent / "shared").symlink_to(tree.parent / "shared")
        yield copy


def run_pytest(
    tree: Path, arguments: Sequence[str], timeout: float | None
) -> tuple[int, list[str]]:
    """Run tests in a tree, with its own modules; returns the exit status and what failed.

    Raises:
        TimeoutError: it took longer than ``timeout`` seconds, if that is given.
        RuntimeError: the tests could not be run.
    """
    # Without bytecode: that of a file changed to the same size within a second would count as new.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}

    with subprocess.Popen(
        [*PYTEST, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that processes that tests have started end as well
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError from None
            raise

    if process.returncode not in (PASSED, FAILED, INTERRUPTED, NO_TESTS):
        raise RuntimeError(f"pytest ended with status {process.returncode}:\n{output}")
    return process.returncode, re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.M)


def examine(fault: Fault, options: argparse.Namespace) -> dict[str, Any]:
    """Plant a fault in a copy of the project and run tests until one fails."""
    end = time.monotonic() + options.timeout
    result = {"file": fault.file, "outcome": "survived", "suite": options.tests}
    with copy_of(options.tree) as copy:
        fault.plant(copy)
        for ran, files in {"likely": fault.tests, "all": []}.items():
            if ran == "all" and not options.whole:
                break
            result["ran"] = ran
            try:
                arguments = ["-x", *options.tests, *files]
                status, failed = run_pytest(copy, arguments, end - time.monotonic())
            except TimeoutError:
                result["outcome"] = "timeout"
                break
            if status in (FAILED, INTERRUPTED):
                result |= {"outcome": "caught", "by": failed[0]}
                break
    return {**result, "seconds": round(options.timeout + time.monotonic() - end, 1)}


def run(options: argparse.Namespace) -> None:
    """Examine faults, write what was found after each, and print a summary."""
    faults = {fault.name: fault for fault in read_faults(options.tree)}
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only or [name for name in faults if name not in results]:
        if name not in faults:
            raise ValueError(f"{FAULTS.name} has no fault {name!r}")
        found = results[name] = examine(faults[name], options)
        write(options.out, results)
        print(f"{found['outcome']:9}{found['seconds']:7.1f} s  {name}", flush=True)
    # What fails without a fault as well has caught nothing.
    tests = sorted({found["by"] for found in results.values() if found["outcome"] == "caught"})
    with copy_of(options.tree) as copy:
        _, broken = run_pytest(copy, tests, None) if tests else (PASSED, [])
    for found in results.values():
        if found.get("by") in broken:
            found["outcome"] = "broken test"
    write(options.out, results)
    report(results)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(results, indent=2) + "\n")
    temporary.replace(path)


def report(results: dict[str, Any]) -> None:
    """Print how many faults of each part of the project had which outcome."""
    outcomes = ("caught", "survived", "timeout", "broken test")
    places = {name: "/".join(Path(r["file"]).parts[:2]) for name, r in results.items()}
    print(f"{'':24}" + "".join(f"{title:>13}" for title in ("planted", *outcomes)))
    for place in [*sorted(set(places.values())), "all"]:
        counts = Counter(r["outcome"] for n, r in results.items() if place in (places[n], "all"))
        columns = counts.total(), *(counts[outcome] for outcome in outcomes)
        print(f"{place:24}" + "".join(f"{count:13}" for count in columns))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("action", choices=("check", "run"))

    add("--out", type=Path, help="JSON file for results; faults that have one there are left out")
    add("--only", nargs="+", metavar="NAME", help="examine these faults, again if need be")
    text = "arguments of pytest that select a part of the tests (default: all tests)"
    add("--tests", type=shlex.split, default=[], metavar="ARGUMENTS", help=text)
    add("--whole", action="store_true", help="run all tests if the likely ones pass")
    add("--timeout", type=float, default=3600, help="seconds for a fault (default: %(default)s)")
    add("--tree", type=Path, default=ROOT, help="the checkout to examine (default: this one)")

    options = parser.parse_args(argv)
    if options.action == "run" and options.out is None:
        parser.error("run needs --out, where to write the results")

    try:
        if options.action == "run":
            run(options)
        else:
            print(f"{len(read_faults(options.tree))} faults can be planted")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
