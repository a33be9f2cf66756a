"""Exports of a run that follows days: a delta after each."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dlrm.export.delta import DELTA, export_delta
from dlrm.export.directory import MANIFEST, ExportOptions, export_run, read_manifest
from dlrm.export.programs import has_compiler
from dlrm.utils.name_order import in_order_of_numbers
from dlrm.utils.shipped import shipped_program
from dlrm.utils.signals import SIGNALS, end_with_parent

KEPT = 2  # exports in full


def in_own_process(work: Callable[..., None], *given: Any) -> None:
    """Call a function in a process of its own, which leaves the cores to this one, draws none of
    its random numbers, and ends with it.

    Raises:
        OSError: the process was killed.
        Exception: what the function raises.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin) as pool:
            pool.submit(work, *given).result()
    except BrokenProcessPool as error:
        raise OSError("the process that exports was killed: is there enough memory?") from error


def _begin() -> None:
    """Make this process one that leaves the others the cores, and that ends with its parent."""
    end_with_parent()
    for number in SIGNALS:  # which a terminal sends to both
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)


def export_day(run: Path, run_id: str, step: int, directory: Path, day: str) -> None:
    """Export the latest checkpoint of a run after a day, as ``DAY``, with the changes since the
    export before as ``DAY.delta``. What is there already stays.

    Args:
        run: directory of the run.
        run_id: its id.
        step: of the checkpoint.
        directory: gets the exports.
        day: its name.

    Raises:
        ValueError: the directory has exports of another run or of later days; or as
            :func:`~dlrm.export.directory.export_run`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = [path.parent for path in directory.glob(f"*/{MANIFEST}")]
    found.sort(key=in_order_of_numbers)
    exports = [path for path in found if path.suffix != ".tmp"]  # which a killed run left

    # What is there must be of this run, and of earlier days.
    for path in exports:
        made = read_manifest(path)
        later = made["step"] > step or (path.name == day and made["step"] != step)
        if made["run"] != run_id or later:
            raise ValueError(
                f"follow_export is {directory}, where {path.name} is of "
                f"{'a later step' if made['run'] == run_id else 'another run'}: name a new "
                "directory, or remove it"
            )
    if directory / day in exports:
        return

    options = ExportOptions(devices=("cpu",) if has_compiler() else (), last=True)
    if not exports:
        export_run(run, directory / day, options)
        return

    delta = directory / f"{day}.delta"
    if not (delta / DELTA).is_file():
        export_delta(run, delta, exports[-1], options)
    shipped_program("apply_delta").apply_delta(exports[-1], delta, directory / day)
    for old in exports[: 1 - KEPT]:
        shutil.rmtree(old)
