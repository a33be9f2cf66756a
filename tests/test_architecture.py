"""The house rules that a reader can't see at a glance: who imports whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "dlrm").rglob("*.py"))

LOW = (
    *("dlrm.config", "dlrm.distributed", "dlrm.files", "dlrm.hints", "dlrm.machine"),
    *("dlrm.measure", "dlrm.metrics", "dlrm.optim", "dlrm.peers", "dlrm.rules", "dlrm.shards"),
    "dlrm.shortage",
    "dlrm.tracking",
)
"""What knows nothing of embeddings."""
HIGH = (
    *("dlrm.checkpoint", "dlrm.data", "dlrm.metrics", "dlrm.model", "dlrm.optim", "dlrm.reduce"),
    *("dlrm.step", "dlrm.tracking"),
)
"""What embeddings and kernels know nothing of."""


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = set(imports(path))

    def uses(*modules):
        return {f for f in found if any(f == m or f.startswith(f"{m}.") for m in modules)}

    assert not uses("train", "scripts", "tests")
    if not name.startswith("dlrm.kernels"):
        assert not uses("triton"), "only kernels import Triton"
    else:
        assert not uses("dlrm.embeddings")
    if name not in ("dlrm.cli", "dlrm.config"):
        assert not uses("dlrm.config", "dlrm.cli"), "modules take plain arguments"
    if name.startswith("dlrm.data") or name in LOW:
        assert not uses("dlrm.embeddings", "dlrm.model")
    if name.startswith(("dlrm.embeddings", "dlrm.kernels")):
        assert not uses(*HIGH), "a method knows nothing of who trains it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            jit = any("jit" in ast.unparse(d) for d in node.decorator_list)
            assert jit or ast.get_docstring(node), node.name


def test_the_program_is_short_enough_to_be_read_in_one_go():
    assert len((ROOT / "train.py").read_text().splitlines()) < 300
