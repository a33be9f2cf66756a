"""Runs of ``train.py``, several at a time, for the scripts that compare them.

A worker process trains one run after another, so that PyTorch is loaded and its kernels are made
once per process. What has finished is not repeated: an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from dlrm.config.cli import parse
from dlrm.config.schema import HOUSEKEEPING
from dlrm.data.schema import Meta
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.training import benchmark
from dlrm.training.tracking import RESULT, without
from dlrm.utils.device import cpu_count

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where train.py is
Run = tuple[str, list[str]]  # name and options


def require_rows(data: str | Path, meta: Meta, split: str) -> None:
    """Raise unless a split has rows: before hours of training, not behind them."""
    if not meta.has_rows(split):
        raise ValueError(f"{data} has no {split} rows, which are compared: prepare it with some")


class Pool:
    """Trains runs into one directory.

    Args:
        directory: of the runs and their logs; made if it is not there.
        jobs: runs at a time; on a GPU they share it.
        common: options of every run, before its own.
    """

    def __init__(self, directory: Path, jobs: int, common: list[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.jobs, self.common = directory, jobs, common

    def train(self, runs: list[Run], data: str | Path) -> list[str]:
        """Train what has not finished; returns why some runs could not be done.

        Raises:
            ChildProcessError: a run was killed, or ended neither well nor in a clear message.
            ValueError: one that has finished was of other options, or of other rows.
        """
        common = [f"--data={Path(data).resolve()}", f"--output={self.directory.resolve()}"]
        tasks = []
        for name, options in dict(runs).items():  # once each, what was asked for twice
            arguments = [*common, f"--name={name}", *self.common, *options]
            if self.done(name):
                self._require_alike(name, arguments, data)
            else:
                tasks.append((self.directory / name, arguments))
        with _threads(max(1, cpu_count() // self.jobs)):
            spawn = multiprocessing.get_context("spawn")  # a fork can't use the GPU
            with ProcessPoolExecutor(self.jobs, spawn, initializer=_end_with_parent) as workers:
                results = workers.map(train_one, *zip(*tasks, strict=True)) if tasks else iter(())
                try:
                    return [why for why in tqdm(results, total=len(tasks), unit=" runs") if why]
                except KeyboardInterrupt:  # the workers would go on with the next runs
                    for worker in multiprocessing.active_children():
                        worker.terminate()
                    raise
                except BrokenProcessPool:
                    raise ChildProcessError(
                        f"a process that trains was killed, as for want of memory; the log in "
                        f"{self.directory} that was written last is its own. The same command goes "
                        "on where it was; fewer --jobs need less memory"
                    ) from None

    def _require_alike(self, name: str, arguments: list[str], data: str | Path) -> None:
        """Raise if the run of this name was of other options than these, or of other rows."""
        told = StringIO()  # notes, or mistakes
        try:
            with redirect_stderr(told):
                options = yaml.safe_load(parse(arguments, available())[1])
        except SystemExit:
            print(told.getvalue(), end="", file=sys.stderr)
            raise
        result = self._result(name, "options")
        options, had = (without(own, HOUSEKEEPING) for own in (options, result["options"]))
        others = [o for o in options.keys() & had.keys() if options[o] != had[o]]
        if others:
            raise ValueError(
                f"{self.directory / name} has finished with another {', '.join(sorted(others))}: "
                "give another --runs, or remove it"
            )
        if "rows" in result and result["rows"] != Meta.read(data).counts:
            raise ValueError(
                f"{self.directory / name} has finished on other rows than {data} has now: give "
                "another --runs, or remove it"
            )

    def done(self, name: str) -> bool:
        """Whether a run has finished."""
        return (self.directory / name / RESULT).exists()

    def metrics(self, name: str) -> dict[str, float]:
        """The final metrics of a run."""
        return self._result(name, "metrics")["metrics"]

    def _result(self, name: str, part: str) -> dict[str, Any]:
        """What a finished run left, with this part."""
        path = self.directory / name / RESULT
        try:
            result = json.loads(path.read_text())
            result[part].keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of train.py: {error!r}; remove it") from None
        return result


def _end_with_parent() -> None:
    """In a worker: end when the program is killed, or it would train on beside the next start."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=end, daemon=True).start()


def train_one(directory: Path, arguments: list[str]) -> str | None:
    """In a worker: train a run into ``directory``; returns why it could not be done, if so."""
    from train import main

    shutil.rmtree(directory, ignore_errors=True)
    log = directory.with_name(f"{directory.name}.log")
    with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            done = main(arguments) == 0
        except SystemExit:  # options that can't be
            done = False
        except Exception:
            traceback.print_exc()
            done = False
    benchmark.release()
    if done:
        return None
    errors = [line for line in log.read_text().splitlines() if line.startswith("error")]
    if not errors:
        raise ChildProcessError(f"run {directory.name} failed; see {log}")
    return f"{directory.name}: {errors[0]}"


def step_speed(arguments: list[str], *, batches: int = 64) -> dict[str, float]:
    """Speed of a training step alone, on batches that are on the device already.

    Args:
        arguments: of the command line of ``train.py``.
        batches: taken in turn; caches are filled from the first pass over them.

    Returns:
        ``step, ms``, the median, and the ``samples/s`` that follow from it.
    """
    speed = _time_steps(arguments, batches)
    benchmark.release()
    return speed


def _time_steps(arguments: list[str], batches: int) -> dict[str, float]:
    from train import Run as Training

    with tempfile.TemporaryDirectory() as output:
        config, resolved = parse([*arguments, f"--output={output}", "--name=timed"], available())
        run = Training(config, resolved, World.of_environment())
        held = [batch for batch, _ in zip(run.train_data, range(batches), strict=False)]
        run.model.train()
        for batch in held:
            run.step(batch)
        run.model.sparse_arch.renew_caches(run.optimizers[1])
        took = benchmark.milliseconds(lambda i: run.step(held[i % len(held)]), run.device)
    return {"step, ms": took, "samples/s": 1e3 * config.batch_size / took}


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Have the processes that are started inside use so many threads each."""
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {name: value or str(number) for name, value in before.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
