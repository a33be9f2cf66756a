"""What error messages have in common: the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """``", did you mean 'rank'? valid: q, rank"`` for an unknown ``name``."""
    valid = sorted(valid)
    match = difflib.get_close_matches(name, valid, n=1)
    return f"{f', did you mean {match[0]!r}?' if match else ';'} valid: {', '.join(valid)}"
