"""Raw Criteo logs to a prepared directory: Parquet per split, vocabularies, ``meta.json``.

Three passes, so that memory depends on the distinct values of a column and not on the rows:

1. parse: blocks of lines become columns, spilled to ``OUTPUT/.prepare/blocks``; a categorical
   column is coded by the distinct values of its own block;
2. number: column by column, the values of all blocks are merged into a vocabulary, which gives an
   id to each code of each block;
3. write: block by block, codes become ids and go out as row groups of the splits.

A spilled block and a numbered column appear under their name when they are whole, so that a
restart takes them as they are. Results are made in ``OUTPUT/.prepare`` and moved out at the end.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dlrm.data.preprocess.passes import (
    Pool,
    number_columns,
    parse_files,
    require_known,
    write_splits,
)
from dlrm.data.preprocess.reader import BLOCK_BYTES
from dlrm.data.preprocess.spill import BAD_ROWS_KEPT, Spilled
from dlrm.data.preprocess.workspace import BAD_ROWS_FILE, Workspace
from dlrm.data.schema import CRITEO_DENSE, META_FILE, Meta
from dlrm.utils.atomic import atomic_write
from dlrm.utils.device import cpu_count
from dlrm.utils.messages import did_you_mean

FORMAT = 1  # of the spilled blocks; raise it when a change makes old ones unfit for a restart
DAYS = 7


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is made of the input."""

    split: tuple[str, ...] = ("days",)
    """``("days",)`` or the shares of train, val and test in row order, as decimals."""
    vocabulary: Literal["train", "all"] = "train"
    """The rows whose values get ids of their own."""
    min_count: int = 1
    """Occurrences in those rows that a value needs for that."""
    cap: int | None = None
    """Take the hex values modulo this."""
    dense_transform: Literal["log1p", "log3"] = "log1p"
    limit: int | None = None
    """Read that many lines of the input at most."""
    bad_rows: Literal["stop", "skip"] = "stop"
    ids_of: str | None = None
    """A directory prepared before, whose ids the values have: with what made these, see
    :func:`inherited`."""

    def __post_init__(self) -> None:
        if self.split != ("days",):
            _fractions(self.split)
        for name, hint in get_type_hints(Options).items():
            option, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{option} is {value!r}{did_you_mean(value, get_args(hint))}")
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{option} is {value}; it must be at least 1")


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: Options,
    *,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: bool = True,
) -> Meta:
    """Prepare raw logs for training.

    Killed at any moment and called again with the same arguments, it goes on where it was and
    ends with the same bytes. Until the end, nothing stands under a final name.

    Args:
        inputs: raw files, in the order of time.
        output: directory for ``train.parquet``, ``val.parquet``, ``test.parquet``,
            ``vocabulary/C1.parquet`` .., ``bad_rows.json`` and ``meta.json``.
        options: what to make of them.
        workers: threads; by default one per core that the process may use.
        block_bytes: size of the blocks of lines that are parsed and spilled as one.
        progress: show bars on standard error.

    Returns:
        What was written as ``meta.json``.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: bad rows (unless they are to be skipped), no rows to train on, or another
            process at work on ``output``.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers is {workers}; it must be at least 1")
    paths = [Path(path) for path in inputs]
    resolved = [path.resolve() for path in paths]
    for path, own in zip(paths, resolved, strict=True):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file; give raw Criteo logs as input")
        if resolved.count(own) > 1:
            raise ValueError(f"{path} is given more than once; give each input once")
    known = None
    if options.ids_of is not None:
        known = Path(options.ids_of)
        if known.resolve() == Path(output).resolve():
            raise ValueError(f"--ids-of {known} is the output as well; give another --output")
        options = inherited(options)
    key = {
        "format": [FORMAT, block_bytes],
        "ids_of": known and [str(known.resolve()), (known / META_FILE).stat().st_mtime_ns],
        "options": asdict(options) | {"bad_rows": None},  # does not change what is spilled
        "inputs": [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths],
    }
    with Workspace(Path(output), key) as work:
        if not work.finished:
            _make(paths, options, work, workers or cpu_count(), block_bytes, progress)
        work.publish()
    return Meta.read(output)


def inherited(options: Options) -> Options:
    """The options with those that make ids and numbers taken from the data of ``ids_of``.

    Raises:
        FileNotFoundError: there is no such data.
        ValueError: no preparation made it, one of these options is given and differs, or a
            vocabulary is damaged.
    """
    assert options.ids_of is not None
    meta = Meta.read(options.ids_of)
    made = meta.options
    own: dict[str, Any] = {}
    for name in ("vocabulary", "min_count", "cap", "dense_transform"):
        flag = f"--{name.replace('_', '-')}"
        if name not in made:
            raise ValueError(f"--ids-of {options.ids_of}: it was not made by prepare_criteo.py")
        own[name], given = made[name], getattr(options, name)
        if given not in (getattr(Options(), name), own[name]):
            way = "without one" if own[name] is None else f"with {own[name]}"
            raise ValueError(
                f"{flag} is {given}, and {options.ids_of} was prepared {way}: leave it out, the "
                "data of --ids-of decide"
            )
    require_known(Path(options.ids_of), meta.categorical)
    return replace(options, **own)


def split_rows(split: tuple[str, ...], rows: Sequence[int]) -> dict[str, range]:
    """The rows of each split, numbered over all inputs.

    ``("days",)`` is the reference protocol: all days but the last train, the first half of the
    last is test, the second val. A day is a file that has rows, or a seventh of them where there is
    a single one (the first days are a row longer if need be). With fractions, train, val and test
    follow one another in row order.

    Args:
        split: as :attr:`Options.split`.
        rows: rows of each input file.
    """
    total = sum(rows)
    if split == ("days",):
        days = [count for count in rows if count]  # a limit may leave the last files unread
        last = days[-1] if len(days) > 1 else total // DAYS
        first = total - last
        half = first + (last + 1) // 2
        return {"train": range(first), "val": range(half, total), "test": range(first, half)}
    train, val, _ = _fractions(split)
    ends = int(train * total), int((train + val) * total)
    return {
        "train": range(ends[0]),
        "val": range(*ends),
        "test": range(ends[1], total),
    }


def _fractions(split: tuple[str, ...]) -> tuple[Fraction, ...]:
    """The three shares, exactly as written in decimals."""
    try:
        shares = tuple(Fraction(share) for share in split)
    except (ValueError, ZeroDivisionError):
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or sum(shares) != 1:
        raise ValueError(
            f"--split is {' '.join(split)}; it must be days, or the shares of train, val and test, "
            "which add up to 1, as in --split 0.85 0 0.15"
        )
    return shares


def _make(
    paths: Sequence[Path],
    options: Options,
    work: Workspace,
    workers: int,
    block_bytes: int,
    progress: bool,
) -> None:
    """Make all results in the workspace."""
    with Pool(workers) as pool:
        blocks, inputs = parse_files(
            paths,
            work,
            pool,
            transform=options.dense_transform,
            limit=options.limit,
            skip_bad=options.bad_rows == "skip",
            block_bytes=block_bytes,
            progress=progress,
        )
        rows = {str(path): 0 for path in paths}
        for block in blocks:
            rows[block.source] += block.rows
        parts = split_rows(options.split, list(rows.values()))
        counted = len(parts["train"]) if options.vocabulary == "train" else sum(rows.values())
        if options.ids_of and not sum(rows.values()):
            raise ValueError("no rows to give ids to: 0 good rows were read; give more rows")
        if not counted and not options.ids_of:
            raise ValueError(
                f"no rows to make the vocabulary of: {sum(rows.values())} good rows were read and "
                f"--split {' '.join(options.split)} leaves none for training; give more rows, "
                "another --split or --vocabulary all"
            )
        _report_bad(blocks, work)
        blocks = [block for block in blocks if block.rows]
        categorical = number_columns(
            blocks,
            work,
            counted=counted,
            cap=options.cap,
            min_count=options.min_count,
            oov=options.vocabulary == "train" or options.min_count > 1,
            known=Path(options.ids_of) if options.ids_of else None,
            progress=progress,
        )
        splits = write_splits(blocks, categorical, parts, work, pool, progress=progress)
    Meta(
        dense=CRITEO_DENSE,
        categorical=categorical,
        splits=splits,
        options=asdict(options),
        inputs=tuple(inputs),
    ).write(work.directory)


def _report_bad(blocks: Sequence[Spilled], work: Workspace) -> None:
    kinds: Counter[str] = Counter()
    for block in blocks:
        kinds.update(block.bad)
    first = [asdict(bad) for block in blocks for bad in block.first_bad][:BAD_ROWS_KEPT]
    report = {"skipped": kinds.total(), "kinds": dict(sorted(kinds.items())), "first": first}
    with atomic_write(work / BAD_ROWS_FILE) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")
