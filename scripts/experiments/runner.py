"""Runs of ``train.py``, several at a time, for the programs that compare them.

A worker process trains one run after another, so that it imports PyTorch and compiles kernels only
once. Finished runs are not repeated, so an interrupted comparison can be resumed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

from dlrm.config.cli import parse
from dlrm.config.options import changed_options
from dlrm.data.schema import Meta
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.training.run_directory import CHECKPOINTS
from dlrm.training.tracking import RESULT, read_result
from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg, figure_arg, path_arg
from dlrm.utils.signals import end_with_parent
from scripts.benchmarks import harness

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the other scripts

INTERRUPTED = "interrupted; run the same command again to resume"


class RunSpec(NamedTuple):
    """A run to train."""

    name: str
    """Name of its directory."""
    options: list[str]
    """Options of ``train.py``."""


def add_run_arguments(parser: Parser, name: str) -> None:
    """Add the options that all comparisons have; ``name`` is part of the default paths."""
    add = parser.add_argument
    add("--seeds", type=count_arg, default=3, help="runs for each point of the comparison")
    runs = Path("runs") / name
    add("--runs", type=path_arg, default=runs, help="directory for the runs and their logs")
    add("--jobs", type=count_arg, default=1, help="number of runs at a time")
    add("--options", nargs="*", default=[], help="more options of train.py, e.g. epochs=2")
    add("--no-timing", action="store_true", help="do not measure the time of a step")
    plot = Path(f"{name}.png")
    add("--plot", type=figure_arg, default=plot, help="plot to write: PNG, SVG or PDF")
    add("--json", type=path_arg, help="also write the results to this JSON file")


def require_rows(data: str | Path, meta: Meta, split: str) -> None:
    """Raise an error, before hours of training, if a split that is needed afterwards is empty."""
    if not meta.has_rows(split):
        raise ValueError(
            f"{data} has no {split} rows, which the comparison needs: prepare it with some"
        )


class Runner:
    """Trains runs into one directory.

    Args:
        directory: for the runs and their logs; created if needed.
        jobs: number of runs at a time; they share the GPU, if there is one.
        common: options of all runs; the options of a single run override them.
        results_only: remove the checkpoints of a run when it has finished.
    """

    def __init__(
        self, directory: Path, jobs: int, common: list[str], *, results_only: bool = False
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.jobs, self.common = directory, jobs, common
        self.results_only = results_only

    def train(
        self,
        runs: list[RunSpec],
        data: str | Path | None = None,
        save: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Train the runs that have not finished; returns why some of them are impossible.

        Args:
            runs: may have a run twice.
            data: prepared directory; None: the runs name their own, with ``--data``.
            save: called whenever a run has ended, in their order.

        Raises:
            ChildProcessError: a run was killed, or failed without a clear error message.
            ValueError: a finished run had other options, or other rows.
        """
        common = [f"--output={self.directory.resolve()}"]
        common += [] if data is None else [f"--data={Path(data).resolve()}"]

        tasks = []
        for name, options in dict(runs).items():  # the same run may be listed twice
            arguments = [*common, f"--name={name}", *self.common, *options]
            if self.finished(name):
                self._require_same(name, arguments)
            else:
                tasks.append((self.directory / name, arguments, self.results_only))

        # Each worker takes the next run when it has finished one.
        with _thread_limit(max(1, cpu_count() // self.jobs)):
            spawn = multiprocessing.get_context("spawn")  # a forked process can't use the GPU
            with ProcessPoolExecutor(self.jobs, spawn, initializer=end_with_parent) as workers:
                results = workers.map(train_one, tasks)
                try:
                    impossible = []
                    for why in tqdm(results, total=len(tasks), unit=" runs"):
                        impossible += [why] if why else []
                        save()
                    return impossible
                except KeyboardInterrupt:  # the workers would continue with the next runs
                    for worker in multiprocessing.active_children():
                        worker.terminate()
                    raise
                except BrokenProcessPool:
                    raise ChildProcessError(
                        "a training process was killed, possibly because memory ran out; its log "
                        f"is the most recent one in {self.directory}. Run the same command again "
                        "to resume; fewer --jobs need less memory"
                    ) from None

    def _require_same(self, name: str, arguments: list[str]) -> None:
        """Raise an error if the finished run of this name had other options, or other rows."""
        messages = StringIO()
        try:
            with redirect_stderr(messages):
                resolved = yaml.safe_load(parse(arguments, available())[1])
        except SystemExit:
            print(messages.getvalue(), end="", file=sys.stderr)
            raise

        # Options that change results must be those of the finished run.
        result = read_result(self.directory / name)
        both = resolved, result["options"]
        now, then = (changed_options(each, available()) for each in both)
        changed = [name for name in now.keys() | then.keys() if now.get(name) != then.get(name)]
        if changed:
            raise ValueError(
                f"{self.directory / name} has finished with another {', '.join(sorted(changed))}: "
                "choose another --runs, or remove it"
            )

        if "rows" not in result or resolved["follow"]:  # of its last day
            return
        data = resolved["data"]
        if result["rows"] != Meta.read(data, allow_outside=True).counts:
            raise ValueError(
                f"{self.directory / name} has finished on other rows than {data} has now: choose "
                "another --runs, or remove it"
            )

    def finished(self, name: str) -> bool:
        """Whether a run has finished."""
        return (self.directory / name / RESULT).exists()

    def metrics(self, name: str) -> dict[str, float]:
        """The final metrics of a finished run."""
        return read_result(self.directory / name)["metrics"]


def train_one(task: tuple[Path, list[str], bool]) -> str | None:
    """In a worker process: train a run.

    Args:
        task: directory and arguments of the run, and whether to keep its results only.

    Returns:
        The error message, if the options make the run impossible.

    Raises:
        ChildProcessError: the run failed without a clear error message.
    """
    from dlrm.commands.train import main

    directory, arguments, results_only = task
    shutil.rmtree(directory, ignore_errors=True)

    log = directory.with_name(f"{directory.name}.log")
    with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            status = main(arguments)
        except SystemExit:  # invalid options
            status = 2
        except Exception:
            traceback.print_exc()
            status = 1

    if status > 128:  # a signal: this process must not begin another run
        os._exit(status)
    harness.release()
    if not status:
        if results_only:
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
        return None

    errors = [line for line in log.read_text().splitlines() if line.startswith("error")]
    if not errors:
        raise ChildProcessError(f"run {directory.name} failed; see {log}")
    return f"{directory.name}: {errors[0]}"


def step_speed(arguments: list[str], *, batches: int = 64) -> dict[str, float]:
    """Speed of a training step alone, without loading data.

    Args:
        arguments: of the command line of ``train.py``.
        batches: number of batches to cycle through; a first pass over them fills the caches.

    Returns:
        ``step, ms``, the median time of a step, and the resulting ``samples/s``.
    """
    speed = _time_steps(arguments, batches)
    harness.release()
    return speed


def _time_steps(arguments: list[str], batches: int) -> dict[str, float]:
    from dlrm.commands.train import Run

    with tempfile.TemporaryDirectory() as output:
        config, resolved = parse([*arguments, f"--output={output}", "--name=timed"], available())
        with redirect_stdout(None):
            run = Run(config, resolved, World.from_environment())
        inputs = [batch for batch, _ in zip(run.train_data, range(batches), strict=False)]
        run.model.train()
        for batch in inputs:
            run.step(batch)
        run.model.sparse_arch.renew_caches(run.step.optimizers[1])
        ms = harness.milliseconds(lambda i: run.step(inputs[i % len(inputs)]), run.step.device)
    return {"step, ms": ms, "samples/s": 1e3 * run.train_data.batch_size / ms}


@contextmanager
def _thread_limit(number: int) -> Iterator[None]:
    """Limit the threads of each process started inside; values that are already set are kept."""
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {name: value or str(number) for name, value in before.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
