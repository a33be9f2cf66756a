"""Each promise in docs/reliability.md names a test that exists."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def test_the_lock_file_satisfies_the_requirements():
    """Each package has one version and its hashes; if not: ``make lock``."""
    entry = r"^([\w-]+)==(\S+)(?: ; .*)? \\\n    --hash=sha256:[0-9a-f]{64}"
    text = (ROOT / "requirements.lock").read_text()
    locked = {}
    for name, version in re.findall(entry, text, re.MULTILINE):
        locked.setdefault(name, []).append(version)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in (*project["dependencies"], *optional["dev"], *optional["audit"]):
        requirement = Requirement(text)
        versions = locked.get(requirement.name.lower().replace("_", "-"), ["none"])
        assert all(version in requirement.specifier for version in versions), requirement
