"""Names with numbers in them."""

from __future__ import annotations

import re
from pathlib import Path


def in_order_of_numbers(name: str | Path) -> tuple[list[str | int], str]:
    """A key to sort names by, in which numbers have their order: ``day_2`` before ``day_10``."""
    text = str(name)
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], text
