"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary name to write to; the file gets its name ``path`` when the block ends well.

    When it does not, what was written is removed. A process that is killed leaves at most the
    temporary file.

    Raises:
        OSError: naming ``path``, if there is no room for it: the error itself names no file.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with disk_full_names(path):
            yield temporary
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            temporary.unlink()
        raise


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Draw a figure to a file, whole, in the format of its ending, which a temporary name hides."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])


@contextmanager
def disk_full_names(path: Path) -> Iterator[None]:
    """Where there is no room for what is written to ``path``, say so: the error names no file.

    Raises:
        OSError: naming ``path``.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:
            raise OSError(f"{path} can't be written: {error}") from error
        raise
