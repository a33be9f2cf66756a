"""Links in a directory that a stranger may have made."""

from __future__ import annotations

import os
from pathlib import Path


def refuse_links_out(directory: Path) -> None:
    """Refuse a directory with a link that leads out of it, at any depth and of any name.

    What is written or read below such a link would be a file of the user. The directory itself may
    be a link, and links within it may lead to each other.

    Raises:
        ValueError: there is one; the message names it.
    """
    inside = os.path.realpath(directory) + os.sep
    for folder, folders, files in os.walk(directory):
        for path in (Path(folder, name) for name in [*folders, *files]):
            # realpath, unlike resolve(), takes links to themselves
            if path.is_symlink() and not os.path.realpath(path).startswith(inside):
                raise ValueError(
                    f"{path} is a link out of {directory}: put what it leads to in its place, or "
                    "remove it"
                )
