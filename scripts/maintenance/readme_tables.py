"""Write the tables of README.md and docs/ from the results in ``benchmarks/``.

``python scripts/maintenance/readme_tables.py`` replaces the text between the marks
``<!-- table: NAME -->`` and ``<!-- end -->``, and draws the figures of the same results. With
``--check`` it changes nothing and only reports whether the tables are up to date. ``tables.yaml``
says what each table has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from dlrm.utils.program import Parser

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from dlrm.commands import compare
from scripts.maintenance import table_rows
from scripts.maintenance.table_rows import ROOT, read

MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("tables.yaml").read_text()
)


def build(name: str) -> str:
    """A table by the name of its mark, with a line that says where its figures come from."""
    table = TABLES[name]
    results = [read(file) for file in table["files"]]
    metric = {"metric": table["metric"]} if "metric" in table else {}
    rows = list(getattr(table_rows, table["rows"])(*results, **metric)) if "rows" in table else None
    rows = results[0][table.get("list", "results")] if rows is None else rows
    if "sort" in table:
        rows.sort(key=itemgetter(*table["sort"]))

    columns = table.get("columns")
    if columns is None:
        head = list(rows[0])
        lines = [[row[column] for column in head] for row in rows]
    else:
        head = list(columns)
        lines = [[form.format_map(row) for form in columns.values()] for row in rows]
    remark = getattr(table_rows, table["remark"])(*results) if "remark" in table else ""
    note = table["note"].format_map(results[0]) if "note" in table else sources(table["files"])
    return "\n".join([markdown(head, lines), *([f"{remark}\n"] if remark else []), f"*{note}*\n"])


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table; all columns but the first are right-aligned."""
    rules = ["---"] + ["---:"] * (len(head) - 1)
    rows = [[name.strip() for name in head], rules, *lines]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows) + "\n"


def sources(files: Sequence[str]) -> str:
    """The machines and the files of results."""
    places = []
    for environment in sorted((read(file)["environment"] for file in files), key=_device):
        device = _device(environment)
        machine = f"{environment['cores']} CPU cores" if device == "cpu" else device
        places.append(machine.replace(" HBM3", ""))
    names = ", ".join(f"`benchmarks/{file.partition(':')[0]}.json`" for file in files)
    return f"{', '.join(dict.fromkeys(places))}; {names}."


def _device(environment: Mapping[str, Any]) -> str:
    return environment.get("device") or "cpu"


def main(argv: list[str] | None = None) -> int:
    """Write or check the tables; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    options = parser.parse_args(argv)
    outdated = False
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        old = path.read_text()
        new = MARK.sub(lambda mark: mark[1] + "\n" + build(mark[2]) + "\n" + mark[3], old)
        outdated |= new != old
        if not options.check:
            path.write_text(new)
    if not options.check:
        points = table_rows.sample_figure(read(*TABLES["sample_defaults"]["files"]))
        compare.draw(points, "AUC", ROOT / "docs" / "frontier_sample.png")
    return int(outdated and options.check)


if __name__ == "__main__":
    sys.exit(main())
