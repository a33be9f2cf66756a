"""Files that are written completely or not at all."""

from __future__ import annotations

import errno
import shutil
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
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to ``directory`` when the block succeeds.

    If it fails, the temporary one is removed. A killed process leaves at most that, and the next
    attempt replaces it.

    Args:
        directory: directory to make; it may exist if it is empty.

    Raises:
        ValueError: ``directory`` is not empty, or no directory.
        OSError: the disk is full; the message names ``directory``.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} already exists; choose another output or remove it")
    temporary = directory.parent / f"{directory.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_full_names(directory):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.replace(directory)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            shutil.rmtree(temporary)
        raise


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
