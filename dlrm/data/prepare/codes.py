"""Columns whose few values stand for numbers: the label and the split of a row."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .bad_rows import BadValue, shown
from .column_options import ALL_OTHERS, TableOptions
from .values import as_texts, decoded, encoded, numbers

LABELS = {
    "0": 0, "1": 1, "false": 0, "true": 1, "False": 0, "True": 1, "FALSE": 0, "TRUE": 1
}  # fmt: skip
SPLIT_VALUES = {
    "train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2,
    "testing": 2,
}  # fmt: skip
"""The texts that a split column may hold, and the position of the split in ``SPLITS``."""
ORDERS = {
    ">=": np.greater_equal, ">": np.greater, "<=": np.less_equal, "<": np.less
}  # fmt: skip
COMPARISON = re.compile(r"\s*(.+?)\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*")
MOST_SHOWN = 8  # values of a label in a message


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """Which values of a label count as 1; without any option, 0 and 1, or false and true."""

    positive: Sequence[str] | None = None
    negative: Sequence[str] = ()
    """The values that count as 0; ``("*",)``: all others."""
    operator: str | None = None
    """Of a comparison, as in ``rating >= 4``."""
    value: str = ""

    def __str__(self) -> str:
        if self.operator is not None:
            return f"1 if {self.operator} {self.value}" + "''" * (not self.value)
        if self.positive is None:
            return "0 or 1"
        zero = "all others" if ALL_OTHERS in self.negative else " ".join(self.negative)
        return f"1: {' '.join(self.positive)}, 0: {zero}"

    def apply(self, array: pa.Array, name: str, *, required: bool = True) -> pa.Array:
        """``[n]`` labels as uint8; null if missing and not ``required``.

        Raises:
            BadValue: a label is missing or another value.
        """
        must = "the label must be there"

        # A comparison, with numbers or with a text.
        if self.operator in ORDERS:
            found = numbers(array, name)
            missing = np.isnan(found)
            if required and missing.any():
                problem = f"the value is missing; {must}: leave out rows without it"
                raise BadValue(name, np.flatnonzero(missing), problem)
            larger = ORDERS[self.operator](found, float(self.value))
            return pa.array(larger.astype(np.uint8), mask=missing)
        if self.operator is not None:
            equal = int(self.operator == "==")
            codes = {_plain(self.value): equal}
            return _mapped(array, name, codes, must, "", other=1 - equal, required=required)

        # Values that are listed, or 0 and 1.
        optional = "" if required else "correct it, or leave the column out: scores need no label"
        if self.positive is None:
            rule = "it must be 0 or 1 (false or true), as a model has one binary label"
            return _mapped(array, name, LABELS, rule, optional or None, required=required)

        ones = dict.fromkeys(map(_plain, self.positive), 1)
        if ALL_OTHERS in self.negative:
            return _mapped(array, name, ones, must, "", other=0, required=required)
        rule = f"it must be {_listed(self.positive)} (counts as 1) or {_listed(self.negative)} (0)"
        hint = "correct it, or list all values that count as 0 with negative: in the YAML"
        zeros = dict.fromkeys(map(_plain, self.negative), 0)
        return _mapped(array, name, zeros | ones, rule, optional or hint, required=required)


def split_comparison(label: str) -> tuple[str, LabelRule] | None:
    """The column and the rule of a label such as ``rating >= 4``; None if it is no comparison.

    Raises:
        ValueError: the value is not a number, but must be one.
    """
    found = COMPARISON.fullmatch(label)
    if found is None:
        return None
    column, operator, value = found.groups()
    if operator in ORDERS:
        try:
            float(value)
        except ValueError:
            raise ValueError(
                f"label {label!r}: {value!r} is not a number; compare with one, or with == or !="
            ) from None
    return column, LabelRule(operator=operator, value=value.strip("'\""))


def label_rule(options: TableOptions, column: str) -> LabelRule:
    """Which values of the label's column count as 1."""
    if options.label not in (None, column) and (found := split_comparison(options.label or "")):
        return found[1]
    return LabelRule(positive=options.positive, negative=options.negative or ())


def labels(
    array: pa.Array, name: str, rule: LabelRule | None = None, *, required: bool = True
) -> pa.Array:
    """``[n]`` labels as uint8, 0 or 1; null if missing and not ``required``.

    Raises:
        BadValue: a label is missing or another value. Its rows are not to be skipped lightly.
    """
    try:
        return (rule or LabelRule()).apply(array, name, required=required)
    except BadValue as error:
        error.remedy = ""
        raise


def find_negative(samples: Iterable[pa.Array], name: str, positive: Sequence[str]) -> str:
    """The one value of a label besides those that count as 1, in the first rows of files.

    Raises:
        ValueError: there is none, or more than one: then nobody said which of them count as 0.
    """
    # The different values; rows with a missing one are refused.
    counts: Counter[str] = Counter()
    for sample in samples:
        texts = as_texts(decoded(sample), name).fill_null("")
        for pair in pc.value_counts(texts).to_pylist():
            counts[pair["values"].strip()] += pair["counts"]
    missing = counts.pop("", 0)

    # Those that don't count as 1: if there is one, it counts as 0.
    ones = set(map(_plain, positive))
    others = {_plain(value): value for value in counts if _plain(value) not in ones}
    if len(others) == 1:
        return next(iter(others.values()))
    if missing and not others:
        raise ValueError(
            f"label {name!r}: {_listed(positive)} counts as 1, and all others in the first rows "
            f"are missing ({missing:,}); use --label \"{name} != ''\" if these count as 0"
        )

    # With several, only the user can say, by a list or by a comparison.
    comparison = COMPARISON.fullmatch(f"{name} {positive[0]}")
    instead = comparison[0] if comparison else f"{name} == {positive[0]}"
    remedy = f'set negative: "{ALL_OTHERS}"' if len(positive) > 1 else f"use --label {instead!r}"
    raise ValueError(
        f"label {name!r}: {_listed(positive)} counts as 1, but the first rows hold "
        f"{_counted(counts) or 'no label'}, and a model has one binary label; list the values that "
        f"count as 0 with negative: in the YAML, or {remedy} if all others do"
    )


def split_codes(array: pa.Array, name: str) -> pa.Array:
    """``[n]`` positions in ``SPLITS`` as uint8.

    Raises:
        BadValue: a value is not the name of a split.
    """
    rule = "it must be train, val or test"
    return _mapped(array, name, SPLIT_VALUES, rule, "correct it, or split by: rows")


def _mapped(
    array: pa.Array,
    name: str,
    codes: Mapping[str, int],
    rule: str,
    hint: str | None,
    other: int | None = None,
    *,
    required: bool = True,
) -> pa.Array:
    """The code of each value, ``other`` if it has none; null if missing and not ``required``.

    Without a ``hint``, an error says how to choose the values of a label that count as 1.
    """
    array = encoded(array, name)
    texts = as_texts(array.dictionary, name).fill_null("").to_pylist()
    found = [codes.get(_plain(text), other if text else None) for text in texts]
    result = pa.array(found, pa.uint8()).take(array.indices)

    if "" in codes:
        missing = pa.scalar(codes[""], pa.uint8())
        result = pc.if_else(array.indices.is_null(), missing, result)

    wrong = result.is_null()
    if not required:
        there = pa.array([bool(text.strip()) for text in texts], pa.bool_())
        wrong = pc.and_(wrong, there.take(array.indices).fill_null(False))
    if len(rows := np.flatnonzero(wrong)):
        index = array.indices[rows[0]].as_py()
        if index is None or not texts[index].strip():
            problem = f"the value is missing; {rule}: leave out rows without it"
            only_ones = hint is None and 0 not in found
            option = f", or count them as 0 with --label \"{name} != ''\"" if only_ones else ""
            raise BadValue(name, rows, problem, option)
        hint = _which_are_positive(array, texts, name) if hint is None else hint
        raise BadValue(name, rows, f"the value is {shown(array[rows[0]].as_py())}; {rule}: {hint}")
    return result


def _which_are_positive(array: pa.Array, texts: Sequence[str], name: str) -> str:
    """How to say which values of a label, a dictionary array of these ``texts``, count as 1."""
    counts: Counter[str] = Counter()
    for pair in pc.value_counts(array.indices.drop_null()).to_pylist():
        counts[texts[pair["values"]].strip()] += pair["counts"]
    missing = counts.pop("", 0) + array.null_count

    # Any value, one of two texts, a number from a middle one on, or one of several texts.
    held = f"these rows hold {_counted(counts)}; say which count as 1, as with"
    option = ["--positive", max(counts)]
    if len(counts) == 1 and missing:
        return f"{held} --label \"{name} != ''\""
    if len(counts) != 2:
        try:
            ordered, operator = sorted(counts, key=float), ">="
        except ValueError:
            ordered, operator = sorted(counts), "=="
        option = ["--label", f"{name} {operator} {ordered[len(ordered) // 2]}"]
    return f"{held} {shlex.join(option)}"


def _counted(counts: Counter[str]) -> str:
    """The most frequent values, with their counts."""
    seen = [f"{shown(value)} ({count:,})" for value, count in counts.most_common(MOST_SHOWN)]
    return ", ".join(seen + ["..."] * (len(counts) > MOST_SHOWN))


def _plain(text: str) -> str:
    """A text without white space around it; a whole number without a fraction, as 4 for 4.0."""
    text = text.strip()
    whole, _, fraction = text.partition(".")
    return whole if whole.isdecimal() and not fraction.strip("0") else text


def _listed(values: Sequence[str]) -> str:
    return " or ".join(map(shown, values))
