"""Prepared days that arrive one after another: a directory for each, in the order of names.

Numbers in names count as numbers: ``day_2`` comes before ``day_10``.
"""

from __future__ import annotations

from pathlib import Path

from dlrm.data.prepare.workspace import has_stopped
from dlrm.data.schema import META_FILE, Meta
from dlrm.utils.name_order import in_order_of_numbers


def day_names(directory: Path) -> list[str]:
    """The directories in a directory, in order, whether they are complete or not. Hidden ones are
    left out.
    """
    entries = directory.iterdir() if directory.is_dir() else ()
    names = (path.name for path in entries if path.name[0] != "." and path.is_dir())
    return sorted(names, key=in_order_of_numbers)


def is_later(day: str, than: str) -> bool:
    """Whether a day comes after another one, by their names."""
    return in_order_of_numbers(day) > in_order_of_numbers(than)


def next_day(directory: Path, after: str = "") -> tuple[Path | None, bool]:
    """The first day after another one, by its name, and whether it is complete.

    A day is complete once it has its ``meta.json``, which a preparation writes last. One that is
    not hides those after it, as days are read in order, unless its preparation failed or was
    killed.
    """
    first = None  # that is not complete
    for name in day_names(directory):
        if not is_later(name, after):
            continue
        path = directory / name
        if (path / META_FILE).is_file():
            return path, True
        first = first or path
        if not has_stopped(path):
            break
    return first, False


def is_empty(day: Path) -> bool:
    """Whether a complete day has no rows, of no split."""
    meta = Meta.read(day, allow_outside=True)
    return not any(split.rows for split in meta.splits.values())


def first_day(directory: str, data: str | None = None) -> str:
    """The day from whose ``meta.json`` a model is built.

    Args:
        directory: holds a prepared directory for each day.
        data: the choice of the run that is resumed, which is kept if it is still there.

    Raises:
        ValueError: there is no complete day, or ``data`` is not one of them.
    """
    if data is not None and Path(data).resolve().parent != Path(directory).resolve():
        raise ValueError(f"data is {data}, but --follow reads the days in {directory}: remove it")
    if data is not None and (Path(data) / META_FILE).is_file():
        return data

    if (Path(directory) / META_FILE).is_file():
        raise ValueError(
            f"follow is {directory}, a single prepared directory: name the one that holds it"
        )
    path, complete = next_day(Path(directory))
    while path is not None and complete and is_empty(path):
        path, complete = next_day(Path(directory), path.name)
    if path is None or not complete:
        found = f"only {path}, which has no {META_FILE} yet" if path else "no directory at all"
        raise ValueError(
            f"follow is {directory}, which must have a prepared directory for each day, but has "
            f"{found}: prepare a day there first, with dlrm prepare --output {directory}/NAME"
        )
    return str(path)


def require_same_columns(first: Path, meta: Meta, day: Path, other: Meta) -> None:
    """Check that a ``day`` has the columns, the ids and the scaling of the first one.

    Raises:
        ValueError: it differs.
    """
    wrong = None
    for what in ("label", "weight", "dense", "tables", "cardinalities", "lengths"):
        if wrong is None and getattr(meta, what) != getattr(other, what):
            here, there = (f"{getattr(each, what)!r:.100}" for each in (other, meta))
            wrong = f"its {what} is {here}, that of {first} {there}"
    prints = {meta.fingerprint, other.fingerprint} - {None}
    if wrong is None and len(prints) > 1:
        wrong = f"its ids or scalings are not those of {first}"
    if wrong is not None:
        raise ValueError(
            f"{day} does not continue the days before it: {wrong}; prepare it again, with "
            f"--ids-of {first} --split 1 0 0"
        )
