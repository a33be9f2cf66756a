"""Files that are written completely or not at all."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to ``path`` when the block succeeds.

    If it fails, the temporary file is removed. A killed process leaves at most that file.

    Raises:
        OSError: the disk is full; the message names ``path``.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with disk_full_names(path):
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


@contextmanager
def atomic_directory(directory: Path, *, prefix: str) -> Iterator[Path]:
    """A temporary directory that is renamed to ``directory`` if the block succeeds.

    Args:
        directory: directory to make; it may exist if it is empty.
        prefix: of the name of the temporary one, next to it.

    Raises:
        ValueError: ``directory`` is not empty, or no directory.
        OSError: the disk is full; the message names ``directory``.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} already exists; choose another output or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as outer:
        inner = Path(outer) / "data"
        inner.mkdir()
        with disk_full_names(directory):
            yield inner
            inner.replace(directory)


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Save a figure, in the format of its suffix: a temporary name hides the suffix."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])


@contextmanager
def disk_full_names(path: Path) -> Iterator[None]:
    """Name ``path`` in the error of a full disk, which names no file itself.

    Raises:
        OSError: the disk is full; the message names ``path``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:
            raise OSError(f"{path} can't be written: {error}") from error
        raise
