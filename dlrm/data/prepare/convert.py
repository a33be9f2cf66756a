"""Rows of a table's files in the forms that features are made of, with errors that name the row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from . import category_values, values
from .bad_rows import BadValue
from .codes import label_rule, labels, split_codes
from .columns import SPLIT, ColumnPlan, Feature
from .numbers import Scaling


def convert_rows(plan: ColumnPlan, raw: pa.RecordBatch, *, required: bool = True) -> pa.RecordBatch:
    """Convert raw rows; nothing here depends on other rows.

    Unless they are ``required``, the label, the weight and passed columns are converted if they are
    there, and nothing for the split. A label may then be null.

    Returns:
        float64 for numbers, NaN where missing (those of Criteo: scaled, float32); dictionary
        arrays of texts for categories, large lists of them for lists; label uint8, weight
        float32; passed columns as they are.

    Raises:
        BadValue: a value does not fit the kind of its column.
    """
    options = plan.options
    columns: dict[str, pa.Array] = {}
    names = set(raw.schema.names)
    there = [column for column in plan.columns if required or column.name in names]

    # What is no feature: the label, the weight and the split.
    for column in there:
        if column.kind == "label":
            rule = label_rule(options, column.name)
            columns[column.name] = labels(raw[column.name], column.name, rule, required=required)
        elif column.kind == "weight":
            columns[column.name] = pa.array(
                values.weights(raw[column.name], column.name, column.options.marks)
            )
    if required and options.split.column is not None:
        columns[SPLIT] = _split_column(plan, raw)

    # The parts of a time or a vector share what was parsed.
    moments: dict[str, np.ndarray] = {}
    for feature in plan.features:
        column = feature.column
        name, own = column.name, column.options
        if column.kind == "time":
            if name not in moments:
                form = own.format, own.unit
                moments[name] = values.times(raw[name], name, options.missing, *form)
            columns[feature.name] = values.time_part(moments[name], feature.part)
        elif column.kind == "vector":
            if name not in moments:
                moments[name] = values.vectors(raw[name], name, own.size or 0)
            columns[feature.name] = pa.array(moments[name][int(feature.part)])
        else:
            columns[feature.name] = _feature_column(plan, feature, raw[name])

    columns |= {column.name: raw[column.name] for column in there if column.kind == "pass"}
    return pa.RecordBatch.from_pydict(columns)


def _feature_column(plan: ColumnPlan, feature: Feature, raw: pa.Array) -> pa.Array:
    column, own, missing = feature.column, feature.column.options, plan.options.missing
    if column.kind == "number":
        found = values.numbers(raw, column.name, own.marks, missing)
        if plan.hexadecimal:  # whose scaling is known: half as much is spilled
            return pa.array(Scaling(transform=str(own.transform)).apply(found))
        return pa.array(found)
    if plan.hexadecimal:
        return category_values.hex_categories(raw, column.name, plan.cap)
    if column.kind == "list":
        return category_values.lists(raw, column.name, missing, own.separator, own.hash)
    return category_values.categories(raw, column.name, missing, own.hash)


def _split_column(plan: ColumnPlan, raw: pa.RecordBatch) -> pa.Array:
    """The values that the splits depend on: positions of splits, or times as float64."""
    split = plan.options.split
    assert split.column is not None
    name, array = split.column, raw[split.column]
    if split.by == "column":
        return split_codes(array, name)

    column = next(column for column in plan.columns if column.name == name)
    own = column.options
    if column.numeric:
        found = values.numbers(array, name, own.marks, plan.options.missing)
    else:
        moments = values.times(array, name, plan.options.missing, own.format, own.unit)
        found = np.where(moments == values.MISSING_TIME, np.nan, moments)
    if len(rows := np.flatnonzero(np.isnan(found))):
        problem = "the value is missing, and the split depends on it; leave out such rows"
        raise BadValue(name, rows, problem)
    return pa.array(found)
