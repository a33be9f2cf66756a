"""A copy of the modules that read raw rows, which runs where this package is not installed.

The copy is the code that the training data was prepared with, so that there is no second
implementation that could differ. It needs numpy, pandas, pyarrow, pydantic and PyYAML, and no
PyTorch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dlrm

PACKAGE = "dlrm_reader"
ENTRY = "dlrm.data.prepare.model_inputs"
_NAME = re.compile(r"\bdlrm\.(?=\w)")
_HEADER = (
    "# Copied from dlrm {version} ({module}) by scripts/export.py; licensed under Apache-2.0.\n"
)
_INIT = f'''"""Reads raw rows as inputs of the model next to it; see :class:`InputReader`."""

from {PACKAGE}.data.prepare.model_inputs import InputReader

__all__ = ["InputReader"]
'''


def copy_reader(target: Path) -> None:
    """Copy the reader and all modules that it imports to a directory, as :data:`PACKAGE`.

    Args:
        target: the directory that gets the package.
    """
    root = Path(dlrm.__file__).parent
    for module in sorted(_closure(root, ENTRY)):
        source = _file(root, module)
        assert source is not None
        path = target / PACKAGE / source.relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = _HEADER.format(version=dlrm.__version__, module=module)
        path.write_text(header + _NAME.sub(f"{PACKAGE}.", source.read_text()))
    (target / PACKAGE / "__init__.py").write_text(_INIT)


def _file(root: Path, module: str) -> Path | None:
    """The file of a module of this package, if it is one."""
    path = root.joinpath(*module.split(".")[1:])
    candidates = path.with_name(path.name + ".py"), path / "__init__.py"
    return next((file for file in candidates if file.is_file()), None)


def _closure(root: Path, module: str) -> set[str]:
    """A module of this package and all of its modules that it needs."""
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        path = _file(root, name)
        if path is not None and name != "dlrm" and name not in found:
            found.add(name)
            waiting += _imports(path)
            waiting.append(name.rpartition(".")[0])
    return found


def _imports(path: Path) -> Iterator[str]:
    """What a module imports of this package, names in modules included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dlrm."):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
