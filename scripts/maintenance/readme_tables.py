"""Write the tables of README.md and docs/ from the results in ``benchmarks/``.

``python scripts/maintenance/readme_tables.py`` replaces the text between the marks
``<!-- table: NAME -->`` and ``<!-- end -->``, and draws the figures of the same results. With
``--check`` it changes nothing and only reports whether the tables are up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dlrm.utils.program import Parser

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts import compare
from scripts.maintenance.tables import compression, data, many_gpus, speed
from scripts.maintenance.tables.markdown import ROOT

MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = {
    table.__name__: table for page in (compression, data, many_gpus, speed) for table in page.TABLES
}


def main(argv: list[str] | None = None) -> int:
    """Write or check the tables; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    options = parser.parse_args(argv)
    outdated = False
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        old = path.read_text()
        new = MARK.sub(lambda mark: mark[1] + "\n" + TABLES[mark[2]]() + "\n" + mark[3], old)
        outdated |= new != old
        if not options.check:
            path.write_text(new)
    for name, results in compression.FIGURES.items() if not options.check else ():
        compare.draw(results(), "AUC", ROOT / "docs" / f"{name}.png")
    return int(outdated and options.check)


if __name__ == "__main__":
    sys.exit(main())
