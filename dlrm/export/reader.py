"""A copy of the package that prepares raw rows, which runs where this package is not installed.

The copy is the code that the training data was prepared with, so that there is no second
implementation that could differ. Its modules import one another by relative names, so they are
copied as they are. It needs numpy, pandas, pyarrow, pydantic and PyYAML, and no PyTorch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import dlrm

PACKAGE = "dlrm_reader"
CARRIED = (
    *("data/__init__.py", "data/column_values.py", "data/evidence.py", "data/parquet.py"),
    *("data/schema.py", "data/threads.py", "data/prepare/*.py"),
    *("utils/__init__.py", "utils/atomic.py", "utils/cpus.py", "utils/documents.py"),
    *("utils/messages.py", "utils/name_order.py", "utils/validation.py"),
)
"""What is copied, below this package."""
_INIT = f'''"""Reads raw rows as inputs of the model next to it; see :class:`InputReader`.

Copied from dlrm {dlrm.__version__} by scripts/export.py; licensed under Apache-2.0.
"""

from .data.prepare.raw_rows import InputReader

__all__ = ["InputReader"]
'''


def copy_reader(target: Path) -> None:
    """Copy the reader to a directory, as :data:`PACKAGE`.

    Args:
        target: the directory that gets the package.
    """
    root = Path(dlrm.__file__).parent
    for pattern in CARRIED:
        for source in sorted(root.glob(pattern)):
            path = target / PACKAGE / source.relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
    (target / PACKAGE / "__init__.py").write_text(_INIT)
