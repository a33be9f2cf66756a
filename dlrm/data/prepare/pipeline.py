"""A table to a prepared directory: Parquet per split, vocabularies, transforms, ``meta.json``.

There are three passes, so that memory depends on the number of distinct values, not of rows:

1. read: parts of the files are converted (:mod:`dlrm.data.prepare.convert`) and spilled to
   ``OUTPUT/.prepare/blocks``; a category is dictionary-encoded, with the distinct values of its
   block;
2. learn: feature by feature, the values of the training rows make a vocabulary or a scaling;
3. write: block by block, the rows are transformed and written to the splits.

What was learned is a :class:`dlrm.data.prepare.transform.TableTransform`. It is stored with the
result and turns other raw rows into the same features.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from dlrm.data.prepare.column_options import ColumnOptions, SplitOptions, TableOptions
from dlrm.data.prepare.columns import SPLIT, ColumnPlan
from dlrm.data.prepare.files import RawFile, find_files, open_table
from dlrm.data.prepare.fingerprint import fingerprint
from dlrm.data.prepare.infer import plan_table, read_types
from dlrm.data.prepare.passes import convert_files, index_features, write_splits
from dlrm.data.prepare.reuse import extend_vocabularies, plan_of_later_rows
from dlrm.data.prepare.splitting import make_splitter
from dlrm.data.prepare.text_blocks import BLOCK_BYTES
from dlrm.data.prepare.transform import TRANSFORM_FILE, TableTransform
from dlrm.data.prepare.values import numbers, times
from dlrm.data.prepare.workspace import BAD_ROWS_FILE, Workspace
from dlrm.data.preprocess.appending import NOTHING_TO_FORGET
from dlrm.data.schema import META_FILE, Meta
from dlrm.utils.atomic import atomic_write
from dlrm.utils.cpus import cpu_count

FORMAT = 1  # of the spilled blocks; increment it when a restart cannot reuse older ones
OPTIONS_FILE = "table.yaml"
MADE_BY = "scripts/prepare_table.py"


def open_and_plan(
    inputs: Sequence[str | os.PathLike[str]], options: TableOptions, *, skip_bad: bool = False
) -> tuple[list[RawFile], ColumnPlan]:
    """Find the files and decide what each column is.

    Args:
        inputs: files, directories or patterns.
        options: what is given.
        skip_bad: leave out lines that are no rows of the table.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: the files differ, or nothing can be made of a column.
    """
    files = open_table(find_files(inputs), options)
    return files, plan_table(files, options, skip_bad=skip_bad)


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
    known = TableTransform.load(ids_of).plan
    files = open_table(find_files(inputs), known.options)
    return files, *plan_of_later_rows(known, files, split)


def prepare_table(
    files: Sequence[RawFile],
    plan: ColumnPlan,
    output: str | os.PathLike[str],
    *,
    ids_of: Path | None = None,
    append_new: bool = False,
    forget: int | None = None,
    skip_bad: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: bool = True,
) -> Meta:
    """Prepare a table for training.

    If it is killed and called again with the same arguments, it continues, and the results have the
    same bytes. No result gets its final name before the end.

    Args:
        files: the files, from :func:`open_and_plan` or :func:`open_later_rows`.
        plan: what each column is.
        output: directory for ``train.parquet``, ``val.parquet``, ``test.parquet``, ``vocabulary/``,
            ``transform.json``, ``table.yaml``, ``bad_rows.json`` and ``meta.json``.
        ids_of: a prepared directory, or a copy of its transform: nothing is learned of these rows,
            they get its ids and scalings.
        append_new: with ``ids_of``, values of the training rows that it does not list get ids too.
        forget: with ``append_new``, these are first the ids of values that were in the training
            rows of none of as many preparations, this one included.
        skip_bad: leave out rows that do not fit, and report them in ``bad_rows.json``.
        overwrite: replace what was prepared there with other options.
        workers: threads; by default one per core that the process may use.
        block_bytes: size of the blocks of text that are converted and spilled.
        progress: show progress bars on standard error.

    Returns:
        The contents of ``meta.json``.

    Raises:
        ValueError: a row or value doesn't fit, there are no rows to train on, or ``output`` holds
            other data.
    """
    options: dict[str, Any] = {
        "made_by": MADE_BY,
        "options": asdict(replace(plan.options, columns={})),
        "columns": {column.name: asdict(column.options) for column in plan.columns},
        "ids_of": None if ids_of is None else str(ids_of),
        "bad_rows": "skip" if skip_bad else "stop",
    }
    if append_new:
        _require_fingerprint(ids_of)
        options["append_new"] = True
    if forget is not None:
        if not append_new:
            raise ValueError(NOTHING_TO_FORGET)
        options["forget"] = forget
    if ids_of is not None and ids_of.resolve() == Path(output).resolve():
        raise ValueError(f"--ids-of {ids_of} is also the output; give another --output")
    inputs = [file.path for file in files]
    key = {
        "format": [FORMAT, block_bytes],
        "options": options,
        "ids_of": ids_of and [str(ids_of.resolve()), _modified(ids_of)],
    }
    with Workspace(Path(output), key, inputs=inputs, overwrite=overwrite) as work:
        if not work.finished:
            make = partial(_make, files, plan, options, ids_of, work)
            make(workers or cpu_count(), block_bytes, progress)
        work.publish()
    return Meta.read(output)


def _make(
    files: Sequence[RawFile],
    plan: ColumnPlan,
    options: dict[str, Any],
    ids_of: Path | None,
    work: Workspace,
    workers: int,
    block_bytes: int,
    progress: bool,
) -> None:
    """Make all results in the workspace."""
    skip_bad, append_new = options["bad_rows"] == "skip", "append_new" in options
    blocks, bad = convert_files(
        files,
        plan,
        read_types(plan, files, skip_bad=skip_bad),
        work,
        block_bytes=block_bytes,
        workers=workers,
        progress=progress,
        skip_bad=skip_bad,
    )
    if not blocks:
        if bad.count:
            why = f"{bad.first[0]['kind']}: {bad.first[0]['message']}"
            raise ValueError(f"{files[0].path}: none of its {bad.count:,} rows fits; row 1, {why}")
        raise ValueError(f"{files[0].path} has no rows; give a table that has some")
    rows = blocks[-1].first + blocks[-1].rows
    splitter = make_splitter(
        plan.options.split,
        rows,
        lambda: (block.column(SPLIT).to_numpy() for block in blocks),
        lambda text: _limit(plan, text),
    )
    learns = ids_of is None or append_new
    if learns and not any((block.codes(splitter) == 0).any() for block in blocks):
        remedy = "leave --append-new out or " if append_new else ""
        raise ValueError(
            f"no rows to learn from: {rows:,} rows were read and the split leaves none for "
            f"training; {remedy}choose another split"
        )
    if ids_of is None:
        transform = index_features(blocks, plan, splitter, work, progress=progress)
    else:
        transform = replace(TableTransform.load(ids_of), plan=plan)
        for feature in plan.categorical:
            file = Meta.vocabulary_file(feature.name)
            shutil.copyfile(ids_of / file, work / file)
        if append_new:
            extend_vocabularies(blocks, transform, splitter, work, options.get("forget"))
    splits = write_splits(blocks, transform, splitter, work, workers=workers, progress=progress)
    label, weight = plan.only("label"), plan.only("weight")
    assert label is not None
    transform.save(work.directory)
    with atomic_write(work / OPTIONS_FILE) as temporary:
        temporary.write_text(options_as_yaml(plan))
    with atomic_write(work / BAD_ROWS_FILE) as temporary:
        temporary.write_text(json.dumps(bad.as_json(), indent=2) + "\n")
    own = fingerprint(
        work.directory, [feature.name for feature in plan.categorical], transform.rules()
    )
    extends: tuple[Mapping[str, Any], ...] = ()
    if ids_of is not None and (ids_of / META_FILE).is_file():
        extends = Meta.read(ids_of).extended_by(own)
    Meta(
        label=label.name,
        weight=None if weight is None else weight.name,
        dense=tuple(feature.name for feature in plan.dense),
        categorical=transform.categorical,
        splits=splits,
        options=options,
        inputs=tuple(file.record() for file in files),
        fingerprint=own,
        extends=extends,
    ).write(work.directory)


def _require_fingerprint(ids_of: Path | None) -> None:
    """Raise unless a run on later data can tell that it extends ``ids_of``."""
    if ids_of is None:
        raise ValueError("--append-new needs --ids-of, the data whose ids come first")
    if not (ids_of / META_FILE).is_file() or Meta.read(ids_of).fingerprint is None:
        raise ValueError(
            f"--append-new: {ids_of} has no {META_FILE} with a fingerprint; prepare it again"
        )


def options_as_yaml(plan: ColumnPlan) -> str:
    """The options with every column, for ``--config``: the same table is prepared the same."""
    content: dict[str, Any] = {}
    for name, value in _different(plan.options, TableOptions()).items():
        if isinstance(value, SplitOptions):
            value = _different(value, SplitOptions())
        if name != "columns":
            content[name] = list(value) if isinstance(value, tuple) else value
    content["columns"] = {}
    for column in plan.columns:
        own = _different(column.options, ColumnOptions())
        own = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
        content["columns"][column.name] = own["kind"] if len(own) == 1 else own
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def _modified(prepared: Path) -> list[int]:
    """When the files that :func:`_make` reads of a preparation were written, in ns."""
    names = (TRANSFORM_FILE, META_FILE)
    return [(prepared / name).stat().st_mtime_ns for name in names if (prepared / name).exists()]


def _different(options: Any, default: Any) -> dict[str, Any]:
    """The options that are not the default."""
    names = [field.name for field in fields(options)]
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _limit(plan: ColumnPlan, text: str) -> float:
    """A limit of a split by time, in the unit of the column."""
    column = next(column for column in plan.columns if column.name == plan.options.split.column)
    where = "split: val_from or test_from"
    if column.numeric:
        return float(numbers(pa.array([text]), where, column.options.marks)[0])
    return float(times(pa.array([text]), where, (), None, "s")[0])
