"""Parts of messages."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence


def printable(text: object) -> str:
    """``text`` in one line that a terminal shows as it is, whatever file it comes from.

    Other characters (line ends, terminal escapes, halves of surrogate pairs, and those that change
    the direction of writing) are escaped as in ``repr``.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def print_error(text: str) -> None:
    """Print a line to stderr."""
    print(printable(text), file=sys.stderr)


def format_bytes(count: float) -> str:
    """Bytes with three digits and a decimal unit: ``3.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def align_right(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        " ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows
    )
    return "\n".join(lines)


def require_local(path: object) -> None:
    """Refuse an address such as ``s3://bucket/data`` where a path is wanted.

    Raises:
        ValueError: ``path`` is an address.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # a drive has one letter
        raise ValueError(f"{printable(path)} is not supported: copy it to a local directory")


def listing(names: Sequence[str], most: int = 10) -> str:
    """The names, of which the first ``most`` are shown: ``"a, b, ... (7 in all)"``."""
    more = f", ... ({len(names):,} in all)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, valid: Iterable[str], word: str = "valid") -> str:
    """The end of a message on an unknown name: ``", did you mean 'rank'? valid: q, rank"``."""
    valid = sorted(valid)
    match = difflib.get_close_matches(name, valid, n=1)
    return f"{f', did you mean {match[0]!r}?' if match else ';'} {word}: {listing(valid, 50)}"
