"""Files that are written completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock
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
            if temporary.is_symlink():  # what is written would be another file
                temporary.unlink()
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to ``directory`` when the block succeeds.

    If it fails, the temporary one is removed. A killed process leaves at most that and the file of
    its lock, and the next attempt replaces both.

    Args:
        directory: directory to make; it may exist if it is empty.

    Raises:
        ValueError: ``directory`` is not empty, or no directory, or another process is writing it.
        OSError: the disk is full; the message names ``directory``.
    """
    _require_empty(directory)
    temporary = directory.parent / f"{directory.name}.tmp"
    with disk_full_names(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    lock_file = directory.parent / f"{directory.name}.lock"
    busy = f"{directory} is being written by another process; wait for it, or choose another output"
    lock = hold(lock_file, lambda: busy)
    try:
        _require_empty(directory)  # another process may have written it meanwhile
        shutil.rmtree(temporary, ignore_errors=True)
        with disk_full_names(directory):
            temporary.mkdir()
            yield temporary
            temporary.replace(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # Windows removes it when it is released
            lock_file.unlink()
        lock.release()


def sync_directory(directory: Path) -> None:
    """Let the names in a directory be on disk."""
    try:
        file = os.open(directory, os.O_RDONLY)
    except PermissionError:  # Windows opens no directories
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _require_empty(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} already exists; choose another output or remove it")


def hold(path: Path, busy: Callable[[], str], patience: float = 0) -> FileLock:
    """Lock a file, until ``release()`` or the end of this process.

    On NFS, Linux turns it into a lock of the server. Where a file system has no locks, a note says
    so.

    Args:
        path: of the lock file.
        busy: returns the message of the error if another process holds the lock.
        patience: seconds to wait for that process.

    Raises:
        ValueError: another process holds the lock.
    """
    import filelock  # programs that read an export do without it

    lock = filelock.FileLock(path, thread_local=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of filelock, on file systems without locks
            lock.acquire(timeout=patience, poll_interval=0.1)
    except filelock.Timeout:
        raise ValueError(busy()) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, PermissionError):
            raise
        note = f"note: {path} can't be locked ({error}): let no second process write next to it"
        print(note, file=sys.stderr)
    return lock


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Save a figure in the format of the suffix of ``path``, completely or not at all."""
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
