"""Raw Criteo logs to a prepared directory: Parquet per split, vocabularies, ``meta.json``.

There are three passes, so that memory depends on the number of distinct values, not of rows:

1. parse: blocks of lines become columns, spilled to ``OUTPUT/.prepare/blocks``; a categorical
   column is dictionary-encoded, with the distinct values of its block;
2. index: column by column, the values of all blocks are merged into a vocabulary, which gives an
   id to each dictionary entry of each block;
3. write: block by block, dictionary entries become ids, and the rows are written to the splits.

A spilled block or an indexed column gets its name only when it is complete, so that a restart can
reuse it. Results are made in ``OUTPUT/.prepare`` and moved to ``OUTPUT`` at the end.
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

from dlrm.data.prepare.fingerprint import fingerprint
from dlrm.data.prepare.text_blocks import BAD_ROWS_KEPT, BLOCK_BYTES
from dlrm.data.prepare.workspace import BAD_ROWS_FILE, Workspace
from dlrm.data.preprocess.appending import NOTHING_TO_FORGET
from dlrm.data.preprocess.passes import index_columns, parse_files, write_splits
from dlrm.data.preprocess.spill import SpilledBlock
from dlrm.data.preprocess.vocabulary import check_vocabularies
from dlrm.data.schema import CRITEO_DENSE, META_FILE, Meta
from dlrm.data.splits import split_by_days, split_by_shares
from dlrm.utils.atomic import atomic_write
from dlrm.utils.cpus import cpu_count
from dlrm.utils.messages import did_you_mean

FORMAT = 1  # of the spilled blocks; increment it when a restart cannot reuse older ones


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that determine the results."""

    split: tuple[str, ...] = ("days",)
    """``("days",)``, or the shares of train, val and test in row order, as decimals."""
    vocabulary: Literal["train", "all"] = "train"
    """The rows whose values get their own ids."""
    min_count: int = 1
    """Values with fewer occurrences in those rows share the out-of-vocabulary id."""
    cap: int | None = None
    """Take the hexadecimal values modulo this number."""
    dense_transform: Literal["log1p", "log3"] = "log1p"
    limit: int | None = None
    """Read at most this many lines of the input."""
    bad_rows: Literal["stop", "skip"] = "stop"
    ids_of: str | None = None
    """A prepared directory whose ids are reused, with some of its options, see
    :func:`inherit_options`."""
    append_new: bool = False
    """With ``ids_of``: values of the new rows that it does not list get ids too."""
    forget: int | None = None
    """With ``append_new``: these are first the ids of values that were in the training rows of none
    of as many preparations, this one included."""

    def __post_init__(self) -> None:
        if self.split != ("days",):
            _exact_shares(self.split)
        for name, hint in get_type_hints(Options).items():
            option, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{option} is {value!r}{did_you_mean(value, get_args(hint))}")
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{option} is {value}; it must be at least 1")
        if self.append_new and self.ids_of is None:
            raise ValueError("--append-new needs --ids-of, the data whose ids come first")
        if self.forget is not None and not self.append_new:
            raise ValueError(NOTHING_TO_FORGET)

    def as_dict(self) -> dict[str, Any]:
        """The options as ``meta.json`` has them; those of earlier versions had no append_new and no
        forget."""
        known = asdict(self) | {"append_new": self.append_new or None}
        return {name: value for name, value in known.items() if name != "forget" or value}


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: Options,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: bool = True,
) -> Meta:
    """Prepare raw logs for training.

    If it is killed and called again with the same arguments, it continues, and the results have the
    same bytes. No result gets its final name before the end.

    Args:
        inputs: raw files, in the order of time.
        output: directory for ``train.parquet``, ``val.parquet``, ``test.parquet``,
            ``vocabulary/C1.parquet`` .., ``bad_rows.json`` and ``meta.json``.
        options: options that determine the results.
        overwrite: replace what was prepared there from other inputs or with other options.
        workers: threads; by default one per core that the process may use.
        block_bytes: size of the blocks of lines that are parsed and spilled.
        progress: show progress bars on standard error.

    Returns:
        The contents of ``meta.json``.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: there are bad rows (unless they are to be skipped) or no rows to train on, or
            another process is preparing ``output``.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers is {workers}; it must be at least 1")
    paths = [Path(path) for path in inputs]
    resolved = [path.resolve() for path in paths]
    for path, own in zip(paths, resolved, strict=True):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not a file; the inputs must be raw Criteo logs")
        if resolved.count(own) > 1:
            raise ValueError(f"{path} is given more than once; give each input once")
    ids_of = None
    if options.ids_of is not None:
        ids_of = Path(options.ids_of)
        if ids_of.resolve() == Path(output).resolve():
            raise ValueError(f"--ids-of {ids_of} is also the output; give another --output")
        options = inherit_options(options)
    key = {
        "format": [FORMAT, block_bytes],
        "ids_of": ids_of and [str(ids_of.resolve()), (ids_of / META_FILE).stat().st_mtime_ns],
        "options": options.as_dict() | {"bad_rows": None},  # does not change what is spilled
    }
    with Workspace(Path(output), key, inputs=paths, overwrite=overwrite) as work:
        if not work.finished:
            _make(paths, options, work, workers or cpu_count(), block_bytes, progress)
        work.publish()
    return Meta.read(output)


def inherit_options(options: Options) -> Options:
    """Replace the options that determine ids and dense values by those of the data ``ids_of``.

    Raises:
        FileNotFoundError: ``ids_of`` has no ``meta.json``.
        ValueError: ``ids_of`` was not made by :func:`prepare`, one of these options is given and
            differs, or a vocabulary is damaged.
    """
    assert options.ids_of is not None
    meta = Meta.read(options.ids_of)
    inherited: dict[str, Any] = {}
    for name in ("vocabulary", "min_count", "cap", "dense_transform"):
        flag = f"--{name.replace('_', '-')}"
        if name not in meta.options:
            raise ValueError(
                f"--ids-of {options.ids_of}: this data was not made by prepare_criteo.py"
            )
        inherited[name], given = meta.options[name], getattr(options, name)
        if given not in (getattr(Options(), name), inherited[name]):
            how = "without it" if inherited[name] is None else f"with {inherited[name]}"
            raise ValueError(
                f"{flag} is {given}, but {options.ids_of} was prepared {how}: leave the option "
                "out, it is taken from the data of --ids-of"
            )
    if options.append_new and meta.fingerprint is None:
        raise ValueError(
            f"--append-new: {options.ids_of} was prepared by an earlier version and has no "
            "fingerprint; prepare it again"
        )
    if options.forget is not None and any(c.oov_id is None for c in meta.categorical):
        raise ValueError(
            f"--forget: {options.ids_of} was prepared with --vocabulary all and has no id that "
            "forgotten values could share: prepare it with --vocabulary train"
        )
    check_vocabularies(Path(options.ids_of), meta.categorical)
    return replace(options, **inherited)


def _exact_shares(split: tuple[str, ...]) -> tuple[Fraction, ...]:
    """The shares of train, val and test, exactly as the decimals say.

    Raises:
        ValueError: these are not three shares that add up to 1.
    """
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


def split_rows(split: tuple[str, ...], rows: Sequence[int]) -> dict[str, range]:
    """The rows of each split, numbered over all inputs.

    Args:
        split: see :attr:`Options.split`.
        rows: rows of each input file.
    """
    if split == ("days",):
        return split_by_days(rows)
    return split_by_shares(sum(rows), *_exact_shares(split)[:2])


def _make(
    paths: Sequence[Path],
    options: Options,
    work: Workspace,
    workers: int,
    block_bytes: int,
    progress: bool,
) -> None:
    """Make all results in the workspace."""
    ids_of = Path(options.ids_of) if options.ids_of else None
    blocks, inputs = parse_files(
        paths,
        work,
        transform=options.dense_transform,
        limit=options.limit,
        skip_bad=options.bad_rows == "skip",
        block_bytes=block_bytes,
        workers=workers,
        progress=progress,
    )
    rows = {str(path): 0 for path in paths}
    for block in blocks:
        rows[block.source] += block.rows
    total, splits = sum(rows.values()), split_rows(options.split, list(rows.values()))
    counted = len(splits["train"]) if options.vocabulary == "train" else total
    if ids_of and not total:
        raise ValueError("no rows to give ids to: 0 good rows were read; give more rows")
    if not counted and options.append_new:
        raise ValueError(
            f"--append-new: --split {' '.join(options.split)} leaves no rows for training, and "
            "only their values get new ids; give another --split, or leave --append-new out"
        )
    if not counted and not ids_of:
        raise ValueError(
            f"no rows to make the vocabulary of: {total} good rows were read and --split "
            f"{' '.join(options.split)} leaves none for training; give more rows, another --split "
            "or --vocabulary all"
        )
    _report_bad(blocks, work)
    blocks = [block for block in blocks if block.rows]
    categorical = index_columns(
        blocks,
        work,
        counted=counted,
        cap=options.cap,
        min_count=options.min_count,
        oov=options.vocabulary == "train" or options.min_count > 1,
        ids_of=ids_of,
        append_new=options.append_new,
        forget=options.forget,
        progress=progress,
    )
    own = fingerprint(
        work.directory,
        [column.name for column in categorical],
        {"dense_transform": options.dense_transform, "cap": options.cap},
    )
    Meta(
        dense=CRITEO_DENSE,
        categorical=categorical,
        splits=write_splits(blocks, categorical, splits, work, workers=workers, progress=progress),
        options=options.as_dict(),
        inputs=tuple(inputs),
        fingerprint=own,
        extends=Meta.read(ids_of).extended_by(own) if ids_of else (),
    ).write(work.directory)


def _report_bad(blocks: Sequence[SpilledBlock], work: Workspace) -> None:
    kinds: Counter[str] = Counter()
    for block in blocks:
        kinds.update(block.bad)
    first = [asdict(bad) for block in blocks for bad in block.first_bad][:BAD_ROWS_KEPT]
    report = {"skipped": kinds.total(), "kinds": dict(sorted(kinds.items())), "first": first}
    with atomic_write(work / BAD_ROWS_FILE) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")
