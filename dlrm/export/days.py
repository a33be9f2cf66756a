"""Exports of a run that follows days: a delta after each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from dlrm.export.delta import DELTA, export_delta
from dlrm.export.directory import MANIFEST, ExportOptions, export_run, read_manifest
from dlrm.export.programs import has_compiler

KEPT = 2  # exports in full


def export_day(
    run: Path,
    run_id: str,
    step: int,
    directory: Path,
    day: str,
    apply_delta: Callable[[Path, Path, Path], None],
) -> None:
    """Export the latest checkpoint of a run after a day, as ``DAY``, with the changes since the
    export before as ``DAY.delta``. What is there already stays.

    Args:
        run: directory of the run.
        run_id: its id.
        step: of the checkpoint.
        directory: gets the exports.
        day: its name.
        apply_delta: makes an export from an earlier one, a delta and its own directory.

    Raises:
        ValueError: the directory has exports of another run or of later days; or as
            :func:`~dlrm.export.directory.export_run`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = sorted(path.parent for path in directory.glob(f"*/{MANIFEST}"))
    exports = [path for path in found if path.suffix != ".tmp"]  # which a killed run left
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
    apply_delta(exports[-1], delta, directory / day)
    for old in exports[: 1 - KEPT]:
        shutil.rmtree(old)
