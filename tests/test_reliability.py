"""Each promise in docs/reliability.md names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = [
    line
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| what happens", "| ---"))
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_promise_has_a_test(line):
    path, name = re.fullmatch(r"\|[^|]+\|[^|]+\| `(tests/[\w/]+\.py)::(\w+)` \|", line).groups()
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_promises():
    assert len(LINES) > 20
