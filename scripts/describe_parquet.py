"""Write meta.json for Parquet files from other programs, so that train.py can read them.

    python scripts/describe_parquet.py data --train train-*.parquet --test test.parquet

The files do not change. They need a label (bool, or a number in [0, 1]) and categorical columns
(integers from 0, or lists of them for multi-hot features), and may have dense columns (numbers).
The table of a categorical column has as many rows as its largest id + 1, and one more that stands
for nulls and for ids that rows to score may have beyond these (--unseen row). Without that row,
such an id is an error (--unseen error), and nulls get a row only if the column has any.

Files that come later are described with the tables of the data that a model was trained on:

    python scripts/describe_parquet.py new --test 'part-*.parquet' --tables-of data
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import glob
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from dlrm.data.column_values import is_list_of_ids
from dlrm.data.parquet import RowGroup, RowGroupReader, read_footer
from dlrm.data.prepare.input_paths import find_files
from dlrm.data.prepare.kinds import NoFeatureError, find_kind
from dlrm.data.schema import DESCRIBED, META_FILE, SPLITS, Categorical, Meta, Split, Unseen
from dlrm.utils.messages import listing, print_error, printable
from dlrm.utils.program import Parser, exit_status, path_arg

SAMPLE_ROWS = 1 << 16  # that are looked at for what columns are
HASHED = 10  # with more rows of a table than this per row of data, the ids look hashed


@dataclass
class IdRange:
    """The largest id, the number of nulls and the lengths of the bags of a categorical column."""

    largest: int = -1
    nulls: int = 0
    lengths: set[int | None] = field(default_factory=set)
    """The shortest and the longest of each row group; None for a bag that is null."""

    @property
    def bag_size(self) -> int | None:
        """The length of the bags, if all have as many ids."""
        (length,) = self.lengths if len(self.lengths) == 1 else (None,)
        return length or None

    def update(self, column: Categorical, where: object, ids: pa.ChunkedArray) -> None:
        """Add the ids of one row group."""
        name = column.name
        if column.multi_hot:
            self.lengths.update(pc.min_max(pc.list_value_length(ids)).as_py().values())
            self.lengths.update([None] if ids.null_count else [])
            ids = pc.list_flatten(ids)

        limits = pc.min_max(ids).as_py()
        if limits["min"] is not None and limits["min"] < 0:
            raise ValueError(
                f"{where}, column {name!r} has id {limits['min']}; ids start at 0: renumber them, "
                "or leave the column out of --categorical"
            )
        if limits["max"] is not None and limits["max"] >= 2**63 - 2:
            raise ValueError(
                f"{where}, column {name!r} has id {limits['max']}; ids must be below 2**63 - 2: "
                "renumber them from 0, the most frequent first"
            )
        self.largest = max(self.largest, -1 if limits["max"] is None else limits["max"])
        self.nulls += ids.null_count


def describe_files(
    directory: Path, files: dict[str, tuple[str, ...]], meta: Meta, unseen: Unseen | None
) -> Meta:
    """Read all files once and describe them.

    Args:
        directory: directory of ``meta.json``.
        files: the Parquet files of each split, relative to ``directory``.
        meta: the columns.
        unseen: ``row``: one more row of each table stands for nulls and for later ids; ``error``:
            ids must be in the table. None: the tables are those of ``meta``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged; a column is missing, of the wrong type or named twice; a
            label is missing or not in [0, 1]; an id is negative or too large, or a table of
            ``meta`` has no row for it.
    """
    columns, reader = meta.categorical, RowGroupReader(directory, meta)
    row_groups = {
        split: [row_group for name in names for row_group in reader.open(directory / name)]
        for split, names in files.items()
    }

    # Every row group is read once.
    seen = {column.name: IdRange() for column in columns}
    positives, missing = dict.fromkeys(files, 0), set(meta.dense)
    rows = {split: sum(row_group.rows for row_group in row_groups[split]) for split in files}
    with tqdm(total=sum(rows.values()), unit=" rows", unit_scale=True, disable=None) as progress:
        for split in files:
            for row_group in row_groups[split]:
                table = reader.read_table(row_group)
                labels = reader.labels(table, row_group)
                positives[split] += round(float(labels.sum(dtype=np.float64)))
                for column in columns:
                    seen[column.name].update(column, row_group, table[column.name])
                missing = {name for name in missing if _is_missing(table[name])}
                progress.update(row_group.rows)

    described = {
        split: Split(files=names, rows=rows[split], positives=positives[split])
        for split, names in files.items()
    }
    _note_missing([name for name in meta.dense if name in missing], sum(rows.values()))
    _note_unchecked([row_group for groups in row_groups.values() for row_group in groups])
    tables = [
        _with_table(column, ids, unseen) if unseen else _in_table(column, ids)
        for column, ids in zip(columns, seen.values(), strict=True)
    ]
    made_by = {"made_by": DESCRIBED}
    return replace(meta, categorical=tuple(tables), splits=described, options=made_by)


def _with_table(column: Categorical, ids: IdRange, unseen: Unseen) -> Categorical:
    """A column with the table that its ids need."""
    reserved = unseen == "row" or ids.nulls > 0
    return replace(
        column,
        cardinality=max(1, ids.largest + 1 + reserved),
        oov_id=ids.largest + 1 if reserved else None,
        unseen=unseen,
        bag_size=ids.bag_size,
    )


def _in_table(column: Categorical, ids: IdRange) -> Categorical:
    """A column whose ids are in its table.

    Raises:
        ValueError: one is not.
    """
    if column.unseen == "error" and ids.largest >= column.cardinality:
        raise ValueError(
            f"column {column.name!r} has id {ids.largest}, its table {column.cardinality} rows and "
            "none for unseen ids: describe the training data with --unseen row, and train again"
        )
    if ids.nulls and column.oov_id is None:
        raise ValueError(
            f"column {column.name!r} has nulls, its table no row for them: fill them in, or "
            "describe the training data with --unseen row, and train again"
        )
    return replace(column, bag_size=ids.bag_size)


def _is_missing(column: pa.ChunkedArray) -> bool:
    """Whether all values of a dense column are null or NaN."""
    if pa.types.is_floating(column.type):
        return pc.all(pc.is_null(column, nan_is_null=True)).as_py() is not False
    return column.null_count == len(column)


def _note_unused(path: Path, meta: Meta, dense: Sequence[str] | None) -> None:
    """Note the columns that can't be features as they are, and whole floats that look like ids."""
    _, schema = read_footer(path)
    used = {meta.label, *meta.dense, *meta.tables}
    unused = [field for field in schema if field.name not in used and not _is_usable(field.type)]
    if unused:
        kinds = [f"{printable(field.name)} ({field.type})" for field in unused]
        print_error(
            f"note: columns that are left out: {listing(kinds)}; scripts/prepare_table.py makes "
            "features of texts, times and lists of texts"
        )

    ids = [name for name in meta.dense if dense is None and _looks_like_ids(path, name)]
    if ids:
        print_error(
            f"note: dense columns of whole numbers that look like ids: {listing(ids)}; "
            "scripts/prepare_table.py makes ids of them; name them with --dense if they are numbers"
        )


def _is_usable(kind: pa.DataType) -> bool:
    """Whether a column may be dense or categorical as it is."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_list_of_ids(kind)


def _looks_like_ids(path: Path, name: str) -> bool:
    with pq.ParquetFile(path) as file, suppress(NoFeatureError):
        rows = next(file.iter_batches(SAMPLE_ROWS, columns=[name]), None)
        return rows is not None and find_kind(name, rows[name], False).kind == "category"
    return False


def _note_missing(names: Sequence[str], rows: int) -> None:
    if names and rows:
        print_error(
            f"note: dense columns without any number in all {rows:,} rows, of which a model learns "
            f"nothing: {listing(names)}"
        )


def _note_unchecked(row_groups: Sequence[RowGroup]) -> None:
    """Warn once of files whose pages have no checksums."""
    firsts = {row_group.path: row_group for row_group in reversed(row_groups)}.values()
    unchecked = [first.path for first in firsts if not has_page_checksums(first)]
    if unchecked:
        print_error(
            f"note: {len(unchecked)} of {len(firsts)} files have no checksums, such as "
            f"{unchecked[-1]}: damage to their values may not be noticed; "
            "write_page_checksum=True of pyarrow.parquet writes them"
        )


def has_page_checksums(row_group: RowGroup) -> bool:
    """Whether the pages of a row group have checksums, by the header of the first one.

    Without them, a damaged value is noticed only if it can't be decoded.
    """
    column = row_group.metadata.row_group(row_group.index).column(0)
    offsets = column.dictionary_page_offset, column.data_page_offset
    with row_group.path.open("rb") as file:
        file.seek(min(offset for offset in offsets if offset))
        header = file.read(64)
    # Thrift's compact protocol: each field has a byte for its type and the distance of its number
    # from the last one, here always 1, and a number of 7 bits a byte. The first fields are type
    # and two sizes, which all pages have; the fourth is the checksum, if there is one.
    number = rb"\x15[\x80-\xff]*[\x00-\x7f]"
    return re.match(number * 4, header, re.DOTALL) is not None


def _columns(
    path: Path, label: str, dense: Sequence[str] | None, categorical: Sequence[str] | None
) -> Meta:
    """The columns of a file: the given ones, or the default by type."""
    _, schema = read_footer(path)
    if dense is None:
        dense = [f.name for f in schema if pa.types.is_floating(f.type) and f.name != label]
    if categorical is None:
        ids = [f.name for f in schema if pa.types.is_integer(f.type) or is_list_of_ids(f.type)]
        categorical = [name for name in ids if name not in {label, *dense}]
    if not categorical:
        raise ValueError(
            f"{path}: no categorical columns, a model needs at least one: name a column of "
            "integers or lists of integers with --categorical"
        )
    lists = {field.name for field in schema if pa.types.is_nested(field.type)}
    columns = [Categorical(name=c, cardinality=0, multi_hot=c in lists) for c in categorical]
    return Meta(label=label, dense=tuple(dense), categorical=tuple(columns), splits={})


def parser() -> Parser:
    """The command line."""
    made = Parser(__doc__)
    add = made.add_argument
    add("directory", type=path_arg, help="directory of the files and of meta.json")
    for split in SPLITS:
        files = f"Parquet files of the {split} split, in order, relative to the directory: files, "
        files += "directories, or patterns such as 'part-*.parquet' (default: none)"
        add(f"--{split}", nargs="+", default=[], metavar="FILE", help=files)

    # Columns, and ids that were not seen.
    add("--label", default="label", help="column to predict (default: label)")
    dense = "dense columns (default: all columns of floating type)"
    add("--dense", nargs="*", metavar="COLUMN", help=dense)
    ids = "categorical columns (default: all other columns of integers or lists of integers)"
    add("--categorical", nargs="*", metavar="COLUMN", help=ids)
    unseen = "an id beyond those of the training rows, in rows to score. row: one more row of the "
    unseen += "table stands for all of them. error: the file is refused"
    add("--unseen", choices=("row", "error"), default="row", help=unseen)

    # Later files.
    earlier = "described data on which a model was trained, whose columns, tables and --unseen are "
    earlier += "taken (default: none)"
    add("--tables-of", type=path_arg, metavar="DIR", help=earlier)
    add("--overwrite", action="store_true", help="replace an existing meta.json (default: no)")
    return made


def describe(options: Namespace) -> None:
    """Write meta.json and print a summary."""
    directory: Path = options.directory
    if (directory / META_FILE).exists() and not options.overwrite:
        raise ValueError(f"{directory / META_FILE} exists; use --overwrite to replace it")
    if options.tables_of is not None:
        like = _described(options.tables_of)
        meta = describe_files(directory, _files(options, needs_training=False), like, None)
    else:
        files = _files(options, needs_training=True)
        first = directory / files["train"][0]
        columns = _columns(first, options.label, options.dense, options.categorical)
        meta = describe_files(directory, files, columns, options.unseen)
        _note_unused(first, meta, options.dense)
    _print_summary(meta)
    if outside := meta.files_outside(directory):
        print(f"{len(outside)} files are not in {directory}: train with --loader.allow_outside")
    print(f"wrote {printable(meta.write(directory))}")


def _described(directory: Path) -> Meta:
    """The description of the data on which a model was trained."""
    meta = Meta.read(directory)
    if meta.options.get("made_by") != DESCRIBED:
        raise ValueError(
            f"--tables-of {directory} was not made by this program: give the data that the ids of "
            "these files come from"
        )
    return meta


def _files(options: Namespace, *, needs_training: bool) -> dict[str, tuple[str, ...]]:
    """The files of each split that has some, relative to the directory if they are in it."""
    within, root = glob.escape(str(options.directory)), os.path.abspath(options.directory)
    found = {
        split: find_files([os.path.join(within, name) for name in getattr(options, split)])
        for split in SPLITS
    }
    if needs_training and not found["train"]:
        raise ValueError("no training files; name them with --train FILE ...")
    every = [path for paths in found.values() for path in paths]
    if not every:
        raise ValueError("no files; name them with --test FILE ...")
    find_files(every)  # raises if a file is in two splits
    return {
        split: tuple(os.path.abspath(path).removeprefix(f"{root}{os.sep}") for path in paths)
        for split, paths in found.items()
        if paths
    }


def _print_summary(meta: Meta) -> None:
    for column in meta.categorical:
        notes = "multi-hot" * column.multi_hot, "unseen" * (column.oov_id is not None)
        size = f"{column.cardinality:>13,} rows"
        print(f"{printable(column.name):24} {size}  {' '.join(notes).strip()}".rstrip())

    rows = sum(split.rows for split in meta.splits.values())
    for column in meta.categorical:
        if not column.multi_hot and column.cardinality > max(HASHED * rows, 10**6):
            print_error(
                f"warning: {column.name} needs a table of {column.cardinality:,} rows for {rows:,} "
                "values: its ids look hashed; renumber them from 0, the most frequent first"
            )

    for name, split in meta.splits.items():
        share = split.positives / max(1, split.rows)
        print(f"{name:24} {split.rows:>13,} rows in {len(split.files)} files, {share:.2%} positive")
    print(f"{len(meta.dense)} dense columns: {printable(', '.join(meta.dense)) or 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser().parse_args(argv)
    return exit_status(lambda: describe(options), "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
