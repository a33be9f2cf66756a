"""Columns whose few values stand for numbers: the label and the split of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .bad_rows import BadValue, shown
from .column_options import ALL_OTHERS
from .values import as_texts, decoded

LABELS = {
    "0": 0, "1": 1, "false": 0, "true": 1, "False": 0, "True": 1, "FALSE": 0, "TRUE": 1
}  # fmt: skip
SPLIT_VALUES = {
    "train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2,
    "testing": 2,
}  # fmt: skip
"""The texts that a split column may hold, and the position of the split in ``SPLITS``."""
MOST_SHOWN = 8  # values of a label in a message


def labels(
    array: pa.Array,
    name: str,
    positive: Sequence[str] | None = None,
    negative: Sequence[str] | None = None,
    *,
    required: bool = True,
) -> pa.Array:
    """``[n]`` labels as uint8, 0 or 1.

    Args:
        array: the column.
        name: its name.
        positive: the values that count as 1. None: 0 and 1, or false and true.
        negative: the values that count as 0; ``("*",)`` or None: all others.
        required: raise if a label is missing; otherwise it is null.

    Raises:
        BadValue: a label is missing or another value.
    """
    if not required:
        texts = as_texts(decoded(array), name)
        there = pc.not_equal(texts, "").fill_null(False)
        some = positive[0] if positive else "1"  # any label, so that errors name the right row
        found = labels(pc.if_else(there, texts, some), name, positive, negative)
        return pc.if_else(there, found, pa.scalar(None, pa.uint8()))
    if positive is None:
        rule = "it must be 0 or 1 (false or true)"
        hint = "correct it, or name the value that counts as 1 with positive: in the YAML"
        return _mapped(array, name, LABELS, rule, hint)
    ones = dict.fromkeys(map(_plain, positive), 1)
    if negative is None or ALL_OTHERS in negative:
        return _mapped(array, name, ones, "it must be there", "", other=0)
    rule = f"it must be {_listed(positive)} (counts as 1) or {_listed(negative)} (0)"
    hint = "correct it, or list all values that count as 0 with negative: in the YAML"
    return _mapped(array, name, dict.fromkeys(map(_plain, negative), 0) | ones, rule, hint)


def find_negative(samples: Iterable[pa.Array], name: str, positive: Sequence[str]) -> str:
    """The one value of a label besides those that count as 1.

    Args:
        samples: the label in the first rows of files.
        name: name of the column.
        positive: the values that count as 1.

    Raises:
        ValueError: there is none, or more than one: then nobody said which of them count as 0.
    """
    counts: Counter[str] = Counter()
    for sample in samples:
        for pair in pc.value_counts(as_texts(decoded(sample.drop_null()), name)).to_pylist():
            counts[pair["values"].strip()] += pair["counts"]
    counts.pop("", None)  # a missing label; its row is refused
    ones = set(map(_plain, positive))
    others = {_plain(value): value for value in counts if _plain(value) not in ones}
    if len(others) == 1:
        return next(iter(others.values()))
    seen = [f"{shown(value)} ({count:,})" for value, count in counts.most_common(MOST_SHOWN)]
    seen += ["..."] if len(counts) > MOST_SHOWN else []
    raise ValueError(
        f"label {name!r}: {_listed(positive)} counts as 1, but the first rows hold "
        f"{', '.join(seen) or 'no label'}; list the values that count as 0 with negative: in the "
        f'YAML, or set negative: "{ALL_OTHERS}" for all others'
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
    hint: str,
    other: int | None = None,
) -> pa.Array:
    """The code of each value, ``other`` if it has none."""
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    texts = as_texts(array.dictionary, name).to_pylist()
    found = [codes.get(_plain(text), other) if text else None for text in texts]
    result = pa.array(found, pa.uint8()).take(array.indices)
    if result.null_count:
        row = pc.index(result.is_null(), True).as_py()
        value = array[row].as_py()
        problem = f"the value is {shown(value)}; {rule}: {hint}"
        if value is None or value == "":
            problem = f"the value is missing; {rule}: leave out rows without it"
        raise BadValue(name, row, problem, lambda: np.flatnonzero(result.is_null()).tolist())
    return result


def _plain(text: str) -> str:
    """A text without white space around it; a whole number without a fraction, as 4 for 4.0."""
    text = text.strip()
    whole, _, fraction = text.partition(".")
    return whole if whole.isdecimal() and not fraction.strip("0") else text


def _listed(values: Sequence[str]) -> str:
    return " or ".join(map(shown, values))
