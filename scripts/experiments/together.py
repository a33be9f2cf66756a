"""Runs of ``train.py`` that read the same rows, trained next to each other in one process.

A captured step at batch 128 leaves most of a GPU idle: its kernels wait for one another, not for
the GPU. So each model has streams of its own, and every batch is given to all models in turn. The
losses are those of a run on its own, except for the order in which a GPU adds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path

import torch

from dlrm.commands.train import Run
from dlrm.config.cli import parse
from dlrm.data.loader import ROWS_AT_ONCE
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.training.prefetch import Prefetcher, PreparedBatch
from dlrm.utils.streams import stream_of, streams_of_model


def train_together(tasks: Sequence[tuple[Path, list[str]]]) -> dict[str, float]:
    """Train several runs on the rows of the first, each into its directory.

    They are neither validated nor logged before the end, and leave no checkpoint.

    Args:
        tasks: directory and arguments of ``train.py`` of each run, at most 8; with equal seeds,
            batch sizes and steps.

    Returns:
        ``steps`` of each model, ``seconds`` of training after the first steps of all models, in
        which they are compiled, and ``samples/s`` of all models together in that time.

    Raises:
        ValueError: runs that do not read the same batches, or whose batches are prepared ahead.
    """
    runs = []
    for number, (directory, arguments) in enumerate(tasks):
        shutil.rmtree(directory, ignore_errors=True)
        with streams_of_model(number), _logged(directory):
            runs.append(Run(*parse(arguments, available()), World.from_environment()))
    first = runs[0]
    for run in runs:
        if _rows(run) != _rows(first):
            raise ValueError(f"{run.directory} would not read the rows of {first.directory}")
        if type(run.step.prefetcher) is not Prefetcher:
            raise ValueError(f"{run.directory} prepares its batches ahead of their step")
    timed = _steps(runs)
    for number, run in enumerate(runs):
        with streams_of_model(number), _logged(run.directory):
            run._finish()
    return timed


def _rows(run: Run) -> tuple[object, ...]:
    """Everything that decides which rows a run reads, and in which order."""
    config = run.config
    return config.data, config.seed, config.batch_size, run.validations.last_step, config.loader


def _steps(runs: Sequence[Run]) -> dict[str, float]:
    """Train all models; returns the result of :func:`train_together`."""
    device, batch_size = runs[0].step.device, runs[0].config.batch_size
    lanes: list[torch.cuda.Stream | None] = []
    for number in range(len(runs)):
        with streams_of_model(number):
            lanes.append(stream_of(device, "steps") if device.type == "cuda" else None)

    began, before = time.perf_counter(), 0
    for run in runs:
        run.model.train()

    for chunk in _chunks(runs[0], max(1, ROWS_AT_ONCE // batch_size)):
        _wait(lanes, for_lanes=False)
        for prepared in chunk:
            for number, (run, lane) in enumerate(zip(runs, lanes, strict=True)):
                with streams_of_model(number), torch.cuda.stream(lane):
                    run.schedule.set(run.steps)
                    run.step(prepared)
                    run.progress.steps += 1
                    if run.steps % run.config.populate_every == 0:
                        run.model.sparse_arch.renew_caches(run.step.optimizers[1])
        _wait(lanes, for_lanes=True)  # before memory of the chunk is used again
        if not before:  # everything is compiled and captured
            print(f"{len(runs)} models compiled in {time.perf_counter() - began:.0f} s", flush=True)
            began, before = time.perf_counter(), runs[0].steps

    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, steps = time.perf_counter() - began, runs[0].steps
    samples = (steps - before) * batch_size * len(runs)
    return {"steps": steps, "seconds": seconds, "samples/s": samples / max(seconds, 1e-9)}


def _chunks(run: Run, size: int) -> Iterator[list[PreparedBatch]]:
    """All batches of a run, as many at a time as a device gathers at once."""
    batches, left = run._batches(), run.validations.last_step
    while left and (chunk := list(islice(batches, min(size, left)))):
        left -= len(chunk)
        yield chunk


def _wait(lanes: Sequence[torch.cuda.Stream | None], *, for_lanes: bool) -> None:
    """Make the current stream wait for all lanes, or all lanes for the current stream."""
    for lane in lanes:
        if lane is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(lane) if for_lanes else lane.wait_stream(current)


@contextmanager
def _logged(directory: Path) -> Iterator[None]:
    """Write everything that a run prints to a file next to its directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        directory.with_name(f"{directory.name}.log").open("a") as out,
        redirect_stdout(out),
        redirect_stderr(out),
    ):
        yield
