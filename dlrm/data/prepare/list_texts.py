"""Texts that are lists of ids or of numbers, between separators and perhaps in brackets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .number_texts import NUMBER_SHARE, PLAIN

LIST_SHARE = 0.2
FEW_ENTRIES = 0.1  # distinct ones, as a share of all entries of lists
SELDOM = 0.8  # distinct texts, as a share of all, from which these hardly repeat
FEW_TEXTS = 20
OFTEN = 4  # rows of a text, from which more is learned of it than of its words


def find_separator(texts: pa.Array, times: float = 1.0) -> tuple[str | None, bool]:
    """The separator between the entries of lists that are written as text, and whether these
    certainly are lists: the words of a title are none, unless titles hardly repeat in a table of
    ``times`` as many rows. With ``[,]`` the texts have brackets, too.
    """
    texts = texts.drop_null()
    distinct = texts.unique()
    if not len(texts):
        return None, False

    # In brackets, with commas or spaces in some of them.
    for mark in (", ", ",", " "):
        inner = r"\[[^\]]*\]|\([^)]*\)"
        bracketed = distinct.filter(pc.match_substring_regex(distinct, rf"^\s*({inner})\s*$"))
        if len(bracketed) > NUMBER_SHARE * len(distinct) and _share(bracketed, mark) >= LIST_SHARE:
            return f"[{mark.strip() or mark}]", True

    # Without brackets.
    for separator in ("|", ";", ",", " "):
        # Entries repeat, and other texts with a bar in them don't.
        sample = texts if separator in "|;" else distinct
        if _share(sample, separator) < LIST_SHARE:
            continue
        lists = pc.split_pattern(sample, separator)
        entries = pc.utf8_trim_whitespace(lists.flatten())
        rare = pc.count_distinct(entries).as_py() / len(entries)
        lengths = pc.count_distinct(pc.list_value_length(lists)).as_py()
        if separator in "|;" and rare < 0.5:
            return separator, True
        if separator == "," and rare < 0.5:
            return separator, lengths > 1 and rare < FEW_ENTRIES
        if separator == " " and rare < FEW_ENTRIES and lengths > 1:
            # A text of one word is the same in a list.
            several = texts.filter(pc.match_substring(texts, separator))
            return separator, _hardly_repeat(several, times)
    return None, False


def _hardly_repeat(texts: pa.Array, times: float) -> bool:
    """Whether texts hardly repeat, so that nothing is learned of one, in these rows and in
    ``times`` as many: of a large catalogue, the first rows have each item once at most."""
    counts = pc.value_counts(texts).field("counts").to_numpy()
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    # If all are as frequent, x times in these rows, x / 2 as many occur twice as once (Poisson).
    return len(counts) > SELDOM * len(texts) and bool(2 * twice * times < OFTEN * once)


def _share(texts: pa.Array, mark: str) -> float:
    """The share of texts that have a mark in them."""
    return (pc.sum(pc.match_substring(texts, mark)).as_py() or 0) / len(texts)


def split_numbers(texts: pa.Array) -> pa.Array:
    """Lists of the texts between commas or white space, without brackets around them."""
    return pc.split_pattern_regex(pc.utf8_trim(texts, "[]() \t\r\n"), r"[\s,;]+")


def vector_size(texts: pa.Array) -> int | None:
    """How many numbers each text holds, if all hold as many and not all are integers."""
    texts = texts.drop_null().unique()
    for some in (texts[:FEW_TEXTS], texts):  # most texts are none at once
        numbers = split_numbers(some)
        if not pc.all(pc.match_substring_regex(numbers.flatten(), f"{PLAIN}|^nan$")).as_py():
            return None
    sizes = pc.unique(pc.list_value_length(numbers)).to_pylist()
    fractions = pc.any(pc.match_substring(numbers.flatten(), ".")).as_py()
    return sizes[0] if len(sizes) == 1 and sizes[0] > 1 and fractions else None
