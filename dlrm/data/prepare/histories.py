"""Lists of what another column has one of, such as the items that a user had seen before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from .column_options import yaml_line
from .columns import Column
from .convert import split_lists
from .values import decoded, is_text

ENOUGH = 50  # different entries; fewer may be values of another column by chance
SHARE = 0.8  # of these, which its first rows have as well


def with_hints(columns: Sequence[Column], sample: Mapping[str, pa.Array]) -> list[Column]:
    """The columns, of which lists say how they get the vocabulary of another column: what is
    learned of an item is then known of it in each list."""
    values = {c.name: decoded(sample[c.name]) for c in columns if c.name in sample}
    single = {
        column.name: _texts(values[column.name])
        for column in columns
        if column.kind == "category" and column.name in values
        # Not bytes, which may be no texts, or lists, which can't be categories: told later.
        if is_text(kind := values[column.name].type) or pa.types.is_integer(kind)
    }
    return [
        replace(column, why=f"{column.why}{_hint(column, values[column.name], single)}")
        if column.kind == "list" and not column.why.startswith("given") and column.name in values
        else column
        for column in columns
    ]


def _hint(column: Column, values: pa.Array, single: Mapping[str, pa.Array]) -> str:
    """The line of YAML by which lists have the vocabulary of the one column with their entries."""
    separator = column.options.separator
    lists = split_lists(values, separator) if separator and is_text(values.type) else values
    entries = _texts(decoded(pc.list_flatten(lists)))
    if len(entries) < ENOUGH:
        return ""
    shares = {name: pc.mean(pc.is_in(entries, known)).as_py() for name, known in single.items()}
    same = [name for name, share in shares.items() if share > SHARE]
    if len(same) != 1:
        return ""
    options = {"kind": "list", "vocabulary": same[0]}
    options |= {"separator": separator} if separator else {}
    return f"; if the entries are of {same[0]}: {yaml_line(column.name, options)}"


def _texts(values: pa.Array) -> pa.Array:
    """The different values, as texts."""
    return pc.utf8_trim_whitespace(values.drop_null().unique().cast(pa.string()))
