"""Raw columns of categories and lists to dictionary arrays without nulls.

Like those of :mod:`dlrm.data.prepare.values`, these functions raise :class:`BadValue` if a column
does not fit. A missing category is the text "".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..column_values import is_list
from .bad_rows import BadValue, shown
from .keys import hex_keys, modulo
from .text_hashes import hash_values, plain_bools
from .values import as_texts, decoded, encoded, is_text


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
    indices, values = _without_nulls(indices, plain_bools(values))
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
        array = _split_lists(array, separator)
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


def _split_lists(texts: pa.Array, separator: str) -> pa.Array:
    """Lists of what stands between separators; those such as ``[,]`` have brackets around."""
    if len(separator) < 3 or separator[0] + separator[-1] != "[]":
        return pc.split_pattern(texts, separator)
    inner = pc.replace_substring_regex(texts, r"^\s*[\[(](.*)[\])]\s*$", r"\1")
    inner = pc.replace_substring_regex(inner, r"""['"]""", "")
    return pc.split_pattern(inner, separator[1:-1])
