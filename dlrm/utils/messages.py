"""Parts of error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of a message on an unknown name: ``", did you mean 'rank'? valid: q, rank"``."""
    valid = sorted(valid)
    match = difflib.get_close_matches(name, valid, n=1)
    return f"{f', did you mean {match[0]!r}?' if match else ';'} valid: {', '.join(valid)}"
