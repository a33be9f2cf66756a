"""Any table to a prepared directory: its columns are found or given, new ones or earlier ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from ...utils.messages import did_you_mean
from ...utils.validation import validate
from ..schema import Meta
from .bad_rows import BadRowsRule
from .column_options import ColumnOptions, SplitOptions, TableOptions
from .columns import Column, ColumnPlan
from .files import RawFile, open_files
from .infer import plan_columns, read_types
from .input_paths import find_files
from .learner import EarlierIds
from .pipeline import Preparation, RunOptions
from .table_rows import TableRows
from .transform import TRANSFORM_FILE, Transform

MADE_BY = "scripts/prepare_table.py"


def open_and_plan(
    inputs: Sequence[str | os.PathLike[str]],
    content: Mapping[str, Any],
    where: str = "",
    *,
    skip_bad: bool = False,
) -> tuple[list[RawFile], ColumnPlan]:
    """Find the files and decide what each column is.

    Args:
        inputs: files, directories or patterns.
        content: the options that are given, as YAML or JSON has them.
        where: begins errors of the options, such as ``"FILE: "``.
        skip_bad: leave out lines that are no rows of the table.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: an option is wrong, the files differ, or nothing can be made of a column.
    """
    options = validate(TableOptions, dict(content), where)
    files = open_files(find_files(inputs), options)
    return files, plan_columns(files, options, skip_bad=skip_bad)


def open_later_rows(
    inputs: Sequence[str | os.PathLike[str]], ids_of: Path, split: SplitOptions
) -> tuple[list[RawFile], ColumnPlan, list[str]]:
    """The same for rows that become the features of an earlier preparation, with its ids.

    Returns:
        The files, what each column is, and the names of columns that are left out since the earlier
        table did not have them.

    Raises:
        FileNotFoundError: an input does not exist, or ``ids_of`` was not made from a table.
        ValueError: the files differ, or a column is missing.
    """
    if not (ids_of / TRANSFORM_FILE).is_file():
        raise FileNotFoundError(
            f"{ids_of / TRANSFORM_FILE} does not exist: {ids_of} was not made by dlrm prepare "
            "without --criteo"
        )
    earlier = Transform.load(ids_of, vocabularies=False).plan
    files = open_files(find_files(inputs), earlier.options)
    columns = _later_columns(earlier.columns, split)
    plan = replace(earlier, options=replace(earlier.options, split=split), columns=columns)

    # Rows of JSON may leave out names.
    for file in files:
        there = set(file.names)
        for name in (column.name for column in plan.needed if there):
            if name not in there:
                raise ValueError(
                    f"{file.path} has no column {name!r}, which the earlier preparation has"
                    f"{did_you_mean(name, file.names, 'its columns')}"
                )
    used = {column.name for column in columns}
    return files, plan, [name for name in files[0].names if name not in used]


def _later_columns(earlier: Sequence[Column], split: SplitOptions) -> tuple[Column, ...]:
    """The columns of an earlier preparation, with that of another split, if it is by a column."""
    columns = []
    for column in earlier:
        unused = column.kind == "split" and (split.by, split.column) != ("column", column.name)
        options = replace(column.options, kind="drop") if unused else column.options
        columns.append(replace(column, options=options))

    names = [column.name for column in columns]
    if split.column is not None and split.column not in names:
        if split.by == "time":
            raise ValueError(
                f"--split-by time:{split.column}: the earlier preparation has no such column"
                f"{did_you_mean(split.column, names)}"
            )
        options = ColumnOptions(kind="split")
        columns.append(Column(name=split.column, found="text", why="given", options=options))
    return tuple(columns)


def prepare_table(
    files: Sequence[RawFile],
    plan: ColumnPlan,
    output: str | os.PathLike[str],
    *,
    ids_of: Path | None = None,
    grow: bool = False,
    evict_after: int | None = None,
    bad_rows: BadRowsRule = "stop",
    **run: Unpack[RunOptions],
) -> Meta:
    """Prepare a table for training.

    Args:
        files: the files, from :func:`open_and_plan` or :func:`open_later_rows`.
        plan: what each column is.
        output: directory for ``train.parquet``, ``val.parquet``, ``test.parquet``, ``vocabulary/``,
            ``transform.json``, ``table.yaml``, ``bad_rows.json`` and ``meta.json``.
        ids_of: a prepared directory, or a copy of its transform: nothing is learned of these rows,
            they get its ids and scalings.
        grow: with ``ids_of``, values of the training rows that it does not list get ids too.
        evict_after: with ``grow``, these are first the ids of values that no training row had in as
            many preparations, this one included.
        bad_rows: ``stop`` at the first row that does not fit; or ``skip`` such rows, up to half of
            all, or ``skip-all``, and report them in ``bad_rows.json``.
        run: see :class:`dlrm.data.prepare.pipeline.RunOptions`.

    Returns:
        The contents of ``meta.json``.

    Raises:
        ValueError: a row or value doesn't fit, there are no rows to train on, or ``output`` holds
            other data.
    """
    earlier = EarlierIds.given(ids_of, grow, evict_after)
    options: dict[str, Any] = {
        "made_by": MADE_BY,
        "options": asdict(replace(plan.options, columns={})),
        "columns": {column.name: dict(vars(column.options)) for column in plan.columns},
        "ids_of": None if ids_of is None else str(ids_of),
        "bad_rows": bad_rows,
    }
    options |= {"append_new": True} if grow else {}
    options |= {} if evict_after is None else {"forget": evict_after}

    transform = Transform(plan=plan)
    if ids_of is not None:
        transform = replace(Transform.load(ids_of, vocabularies=False), plan=plan)

    types = read_types(plan, files, skip_bad=bad_rows != "stop")
    preparation = Preparation(
        source=TableRows(files=files, plan=plan, types=types),
        transform=transform,
        options=options,
        earlier=earlier,
        bad_rows=bad_rows,
    )
    return preparation.run(output, **run)
