"""What a run reports: TensorBoard events, JSON lines and a result file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from dlrm.training.metrics import finite
from dlrm.utils.atomic import atomic_write, disk_full_names
from dlrm.utils.documents import read_json, read_json_lines, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RESULT = "result.json"  # written by a finished run

HPARAM_METRICS = (
    *("test/auc", "test/log_loss", "test/accuracy", "test/normalized_entropy"),
    *("embeddings/compression", "embeddings/bytes", "speed/samples_per_second"),
)
"""Metric columns of TensorBoard's HParams page, the most important first."""

OVERVIEW: dict[str, dict[str, tuple[str, ...]]] = {
    "quality": {
        "loss": ("train/loss", "val/log_loss"),
        "validation AUC": ("val/auc",),
        "validation calibration": ("val/calibration",),
    },
    "speed": {
        "samples per second": ("speed/samples_per_second",),
        "share of time waiting for data": ("speed/data_wait_share",),
    },
    "memory": {
        "bytes of the embeddings": ("embeddings/bytes",),
        "compression": ("embeddings/compression",),
        "peak bytes": ("memory/",),
    },
    "training": {
        "gradient norms": ("train/gradient_norm/",),
        "learning rates": ("lr/",),
    },
    "caches of rows": {
        "hit rate": ("cache/hit_rate",),
        "rows in and out": ("cache/admitted", "cache/evicted"),
    },
}
"""Charts of TensorBoard's custom scalars page by category, each with the names, or prefixes of
names, that it shows."""


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

    Raises:
        ValueError: a new run in the directory of another one, or a damaged file.
    """

    def __init__(self, directory: Path, *, step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
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
            self._writer.add_custom_scalars(
                {
                    category: {
                        title: ["Multiline", [f"^{name}" for name in names]]
                        for title, names in charts.items()
                    }
                    for category, charts in OVERVIEW.items()
                }
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers under names like ``train/loss``; the part before the slash is their group."""
        entry = {"step": step, "time": round(time.time(), 3), **finite(values)}
        with disk_full_names(self.path.parent):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._lines.write(json.dumps(entry) + "\n")

    def text(self, name: str, text: str) -> None:
        """Log a text, shown preformatted."""
        with disk_full_names(self.path.parent):
            self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()))

    def finish(
        self,
        options: Mapping[str, Any],
        final: Mapping[str, float],
        hidden: Collection[str] = (),
        **more: Any,
    ) -> None:
        """Write the options and final metrics of the run, and close the files.

        They go to ``result.json``, together with ``more``, and to TensorBoard's HParams page
        without the ``hidden`` options.
        """
        shown_options = pd.json_normalize(without(options, hidden))
        flat = shown_options.astype(object).iloc[0].items()  # Python numbers, not NumPy's
        plain = {
            # HParams would turn a bool into a number.
            str(name): value if type(value) in (int, float, str) else str(value)
            for name, value in flat
        }
        shown = {name: final[name] for name in HPARAM_METRICS if name in final}
        writer = self._writer._get_file_writer()
        with disk_full_names(self.path.parent):
            for summary in hparams(plain, shown):
                writer.add_summary(summary)
        name = self.path.parent.name
        result = {"run": name, "options": dict(options), **more, "metrics": finite(final)}
        with atomic_write(self.path.with_name(RESULT)) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")
        self.close()

    def close(self) -> None:
        """Flush and close the files."""
        with disk_full_names(self.path.parent):
            self._writer.close()
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def without(options: Mapping[str, Any], hidden: Collection[str], group: str = "") -> dict[str, Any]:
    """Nested options without the ``hidden`` ones, named as on the command line."""
    return {
        name: without(value, hidden, f"{group}{name}.") if isinstance(value, Mapping) else value
        for name, value in options.items()
        if f"{group}{name}" not in hidden
    }


def quiet_tensorboard_thread(failure: threading.ExceptHookArgs) -> None:
    """A ``threading.excepthook`` that prints no traceback for TensorBoard's writer thread.

    The next call of a tracker raises the error.
    """
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def read_result(directory: Path) -> dict[str, Any]:
    """What :meth:`Tracker.finish` wrote: ``options``, ``metrics`` and more.

    Raises:
        ValueError: the file is damaged, or was written by another program.
    """
    path = directory / RESULT
    try:
        result = read_json(path)
        result["options"]["emb"], result["metrics"].keys()  # raise if they are not there
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of train.py: {shown(error)}; remove it") from None
    return result


class NoTracker(Tracker):
    """Writes nothing: for all processes but the first."""

    def __init__(self, directory: Path | None = None, *, step: int | None = None) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def text(self, name: str, text: str) -> None:
        """Do nothing."""

    def finish(
        self,
        options: Mapping[str, Any],
        final: Mapping[str, float],
        hidden: Collection[str] = (),
        **more: Any,
    ) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def log_figures(directory: Path, figures: Mapping[str, Figure]) -> None:
    """Write figures for TensorBoard's images page, as a run named like ``directory``.

    Args:
        directory: a directory below TensorBoard's ``--logdir``; created if needed.
        figures: by name, such as ``comparison/auc``; the part before the slash is the group.
    """
    with SummaryWriter(str(directory)) as writer:
        for name, figure in figures.items():
            writer.add_figure(name, figure, close=False)
