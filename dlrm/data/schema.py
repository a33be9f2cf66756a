"""Columns of a data set and ``meta.json``, the file that describes a prepared directory.

A prepared directory holds one or more Parquet files per split and this meta file, which names the
columns. A data set with other columns than Criteo's 13 + 26 trains in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen

from ..utils.atomic import atomic_write
from ..utils.documents import read_json, shown
from ..utils.messages import printable, require_local
from ..utils.validation import Closed, Flag, Number, Whole, validate

SCHEMA_VERSION = 1
META_FILE = "meta.json"
SPLITS = ("train", "val", "test")
MAX_NAME = 1000  # characters of the name of a column or file
LONGEST = 243  # bytes of a column in the name of a file, which ends in .parquet.tmp

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))

# Distinct values of C1..C26 in the whole Kaggle file; "missing" counts as a value.
KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip

# Rows of the 26 tables of Criteo Terabyte with ids taken modulo 40,000,000 (the MLPerf cap).
TERABYTE_CARDINALITIES = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip

# Ids of a bag of each table in the multi-hot data of MLPerf's DLRM-DCNv2: 214 a sample.
MLPERF_BAG_SIZES = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip

DESCRIBED = "scripts/describe_parquet.py"  # options["made_by"] of Parquet from other programs


HASHED = 2**63 - 1
"""The cardinality of a column whose ids are hashes of its values, of which nobody knows how many
there are."""

Count = Annotated[Whole, Interval(ge=0, lt=2**63)]
Size = Annotated[Whole, Interval(ge=1, lt=2**63)]
Name = Annotated[str, MaxLen(MAX_NAME)]
Unseen = Literal["error", "row"]


@dataclass(frozen=True, kw_only=True)
class Categorical(Closed):
    """A categorical column; its ids are looked up in a table of ``cardinality`` rows."""

    name: Name
    cardinality: Size
    """Rows of the table; every id is in ``[0, cardinality)``."""
    multi_hot: Flag = False
    """Each value is a list of ids (a bag) rather than one id."""
    bag_size: Size | None = None
    """Multi-hot: ids of every bag, where all have as many; None: bags differ in length."""
    oov_id: Count | None = None
    """The id shared by all values that are not in the vocabulary, if there is one."""
    unseen: Unseen = "error"
    """How an id outside the table is treated: ``error``, or ``row``, that of ``oov_id``."""
    vocabulary: Name | None = None
    """Another categorical column, whose ids stand for the same values."""
    values: Size | None = None
    """Of hashed ids: about how many different ones the training rows have."""

    def __post_init__(self) -> None:
        """Check what depends on several fields."""
        column = f"column {shown(self.name)} has"
        if self.oov_id is not None and self.oov_id >= self.cardinality:
            raise ValueError(f"{column} oov_id {self.oov_id} and cardinality {self.cardinality}")
        if self.bag_size is not None and not self.multi_hot:
            raise ValueError(f"{column} bag_size {self.bag_size}, and is not multi_hot")
        if self.unseen == "row" and self.oov_id is None:
            raise ValueError(f"{column} unseen 'row', and no oov_id")


@dataclass(frozen=True, kw_only=True)
class Split(Closed):
    """The Parquet files of one split, in reading order, relative to the directory."""

    files: tuple[Name, ...]
    rows: Count
    positives: Count

    def __post_init__(self) -> None:
        if self.positives > self.rows:
            raise ValueError(f"it has {self.positives:,} positives in {self.rows:,} rows")

    @property
    def rarer(self) -> int:
        """Rows of the class that has fewer."""
        return min(self.positives, self.rows - self.positives)


@dataclass(frozen=True, kw_only=True)
class EarlierData(Closed):
    """Data that was prepared before, whose ids later data extends."""

    fingerprint: str
    cardinalities: tuple[Size, ...]


@dataclass(frozen=True, kw_only=True)
class Meta(Closed):
    """The content of ``meta.json``, which describes a prepared directory.

    Raises:
        ValueError: a column is named more than once, or its name is too long; or the ids do not
            begin with those of the data that they extend.
    """

    dense: tuple[Name, ...]
    categorical: tuple[Categorical, ...]
    splits: Mapping[str, Split]
    label: Name = "label"
    weight: Name | None = None
    """The column of sample weights, if there is one."""
    weight_ratio: Number | None = None
    """Mean weight of the positives divided by that of the negatives, in the training rows; None: 1,
    or unknown. The odds among weighted rows are so many times those among all rows."""
    schema_version: int = SCHEMA_VERSION
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options with which the data was made."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """Name, size in bytes and SHA-256 of each raw input file."""
    planted: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    """For synthetic data: the best possible metrics of each split, those of the label model."""
    effects: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
    """How much the ids of each column say about the label, by how often they occur, as estimated
    from the training rows; see :mod:`dlrm.data.evidence`. Older data does not have it."""
    fingerprint: str | None = None
    """Of data made from raw rows; see :func:`dlrm.data.prepare.fingerprint.fingerprint`."""
    extends: tuple[EarlierData, ...] = ()
    """Fingerprint and cardinalities of the earlier data whose ids these begin with, oldest first.
    Later ids were appended, and some may have been given to new values, so that the ids are not in
    order of falling frequency."""

    def __post_init__(self) -> None:
        names = [self.label, *self.dense, *self.tables]
        names += [] if self.weight is None else [self.weight]

        # Names are short, and each is used once.
        for name in names:
            if len(name) > MAX_NAME:
                raise ValueError(
                    f"column {shown(name)} has a name of more than {MAX_NAME} characters"
                )
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(
                    f"column {shown(name)} is named {count} times; a column is the label, dense or "
                    "categorical, once"
                )

        # Ids of one vocabulary are those of one table.
        for column in self.categorical:
            if column.vocabulary is not None:
                rows_of = {c.name: c.cardinality for c in self.categorical if c.vocabulary is None}
                if rows_of.get(column.vocabulary) != column.cardinality:
                    raise ValueError(
                        f"column {shown(column.name)} has vocabulary {shown(column.vocabulary)}, "
                        "which is no column with as many ids and a vocabulary of its own"
                    )

        # Every table has at least the rows that it had in earlier data.
        for earlier in self.extends:
            rows = earlier.cardinalities
            shorter = len(rows) == len(self.categorical) and all(
                least <= now for least, now in zip(rows, self.cardinalities, strict=True)
            )
            if not shorter:
                raise ValueError(f"extends has {shown(rows)}, which is no beginning of the ids")

    @property
    def tables(self) -> tuple[str, ...]:
        """Name of each categorical column, which is also the name of its table."""
        return tuple(column.name for column in self.categorical)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Rows of each table, in column order."""
        return tuple(column.cardinality for column in self.categorical)

    @property
    def owners(self) -> tuple[int, ...]:
        """For each categorical column, the column whose vocabulary it has: nearly always itself."""
        return tuple(self.tables.index(c.vocabulary or c.name) for c in self.categorical)

    @property
    def multi_hot(self) -> bool:
        """Whether any categorical column is a list column."""
        return any(column.multi_hot for column in self.categorical)

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Ids of each column in a row, in column order; None where rows differ."""
        return tuple(c.bag_size if c.multi_hot else 1 for c in self.categorical)

    @property
    def bag_sizes(self) -> tuple[int, ...] | None:
        """The lengths if a column is multi-hot and all have a fixed length, otherwise None."""
        known = tuple(size for size in self.lengths if size is not None)
        return known if self.multi_hot and len(known) == len(self.lengths) else None

    def rows_at(self, fingerprint: str | None) -> tuple[int, ...] | None:
        """The rows that each table had in earlier data which this extends; None if it was none."""
        for earlier in self.extends:
            if earlier.fingerprint == fingerprint != self.fingerprint:
                return earlier.cardinalities
        return None

    def extended_by(self, fingerprint: str) -> tuple[EarlierData, ...]:
        """``extends`` of later data with a fingerprint, whose ids begin with these."""
        if fingerprint == self.fingerprint:
            return self.extends
        assert self.fingerprint is not None
        earlier = EarlierData(fingerprint=self.fingerprint, cardinalities=self.cardinalities)
        return (*self.extends, earlier)

    @property
    def counts(self) -> dict[str, list[int]]:
        """Rows and positives of each split, by which results recognise data that was remade."""
        return {name: [split.rows, split.positives] for name, split in self.splits.items()}

    def files_outside(self, directory: str | os.PathLike[str]) -> list[str]:
        """The files that are not in ``directory``, with symbolic links followed."""
        root = Path(os.path.realpath(directory))
        names = [name for split in self.splits.values() for name in split.files]
        paths = [os.path.realpath(root / name) for name in names]
        return [n for n, path in zip(names, paths, strict=True) if root not in Path(path).parents]

    @property
    def preparation(self) -> str:
        """Identifies this data: a digest of its columns, rows, options and inputs.

        It does not depend on where the data is stored, or how it is divided into files.
        """
        columns = [[column.name, column.cardinality] for column in self.categorical]
        content = [self.label, self.dense, columns, self.counts, self.options, self.inputs]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def has_rows(self, split: str) -> bool:
        """Whether the split exists and is not empty."""
        return split in self.splits and self.splits[split].rows > 0

    @staticmethod
    def vocabulary_file(name: str) -> str:
        """Path of the vocabulary (value, id, count) of column ``name`` in the directory.

        Characters that no file name may have on some system are written as ``%2F``, and the end of
        a long name as its hash.
        """
        safe = re.sub(r'[\x00-\x1f%/\\:*?"<>|]|^\.', lambda found: f"%{ord(found[0]):02X}", name)
        if len(whole := safe.encode()) > LONGEST:
            start = whole[: LONGEST - 20].decode(errors="ignore")
            safe = f"{start}-{hashlib.sha256(whole).hexdigest()[:16]}"
        return f"vocabulary/{safe}.parquet"

    def write(self, directory: str | os.PathLike[str], file: str = META_FILE) -> Path:
        """Write ``meta.json`` into ``directory`` atomically; returns its path."""
        path = Path(directory) / file
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(vars(self), indent=2, default=vars) + "\n")
        return path

    @classmethod
    def read(cls, directory: str | os.PathLike[str], *, allow_outside: bool = False) -> Meta:
        """Read the meta file of a prepared directory.

        Args:
            directory: the directory of ``meta.json``.
            allow_outside: whether it may list files that are not in the directory.

        Raises:
            FileNotFoundError: ``directory`` has no ``meta.json``.
            ValueError: ``directory`` is a file; or ``meta.json`` is not a meta file, has another
                schema version, or lists a file outside of the directory: by an absolute path, with
                ``..`` or through a symbolic link.
        """
        require_local(directory)
        path = Path(directory) / META_FILE
        if Path(directory).is_file():
            raise ValueError(
                f"{directory} is a file: prepare it with dlrm prepare (for a trained model with "
                "--ids-of RUN), and name the directory that it writes"
            )
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: if it was moved, name its new place; otherwise make the "
                "data with dlrm prepare, or run scripts/describe_parquet.py on Parquet with ids"
            )

        try:
            raw = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; prepare the data again") from None

        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema version {shown(version)}, this program reads version "
                f"{SCHEMA_VERSION}; "
                "prepare the data again"
            )
        try:
            meta = validate(cls, raw)
            if not meta.categorical:
                raise ValueError("there is no categorical column, a model needs at least one")
        except ValueError as error:
            raise ValueError(
                f"{path} is not a meta file: {printable(str(error))}; prepare the data again"
            ) from None

        # A link could lead anywhere.
        if not allow_outside and (outside := meta.files_outside(directory)):
            raise ValueError(
                f"{path} lists {shown(outside[0])}, which is not in {directory}: move the file "
                "there, or trust the list with --loader.allow_outside (dlrm train) or "
                "--allow-outside (dlrm evaluate, dlrm predict)"
            )
        return meta
