"""The reports of a run: TensorBoard events, JSON lines and a result file."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen
from torch.utils.tensorboard import SummaryWriter

from dlrm.training.dashboards import hparams_row, layout, tag
from dlrm.training.metrics import finite
from dlrm.training.plots import DayPlots, Plots
from dlrm.training.run_directory import METRICS
from dlrm.utils.atomic import atomic_write, disk_full_names
from dlrm.utils.documents import read_json, read_json_lines
from dlrm.utils.links import refuse_links_out
from dlrm.utils.validation import Number, Whole, validate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RESULT = "result.json"  # written by a finished run


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a result that programs use."""

    emb: str
    data: str = ""
    seed: Whole = 0
    tt: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The part of a result that programs use; it holds more."""

    options: _Options
    metrics: dict[str, Number | None]
    rows: dict[str, Annotated[list[Whole], MinLen(1)]] = field(default_factory=dict)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a JSON lines file; an incomplete last line is skipped.

    Raises:
        ValueError: another line is damaged.
    """
    try:
        for number, entry in enumerate(read_json_lines(path), 1):
            if not isinstance(entry, dict) or type(entry.get("step")) is not int:
                raise ValueError(f"{path}, line {number} has no step")
            yield entry
    except ValueError as error:
        raise ValueError(f"{error}; remove the line or the file") from None


class Tracker:
    """Writes every number to TensorBoard and to ``metrics.jsonl``.

    Args:
        directory: directory of the run; created if needed.
        step: step from which a run is resumed; later entries, of steps that were lost, are removed.
            None for a new run.
        active: whether to write at all: the first process does.

    Raises:
        ValueError: a new run in the directory of another one, or a damaged file.
    """

    def __init__(self, directory: Path, *, step: int | None = None, active: bool = True) -> None:
        self._active = active
        if not active:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS
        if step is not None and self.path.exists():
            kept = (json.dumps(e) + "\n" for e in _entries(self.path) if e["step"] <= step)
            with atomic_write(self.path) as temporary, temporary.open("w") as file:
                file.writelines(kept)
        try:
            self._lines = self.path.open("x" if step is None else "a", buffering=1)
        except FileExistsError:  # by a run that was started at the same time
            raise ValueError(f"{directory} belongs to another run: choose another --name") from None
        (directory / RESULT).unlink(missing_ok=True)  # until this run has finished
        self._writer = SummaryWriter(str(directory), purge_step=None if step is None else step + 1)
        if step is None:
            self._writer.add_custom_scalars(layout())

    def log(self, step: int, values: Mapping[str, float], **names: str) -> None:
        """Log numbers under names like ``train/loss``; the part before the slash is their group.

        TensorBoard gets them under :func:`~dlrm.training.dashboards.tag`, and the lines also what
        is given in ``names``.
        """
        if not values or not self._active:
            return
        entry = {"step": step, "time": round(time.time(), 3), **names, **finite(values)}
        with disk_full_names(self.path.parent):
            for name, value in values.items():
                self._writer.add_scalar(tag(name), value, step)
            self._lines.write(json.dumps(entry) + "\n")

    def texts(self, **texts: str) -> None:
        """Log texts by name, shown preformatted; empty ones are left out."""
        if not self._active:
            return
        with disk_full_names(self.path.parent):
            for name, text in texts.items():
                if text:
                    lines = ("    " + line for line in text.splitlines())
                    self._writer.add_text(name, "\n".join(lines))

    def plots(self, step: int, plots: Plots | DayPlots | None) -> None:
        """Log the plots of an evaluation, or of all days, if there was one."""
        if not self._active or plots is None:
            return
        with disk_full_names(self.path.parent):
            for name, figure in plots.figures().items():
                self._writer.add_figure(name, figure, step, close=False)

    def days(self, step: int) -> dict[str, float]:
        """The mean metrics of the days that were logged, if there are any, which are plotted."""
        days = self.logged_days()
        if not days:
            return {}
        self.plots(step, DayPlots(days=days))

        means = {}
        for name in days[-1].keys() - {"step", "day"}:
            values = [day[name] for day in days if day.get(name) is not None]
            if values:
                means[f"days/{name}"] = math.fsum(values) / len(values)
        return dict(sorted(means.items()))

    def logged_days(self) -> list[dict[str, Any]]:
        """The name, the step and the metrics of each day that was evaluated."""
        entries = _entries(self.path) if self._active else ()
        return [
            {name.removeprefix("day/"): value for name, value in entry.items() if name != "time"}
            for entry in entries
            if "day" in entry
        ]

    def finish(
        self,
        options: Mapping[str, Any],
        final: Mapping[str, float],
        changed: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Write the options and final metrics of the run, and close the files.

        They go to ``result.json``, together with ``more``. TensorBoard's HParams page shows the
        options that ``changed`` from their defaults, by full name.
        """
        if not self._active:
            return
        writer = self._writer._get_file_writer()
        with disk_full_names(self.path.parent):
            for summary in hparams_row(options, changed or {}, final):
                writer.add_summary(summary)
        name = self.path.parent.absolute().name  # of ".", too
        result = {"run": name, "options": dict(options), **more, "metrics": finite(final)}
        if days := self.logged_days():
            result["days"] = days
        with atomic_write(self.path.with_name(RESULT)) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")
        self.close()

    def close(self) -> None:
        """Flush and close the files."""
        if not self._active:
            return
        with disk_full_names(self.path.parent):
            self._writer.close()
            self._lines.close()


def named(group: str, values: Mapping[str, float]) -> dict[str, float]:
    """Numbers under names like ``group/name``."""
    return {f"{group}/{name}": value for name, value in values.items()}


def quiet_tensorboard_thread(failure: threading.ExceptHookArgs) -> None:
    """A ``threading.excepthook`` that prints no traceback for TensorBoard's writer thread.

    The next call of a tracker raises the error.
    """
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def read_result(directory: Path) -> dict[str, Any]:
    """The result that :meth:`Tracker.finish` wrote: ``options``, ``metrics`` and more.

    Raises:
        ValueError: the file is damaged, or was written by another program.
    """
    path = directory / RESULT
    refuse_links_out(directory)
    try:
        result = read_json(path)
        validate(_Result, result)
    except ValueError as error:
        raise ValueError(f"{path} is not a result of dlrm train: {error}; remove it") from None
    return dict(result)


def finished(directory: Path, step: int | None, options: Mapping[str, Any]) -> dict[str, float]:
    """The final metrics of a run if it has finished at a step with the same options; else empty.
    One that follows days is never finished: there may be more of them.

    Args:
        directory: of the run.
        step: from which it is resumed; None for a new run.
        options: nested, as in its file.
    """
    if step is None or options.get("follow") or not (directory / RESULT).is_file():
        return {}
    result = read_result(directory)
    same = result.get("steps") == step and result["options"] == options
    return {k: math.nan if v is None else v for k, v in result["metrics"].items()} if same else {}


def log_figures(directory: Path, figures: Mapping[str, Figure]) -> None:
    """Write figures for TensorBoard's images page, as a run named like ``directory``.

    Args:
        directory: a directory below TensorBoard's ``--logdir``; created if needed.
        figures: by name, such as ``comparison/auc``; the part before the slash is the group.
    """
    with SummaryWriter(str(directory)) as writer:
        for name, figure in figures.items():
            writer.add_figure(name, figure, close=False)
