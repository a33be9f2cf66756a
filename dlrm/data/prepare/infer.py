"""The kind of each column of a table: inferred from the first rows, unless it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import starmap

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...utils.messages import did_you_mean
from . import codes
from .bad_rows import BadRow, BadValue
from .codes import find_negative
from .column_options import ALL_OTHERS, ColumnOptions, TableOptions, TimePart, yaml_line
from .columns import FEW_BUCKETED, Column, ColumnPlan
from .csv_layout import no_header_hint
from .files import ParquetPart, RawFile
from .histories import with_hints
from .kinds import (
    OF_THE_DAY,
    InferredKind,
    NoFeatureError,
    find_kind,
    find_split_time,
    find_time_format,
    find_written_number,
    whole_days,
)
from .list_texts import find_separator
from .plan_summary import format_plan
from .telling import FEW_NUMBERS, buckets_tell, names_that_tell
from .text_formats import CsvPart
from .values import decoded, is_text, type_name, without_texts

SAMPLE_BYTES = 4 << 20
WIDE = 500  # columns; the first rows of more columns are more bytes
PARTS: tuple[TimePart, ...] = ("hour", "weekday", "age")


def plan_columns(
    files: Sequence[RawFile], options: TableOptions, *, skip_bad: bool = False
) -> ColumnPlan:
    """Decide what each column is, from the first rows of the first and the last file.

    Raises:
        ValueError: the options name a column that does not exist, or nothing can be made of one.
    """
    batches, times = _samples(files, skip_bad)
    if not batches:
        raise ValueError(f"{files[0].path} has no rows; give a table that has some")
    samples = [dict(zip(rows.schema.names, rows.columns, strict=True)) for rows in batches]
    names = batches[0].schema.names
    given = _named(options, names, files[0])
    labels = [_known_labels(sample, given, options) for sample in samples]

    # All columns are found before any error, so that they can be printed.
    columns, useless, gaps = [], dict[str, str](), dict[str, float]()
    for name in names:
        parts = [
            (without_texts(decoded(sample[name]), options.missing), sampled)
            for sample, sampled in zip(samples, labels, strict=True)
            if name in sample
        ]
        named, untyped = given.get(name, ColumnOptions()), files[0].format == "csv"
        try:
            columns.append(_column(name, parts, named, options, untyped=untyped, times=times))
            if columns[-1].kind == "number" != named.kind:
                gaps[name] = max(starmap(buckets_tell, parts))
        except NoFeatureError as error:
            useless[name] = str(error)
            found, left_out = type_name(parts[0][0].type), ColumnOptions(kind="drop")
            columns.append(Column(name=name, found=found, why=str(error), options=left_out))

    # What is wrong with all of them together.
    columns = with_hints(columns, samples[0])
    plan = ColumnPlan(options=options, columns=tuple(columns))
    if useless:
        raise ColumnsError(_no_features(useless), plan)
    try:
        options = _with_negative(options, columns, files, batches, skip_bad)
    except ValueError as error:
        told = error.located(files[0].path) if isinstance(error, BadRow) else error
        raise ColumnsError(str(told), plan) from None
    # A number that the options or its order have given buckets makes no table of ids.
    if any(not f.bucketed or f.column.why.startswith("given") for f in plan.categorical):
        most = sorted((name for name in gaps if gaps[name] > 1), key=gaps.__getitem__, reverse=True)
        plan = _bucketed(plan, most[:FEW_BUCKETED], "as labels jump between them or with gaps")
    else:
        plan = _bucketed(plan, _to_bucket(columns, samples[0], labels[0]), "which a model needs")
    if not plan.categorical:
        line = yaml_line("NAME", "category")
        problem = f"{files[0].path}: no column is a category or list, and a model needs one"
        raise ColumnsError(f"{problem}; set one with {line} in the YAML of --config", plan)
    return replace(plan, options=options)


def _bucketed(plan: ColumnPlan, names: Sequence[str], why: str) -> ColumnPlan:
    """The plan with buckets of some columns."""
    columns = [
        replace(
            column,
            why=f"{column.why}; buckets are ids, {why}",
            options=replace(column.options, bucketed=True),
        )
        if column.name in names
        else column
        for column in plan.columns
    ]
    return replace(plan, columns=tuple(columns))


def _to_bucket(
    columns: Sequence[Column], sample: Mapping[str, pa.Array], labels: NDArray[np.uint8] | None
) -> list[str]:
    """The numbers, or the first vector, of a table without ids that get buckets. Of many numbers,
    these are those that say most of the label in the first rows."""
    names = [column.name for column in columns if column.kind == "number"]
    if len(names) > FEW_NUMBERS:
        names = (names_that_tell(names, sample, labels) or names)[:FEW_BUCKETED]
    return names or [column.name for column in columns if column.kind == "vector"][:1]


class ColumnsError(ValueError):
    """Columns do not make a model's features and label; ``plan`` is what was found of them."""

    def __init__(self, problem: str, plan: ColumnPlan) -> None:
        super().__init__(problem)
        self.summary = format_plan(plan)
        """The columns, to be printed before the error."""


def _no_features(reasons: Mapping[str, str]) -> str:
    """The error of columns of which nothing can be made, and which are not left out silently."""
    them = "them" if len(reasons) > 1 else "it"
    what = "columns can't be features" if len(reasons) > 1 else "column can't be a feature"
    listed = ", ".join(f"{name!r} ({reason})" for name, reason in reasons.items())
    drop, keep = (", ".join(f"{name}: {kind}" for name in reasons) for kind in ("drop", "pass"))
    return (
        f"{what}: {listed}; leave {them} out with columns: {{{drop}}}, or copy {them} to the "
        f"result with columns: {{{keep}}}"
    )


def _known_labels(
    sample: Mapping[str, pa.Array], given: Mapping[str, ColumnOptions], options: TableOptions
) -> NDArray[np.uint8] | None:
    """The labels of the first rows, if all are 0 or 1."""
    if options.positive is not None and options.negative is None:
        options = replace(options, negative=(ALL_OTHERS,))  # what counts as 0 is found later
    name = next(name for name, column in given.items() if column.kind == "label")
    with suppress(BadValue, KeyError):
        found = codes.labels(sample[name], name, codes.label_rule(options, name))
        return found.to_numpy(zero_copy_only=False)
    return None


def _column(
    name: str,
    parts: Sequence[tuple[pa.Array, NDArray[np.uint8] | None]],
    column: ColumnOptions,
    options: TableOptions,
    *,
    untyped: bool,
    times: float,
) -> Column:
    """One column, with its kind as given or as inferred from its first values and labels, and from
    how many times as many rows the table has."""
    values = [part for part, _ in parts]
    if len({part.type for part in values}) < len(values) and all(map(_is_constant, values)):
        parts = [(pa.concat_arrays(values), None)]  # such as the day, of which each file has one
    by_time = options.split.by == "time" and options.split.column == name
    in_order = options.split.by in ("rows", "days")

    # The kind, as given or found.
    if column.kind is None:
        candidates = [
            find_split_time(name, part, untyped)
            if by_time
            else find_kind(name, part, untyped, labels, times, in_order)
            for part, labels in parts
        ]
        if {candidate.kind for candidate in candidates} == {"list"} and is_text(values[0].type):
            both = pa.concat_arrays([part.cast(pa.string()) for part in values])
            candidates.append(find_kind(name, both, untyped, None, times / len(values)))
        inferred = min(candidates, key=lambda candidate: candidate.kind != "category")
    else:
        note = "; later rows are out of its range" if by_time and column.kind == "number" else ""
        inferred = InferredKind(kind=column.kind, why=f"given{note}")
        if column.kind in ("number", "weight") and column.marks is None:
            inferred = _written(values, inferred)
        elif column.kind == "time" and is_text(values[0].type):
            inferred = replace(inferred, format=find_time_format(values[0]))
        elif column.kind == "vector" and column.size is None:
            inferred = replace(inferred, size=find_kind(name, values[0], untyped).size)

    # Its options, with what was found of how values are written.
    column = replace(
        column,
        kind=inferred.kind,  # type: ignore[arg-type]
        unit=inferred.unit or column.unit,  # type: ignore[arg-type]
        format=column.format or inferred.format,
        size=column.size or inferred.size,
        bucketed=column.bucketed or inferred.bucketed,
        **asdict(inferred.marks) if inferred.marks else {},
    )
    filled = _filled(column, values[0], options)
    return Column(name=name, found=type_name(values[0].type), why=inferred.why, options=filled)


def _is_constant(values: pa.Array) -> bool:
    single = not pa.types.is_nested(values.type) and values.type != pa.null()
    return single and pc.count_distinct(values).as_py() == 1


def _written(parts: Sequence[pa.Array], given: InferredKind) -> InferredKind:
    """A kind that is given, with how its numbers are written."""
    for part in parts:
        found = find_written_number("", part) if is_text(part.type) else None
        if found is not None and found.marks is not None:
            return replace(found, kind=given.kind, why=f"{given.why}; {found.why}")
    return given


def _with_negative(
    options: TableOptions,
    columns: Sequence[Column],
    files: Sequence[RawFile],
    samples: Sequence[pa.RecordBatch],
    skip_bad: bool,
) -> TableOptions:
    """The options with the value of the label that counts as 0, if it has to be found."""
    if options.positive is None or options.negative is not None:
        return options
    name = next(column.name for column in columns if column.kind == "label")
    if files[0].format == "csv":  # as texts: what looks like a bool or a number stays as it is
        samples, _ = _samples(files, skip_bad, {name: pa.string()})
    found = find_negative(
        [rows[name] for rows in samples if name in rows.schema.names], name, options.positive
    )
    return replace(options, negative=(found,))


def _samples(
    files: Sequence[RawFile], skip_bad: bool, types: Mapping[str, pa.DataType] | None = None
) -> tuple[list[pa.RecordBatch], float]:
    """The first rows of the first and of the last file that has any, and about how many times as
    many rows as one of these all files have."""
    ends, read = [], 0
    for order in (files, files[:0:-1]):
        batches = (_sample(file, skip_bad, types) for file in order)
        if found := next(((rows, size) for rows, size in batches if rows.num_rows), None):
            ends.append(found[0])
            read += found[1]
    whole = sum(file.path.stat().st_size for file in files)
    return ends, whole * len(ends) / max(1, read)


def _sample(
    file: RawFile, skip_bad: bool, types: Mapping[str, pa.DataType] | None = None
) -> tuple[pa.RecordBatch, int]:
    """The first rows of a file, and how many of its bytes these are."""
    wide = max(1, len(file.names) // WIDE)  # so that there are many rows of many columns, too
    part = None
    for part in file.parts(SAMPLE_BYTES * wide):
        if isinstance(part, ParquetPart) or part.data:  # more than a header before a long row
            break
    if part is None:  # Parquet without rows
        return pa.RecordBatch.from_pylist([], pq.read_schema(file.path)), 0
    try:
        if isinstance(part, ParquetPart):
            return part.batch, part.consumed
        if types is not None and isinstance(part, CsvPart):
            return part.infer(skip_bad=skip_bad, types=types), part.consumed
        return part.infer(skip_bad=skip_bad), part.consumed
    except BadRow as error:
        raise error.located(file.path) from None


def _named(options: TableOptions, names: Sequence[str], file: RawFile) -> dict[str, ColumnOptions]:
    """The options of each column that has some, with those named as label, weight and split."""
    # Options of their own name the label, the weight and the split.
    given = dict(options.columns)
    split = options.split.column if options.split.by == "column" else None
    label = options.label
    if label is not None and label not in names and (found := codes.split_comparison(label)):
        label = found[0]
    if label is None and not any(column.kind == "label" for column in given.values()):
        label = "label"
    for kind, name in {"label": label, "weight": options.weight, "split": split}.items():
        if name is not None:
            given[name] = replace(given.get(name, ColumnOptions()), kind=kind)  # type: ignore[arg-type]

    # All that are named are there, and each of the three is one column.
    for name in [*given, *filter(None, [options.split.column])]:
        if name not in names:
            what = "label" if name == label else "column"
            hint = ""
            if name == label and "=" in name:
                hint = "; a comparison is written as in 'rating >= 4' or 'status == paid'"
            if name == "label" and options.label is None:
                hint = "; name it with --label: a column of 0 and 1, or 'rating >= 4'"
            hint += no_header_hint(file.layout)
            raise ValueError(f"{file.path} has no {what} {name!r}{did_you_mean(name, names)}{hint}")

    for kind in ("label", "weight", "split"):
        several = [name for name, column in given.items() if column.kind == kind]
        if len(several) > 1:
            raise ValueError(f"{' and '.join(several)} are both the {kind}; name one column")
    if any(column.kind == "split" for column in given.values()) and options.split.by != "column":
        raise ValueError("a column is of kind split, so add split: {by: column, column: NAME}")
    return given


def _filled(column: ColumnOptions, sample: pa.Array, options: TableOptions) -> ColumnOptions:
    """The options of a column with all defaults."""
    if column.kind == "number":
        return replace(column, transform=column.transform or options.transform)
    if column.kind == "vector":
        if column.size is None:
            raise NoFeatureError(f"{sample.type}, not lists of numbers")
        default = "auto" if options.transform == "quantile" else options.transform
        return replace(column, transform=column.transform or default)
    if column.kind == "time":
        dates = pa.types.is_date(sample.type) or whole_days(sample, column.format)
        parts = PARTS[::2] if column.format in OF_THE_DAY else PARTS[1:] if dates else PARTS
        return replace(column, parts=column.parts or parts)
    if column.kind not in ("category", "list"):
        return column

    # Values that get ids.
    separator = column.separator
    if column.kind == "list" and separator is None and sample.type == pa.null():
        separator = "|"  # of a CSV, whose first rows have none
    elif column.kind == "list" and separator is None and is_text(sample.type):
        separator = find_separator(sample)[0] or "|"
    return replace(
        column,
        separator=separator,
        min_count=column.min_count or options.min_count,
        cap=column.cap or options.cap,
        hash=column.hash or options.hash,
    )


def read_types(
    plan: ColumnPlan,
    files: Sequence[RawFile],
    keep: Sequence[str] = (),
    *,
    skip_bad: bool = False,
) -> Mapping[str, pa.DataType]:
    """The type that each needed column, and those to ``keep``, is read with, where the format
    leaves a choice; no type for other columns of JSON."""
    form = files[0].format
    inferred = dict(json_types(files[0], skip_bad=skip_bad)) if form == "json" else {}

    # Columns to keep are read as they are written.
    names = [*(column.name for column in plan.needed), *keep]
    types = {name: inferred.get(name, pa.string()) for name in names}
    for column in (column for column in plan.needed if column.name not in keep):
        moment = column.kind == "time" and column.numeric
        plain = column.kind == "number" and column.options.marks is None
        if plain or moment:
            types[column.name] = pa.float64()

        # Values that repeat are parsed once; hex digits are checked all at once, as bytes.
        elif plan.hexadecimal and column.kind == "category":
            types[column.name] = pa.dictionary(pa.int32(), pa.binary())
        elif form == "csv" and column.kind in ("category", "label", "split"):
            types[column.name] = pa.dictionary(pa.int32(), pa.string())
    return types | {name: pa.null() for name in inferred if name not in types}


def json_types(file: RawFile, *, skip_bad: bool = False) -> Mapping[str, pa.DataType]:
    """The types of JSON values; a time is read as the text that it is."""
    types = {}
    for field in _sample(file, skip_bad)[0].schema:
        temporal = pa.types.is_temporal(field.type) or field.type == pa.null()
        types[field.name] = pa.string() if temporal else field.type
    return types
