"""Criteo's logs to a prepared directory: the columns, the splits and the options are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from dlrm.data.prepare.bad_rows import BadRowsRule
from dlrm.data.prepare.column_options import Positive, SplitOptions
from dlrm.data.prepare.criteo_rows import criteo_plan, open_log
from dlrm.data.prepare.files import without_empty
from dlrm.data.prepare.infer import read_types
from dlrm.data.prepare.input_paths import find_files
from dlrm.data.prepare.learner import EarlierIds
from dlrm.data.prepare.pipeline import Preparation, RunOptions
from dlrm.data.prepare.table_rows import TableRows
from dlrm.data.prepare.transform import Transform
from dlrm.data.schema import Meta


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that determine the results, to be made by :func:`dlrm.utils.validation.validate`."""

    split: tuple[str, ...] = ("days",)
    """``("days",)``, or the shares of train, val and test in row order, as decimals."""
    ids: Literal["vocabulary", "hash"] = "vocabulary"
    """Positions in a vocabulary, or the hexadecimal values themselves, for ``--emb dynamic``."""
    vocabulary: Literal["train", "all"] = "train"
    """The rows whose values get their own ids."""
    min_count: Positive = 1
    """Values with fewer occurrences in those rows share the out-of-vocabulary id."""
    cap: Positive | None = None
    """Take the hexadecimal values modulo this number."""
    dense_transform: Literal["log1p", "log3"] = "log1p"
    limit: Positive | None = None
    """Read at most this many lines of the input."""
    bad_rows: BadRowsRule = "stop"
    ids_of: str | None = None
    """A prepared directory whose ids are reused, with some of its options, see
    :func:`inherit_options`."""
    append_new: bool = False
    """With ``ids_of``: values of the new rows that it does not list get ids too."""
    forget: Positive | None = None
    """With ``append_new``: these are first the ids of values that no training row had in as many
    preparations, this one included."""

    def __post_init__(self) -> None:
        self.split_options()
        EarlierIds.given(self.ids_of, self.append_new, self.forget)

        # Of ids that are not positions in a vocabulary.
        without = {"min_count": 1, "vocabulary": "train", "append_new": False}
        given = [name for name, default in without.items() if getattr(self, name) != default]
        if self.ids == "hash" and given:
            option = f"--{given[0].replace('_', '-')}"
            raise ValueError(f"--ids hash makes no vocabulary, as {option} needs: drop {option}")

    def split_options(self) -> SplitOptions:
        """The split, which is exactly as the decimals say."""
        if self.split == ("days",):
            return SplitOptions(by="days")
        try:
            train, val, test = self.split
            return SplitOptions(train=train, val=val, test=test)
        except ValueError:
            raise ValueError(
                f"--split is {' '.join(self.split)}; it must be days, or the shares of train, val "
                "and test, which add up to 1, as in --split 0.85 0 0.15"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        """The options as ``meta.json`` has them; those of earlier versions had no append_new, no
        forget and no ids."""
        content = asdict(self) | {"append_new": self.append_new or None}
        absent = {"forget": None, "ids": "vocabulary"}
        return {n: v for n, v in content.items() if n not in absent or v != absent[n]}


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: Options,
    **run: Unpack[RunOptions],
) -> Meta:
    """Prepare raw logs for training.

    Args:
        inputs: raw files, or patterns of them, in the order of time.
        output: directory for ``train.parquet``, ``val.parquet``, ``test.parquet``,
            ``vocabulary/C1.parquet`` .., ``bad_rows.json`` and ``meta.json``.
        options: options that determine the results.
        run: see :class:`dlrm.data.prepare.pipeline.RunOptions`.

    Returns:
        The contents of ``meta.json``.

    Raises:
        FileNotFoundError: an input does not exist.
        ValueError: there are bad rows (unless they are to be skipped) or no rows to train on, or
            another process is preparing ``output``.
    """
    paths = without_empty(find_files(inputs))
    if options.ids_of is not None:
        options = inherit_options(options)

    plan = criteo_plan(options.as_dict(), options.split_options())
    files = list(map(open_log, paths))
    source = TableRows(files=files, plan=plan, types=read_types(plan, files), limit=options.limit)
    preparation = Preparation(
        source=source,
        transform=Transform.of_criteo(plan),
        options=options.as_dict(),
        earlier=EarlierIds.given(options.ids_of, options.append_new, options.forget),
        bad_rows=options.bad_rows,
    )
    return preparation.run(output, **run)


def inherit_options(options: Options) -> Options:
    """Replace the options that determine ids and dense values by those of the data ``ids_of``,
    which must be whole, made by :func:`prepare`, and not differ from options that are given.

    Raises:
        FileNotFoundError: ``ids_of`` has no ``meta.json``.
        ValueError: ``ids_of`` was not made by :func:`prepare`, one of these options is given and
            differs, or a vocabulary is damaged.
    """
    assert options.ids_of is not None
    directory = Path(options.ids_of)
    meta = Meta.read(directory)

    # Options that are given must be those of the earlier data.
    inherited: dict[str, Any] = {}
    known = {"ids": "vocabulary", **meta.options}
    for name in ("ids", "vocabulary", "min_count", "cap", "dense_transform"):
        flag = f"--{name.replace('_', '-')}"
        if name not in known:
            raise ValueError(f"--ids-of {directory}: this data was not made with --criteo")
        inherited[name], given = known[name], getattr(options, name)
        if given not in (getattr(Options(), name), inherited[name]):
            how = "without it" if inherited[name] is None else f"with {inherited[name]}"
            raise ValueError(
                f"{flag} is {given}, but {directory} was prepared {how}: leave the option out, it "
                "is taken from the data of --ids-of"
            )
    options = replace(options, **inherited)

    # The earlier data must have what new ids need.
    if options.forget is not None and any(c.oov_id is None for c in meta.categorical):
        raise ValueError(
            f"--forget: {directory} was prepared with --vocabulary all and has no id that "
            "forgotten values could share: prepare it with --vocabulary train"
        )
    return options
