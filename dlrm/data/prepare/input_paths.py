"""The files of a table, by what a user gives: files, directories and patterns."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from ...utils.name_order import in_order_of_numbers

SUFFIXES = {
    ".csv": "csv", ".tsv": "csv", ".tab": "csv", ".txt": "csv", ".json": "json",
    ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
COMPRESSED = (".gz", ".zst", ".gzip", ".bz2")
MISSING_FOLDER = "__HIVE_DEFAULT_PARTITION__"
INTEGER = re.compile(r"-?[0-9]{1,18}")


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that files, directories and patterns name, in order.

    In a directory, these are the files of a known suffix, at any depth; hidden ones and those
    that begin with ``_`` are left out, as other programs do. Those of a directory or a pattern are
    sorted, by the numbers in their names, too: ``day_10`` comes after ``day_9``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is named twice, or is a pipe.
    """
    found: list[Path] = []
    for given in inputs:
        matches = _matches(Path(given))
        if not matches and Path(given).exists() and not Path(given).is_dir():
            raise ValueError(
                f"{given} is no file, and files are read several times; write it to one"
            )
        if not matches:
            raise FileNotFoundError(
                f"{given}: no such file, directory with files, or pattern; files end in "
                f"{', '.join(SUFFIXES)}, or these with .gz, .bz2 or .zst"
            )
        found += matches

    counts = Counter(path.resolve() for path in found)
    for path in found:
        if counts[path.resolve()] > 1:
            raise ValueError(f"{path} is given more than once; give each input once")
    return found


def _matches(path: Path) -> list[Path]:
    """The files of a directory or a pattern, perhaps one of directories, or the file itself."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        found = [*map(Path, sorted(glob.glob(str(path), recursive=True), key=in_order_of_numbers))]
        inside = (p for directory in found if directory.is_dir() for p in _matches(directory))
        return [p for p in found if p.is_file()] or [*inside]
    files = [p for p in path.rglob("*") if p.is_file() and suffix(p) in SUFFIXES]
    files.sort(key=in_order_of_numbers)
    return [p for p in files if not any(n[0] in "._" for n in p.relative_to(path).parts)]


def suffix(path: Path) -> str:
    """The end of a name that says the format: ``.csv`` of ``rows.csv.gz``."""
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return Path(name).suffix


def folder_columns(path: Path) -> dict[str, int | str | None]:
    """The columns that folders stand for, as Hive and Spark write them: ``day=3/rows.parquet``."""
    pairs = (part.split("=", 1) for part in path.parent.parts if "=" in part[1:])
    texts = {unquote(name): unquote(value) for name, value in pairs}
    return {
        name: None if text == MISSING_FOLDER else int(text) if INTEGER.fullmatch(text) else text
        for name, text in texts.items()
    }
