"""Markdown tables from the results in ``benchmarks/``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def read(name: str) -> dict[str, Any]:
    """A result by the name of its file."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; all columns but the first are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], *names: str) -> str:
    """A table of results, with a line that says where they come from.

    Args:
        columns: format of each column by its head.
        rows: values by name, as the formats use them.
        names: files of the results.
    """
    lines = [[form.format_map(row) for form in columns.values()] for row in rows]
    return markdown(list(columns), lines) + source(*names)


def source(*names: str) -> str:
    """A line with the machines and the files of results."""
    environments = [read(name)["environment"] for name in names]
    places = [one.get("device") or "cpu" for one in environments]
    where = {
        f"{one['cores']} CPU cores" if place == "cpu" else place.replace(" HBM3", ""): None
        for place, one in sorted(zip(places, environments, strict=True), key=lambda own: own[0])
    }
    files = ", ".join(f"`benchmarks/{name}.json`" for name in names)
    return f"\n*{', '.join(where)}; {files}.*\n"
