"""Criteo's logs as a table: lines of a label, 13 numbers and 26 values of up to 8 hex digits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from .column_options import ColumnOptions, SplitOptions, TableOptions
from .columns import Column, ColumnPlan
from .files import RawFile
from .text_blocks import BlockReader
from .text_formats import CsvLayout

COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_CATEGORICAL)


def criteo_plan(options: Mapping[str, Any], split: SplitOptions | None = None) -> ColumnPlan:
    """The columns of the rows, and what becomes of them by the options that ``meta.json`` has."""
    transform: Literal["log", "log3"] = "log3" if options["dense_transform"] == "log3" else "log"
    number = ColumnOptions(kind="number", transform=transform)
    category = ColumnOptions(kind="category", min_count=options.get("min_count", 1))
    kinds = {"label": ColumnOptions(kind="label")}
    kinds |= dict.fromkeys(CRITEO_DENSE, number) | dict.fromkeys(CRITEO_CATEGORICAL, category)
    columns = [
        Column(name=name, found="text", why="Criteo", options=own) for name, own in kinds.items()
    ]
    return ColumnPlan(
        options=TableOptions(
            transform=transform,
            ids=options.get("ids", "vocabulary"),
            split=split or SplitOptions(by="days"),
        ),
        columns=tuple(columns),
        hexadecimal=True,
        cap=options.get("cap"),
        vocabulary=options.get("vocabulary", "train"),
    )


def open_log(path: Path, *, scored: bool = False) -> RawFile:
    """A log, of which nothing is read yet. By the first line, rows to be ``scored`` may be without
    the label."""
    names = COLUMNS
    if scored:
        first_line = BlockReader(path).start(1 << 16).partition(b"\n")[0]
        names = COLUMNS[first_line.count(b"\t") == len(COLUMNS) - 2 :]
    layout = CsvLayout(names=names, delimiter="\t", quotes=False, missing=("",))
    return RawFile(path=path, format="csv", names=names, layout=layout)
