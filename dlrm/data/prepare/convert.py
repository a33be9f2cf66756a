"""Rows of a table's files in the forms that features are made of, with errors that name the row.

Categories and lists become dictionary arrays without nulls, in which a missing value is "".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..column_values import is_list
from .bad_rows import BadValue, shown
from .codes import label_rule, labels, split_codes
from .columns import SPLIT, ColumnPlan, Feature
from .keys import hash_values, hex_keys, modulo
from .numbers import Scaling
from .values import (
    MISSING_TIME,
    as_texts,
    decoded,
    encoded,
    is_text,
    numbers,
    time_part,
    times,
    vectors,
    weights,
)


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
                weights(raw[column.name], column.name, column.options.marks)
            )
    if required and options.split.column is not None:
        columns[SPLIT] = _split_column(plan, raw)

    # The parts of a time or a vector share what was parsed.
    moments: dict[str, np.ndarray] = {}
    for feature in plan.features:
        column = feature.column
        name, chosen = column.name, column.options
        if column.kind == "time":
            if name not in moments:
                form = chosen.format, chosen.unit, column.zone
                moments[name] = times(raw[name], name, options.missing, *form)
            columns[feature.name] = time_part(moments[name], feature.part)
        elif column.kind == "vector":
            if name not in moments:
                moments[name] = vectors(raw[name], name, chosen.size or 0)
            place = int(feature.part.removesuffix("_bucket"))
            columns[feature.name] = pa.array(moments[name][place])
        else:
            columns[feature.name] = _feature_column(plan, feature, raw[name])

    columns |= {column.name: raw[column.name] for column in there if column.kind == "pass"}
    return pa.RecordBatch.from_pydict(columns)


def _feature_column(plan: ColumnPlan, feature: Feature, raw: pa.Array) -> pa.Array:
    column, options, missing = feature.column, feature.column.options, plan.options.missing
    if column.kind == "number":
        found = numbers(raw, column.name, options.marks, missing)
        if plan.hexadecimal:  # whose scaling is known: half as much is spilled
            return pa.array(Scaling(transform=str(options.transform)).apply(found))
        return pa.array(found)
    if plan.hexadecimal:
        return hex_categories(raw, column.name, plan.cap)
    if column.kind == "list":
        return lists(raw, column.name, missing, options.separator, options.hash)
    return categories(raw, column.name, missing, options.hash)


def _split_column(plan: ColumnPlan, raw: pa.RecordBatch) -> pa.Array:
    """The values that the splits depend on: positions of splits, or times as float64."""
    split = plan.options.split
    assert split.column is not None
    name, array = split.column, raw[split.column]
    if split.by == "column":
        return split_codes(array, name)

    column = next(column for column in plan.columns if column.name == name)
    chosen = column.options
    if column.numeric:
        found = numbers(array, name, chosen.marks, plan.options.missing)
    else:
        form = chosen.format, chosen.unit, column.zone
        moments = times(array, name, plan.options.missing, *form)
        found = np.where(moments == MISSING_TIME, np.nan, moments)
    if len(rows := np.flatnonzero(np.isnan(found))):
        problem = "the value is missing, and the split depends on it; leave out such rows"
        raise BadValue(name, rows, problem)
    return pa.array(found)


def categories(
    array: pa.Array, name: str, missing: Sequence[str], buckets: int | None = None
) -> pa.DictionaryArray:
    """``[n]`` texts as a dictionary array without nulls; a missing one is "".

    The column may hold texts, integers, floats, bools, dates or bytes. A float without a fraction
    is written as an integer, as programs store integers with gaps as floats. Values can be hashed
    to a number of ``buckets``.
    """
    array = encoded(array, name)
    indices, values = array.indices, as_texts(array.dictionary, name)
    values = pc.if_else(pc.is_in(values, pa.array(missing, values.type)), "", values)
    bools = pc.is_in(values, pa.array(["True", "False"], values.type))  # in a CSV of pandas
    values = pc.if_else(bools, pc.utf8_lower(values), values)
    indices, values = _without_nulls(indices, values)
    if buckets is not None:
        values = hash_values(values, buckets)
    return pa.DictionaryArray.from_arrays(indices.cast(pa.int32()), values)


def _without_nulls(indices: pa.Array, values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The indices and the texts, or bytes, of a dictionary array; a missing one is "", not null."""
    empty = pa.scalar(b"", pa.binary()).cast(values.type)
    values = values.fill_null(empty)
    if not indices.null_count:
        return indices, values
    values = pa.concat_arrays([values, pa.array([empty])])
    return indices.cast(pa.int32()).fill_null(len(values) - 1), values


def hex_categories(array: pa.Array, name: str, cap: int | None) -> pa.DictionaryArray:
    """``[n]`` texts of up to 8 hex digits as a dictionary array of integer keys, modulo ``cap``."""
    array = encoded(array, name)
    indices, values = array.indices, array.dictionary
    if not is_text(values.type) and values.type not in (pa.null(), pa.binary()):
        problem = f"it holds {values.type}, not texts of hex digits; read it as text"
        raise BadValue(name, [], problem)

    indices, values = _without_nulls(indices, values.cast(pa.binary()))
    try:
        keys = modulo(hex_keys(values), cap)
    except ValueError:
        good = pc.match_substring_regex(values, "^[0-9a-fA-F]{0,8}$")
        rows = np.flatnonzero(~good.take(indices).to_numpy(zero_copy_only=False))
        wrong = values.take(indices)[int(rows[0])].as_py().decode(errors="backslashreplace")
        problem = f"{shown(wrong)} is not 1 to 8 hex digits; correct it"
        raise BadValue(name, rows, problem) from None

    narrow = pa.from_numpy_dtype(np.min_scalar_type(len(keys)))  # halves what is spilled
    return pa.DictionaryArray.from_arrays(indices.cast(narrow), pa.array(keys))


def lists(
    array: pa.Array,
    name: str,
    missing: Sequence[str],
    separator: str | None = None,
    buckets: int | None = None,
) -> pa.LargeListArray:
    """``[n]`` lists of texts, as lists of a dictionary array; missing entries are left out.

    The column holds lists of what :func:`categories` takes, or texts to cut at ``separator``.
    """
    array = decoded(array)
    if array.type == pa.null():
        array = array.cast(pa.list_(pa.string()))
    if is_text(array.type):
        if separator is None:
            raise BadValue(
                name, [], f"it is text, not lists; add separator: to columns: {name}: in the YAML"
            )
        array = split_lists(array, separator)
    elif not is_list(array.type):
        raise BadValue(name, [], f"it holds {array.type}, not lists; make it another kind")

    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
    entries = array.flatten()
    if is_text(entries.type):
        entries = pc.utf8_trim_whitespace(entries)
    entries = categories(entries, name, missing, buckets)

    # Missing entries are left out.
    empty = pc.equal(entries.dictionary, "")
    if pc.any(empty).as_py():
        kept = ~empty.take(entries.indices).to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(rows[kept], minlength=len(lengths))
        entries = entries.filter(pa.array(kept))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(pa.array(offsets), entries)


def split_lists(texts: pa.Array, separator: str) -> pa.Array:
    """Lists of what stands between separators; those such as ``[,]`` have brackets around."""
    if len(separator) < 3 or separator[0] + separator[-1] != "[]":
        return pc.split_pattern(texts, separator)
    inner = pc.replace_substring_regex(texts, r"^\s*[\[(](.*)[\])]\s*$", r"\1")
    inner = pc.replace_substring_regex(inner, r"""['"]""", "")
    return pc.split_pattern(inner, separator[1:-1])
