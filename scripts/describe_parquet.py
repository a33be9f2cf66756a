"""Write meta.json for Parquet files that others wrote, so that train.py can read them.

    python scripts/describe_parquet.py data --train train-*.parquet --test test.parquet

The files stay as they are. Any label + dense + categorical table serves: the label a bool or a
number in [0, 1], dense columns numbers, categorical columns integers from 0 or lists of them
(multi-hot). A table's size is the largest id + 1, over all splits. A column with nulls gets one row
more, which stands for them.
"""

from __future__ import annotations

import glob
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from dlrm.data.parquet import RowGroupReader
from dlrm.data.schema import DESCRIBED, META_FILE, SPLITS, Categorical, Meta, Split
from dlrm.utils.program import Parser, exit_status, path_arg

SPARSE = 10  # rows of a table per value of its column, from which on the ids look hashed


@dataclass
class Seen:
    """What the ids of one categorical column were found to be."""

    largest: int = -1
    nulls: int = 0

    def update(self, name: str, where: object, ids: pa.ChunkedArray) -> None:
        """Take in the ids of one row group, those of all bags behind one another."""
        limits = pc.min_max(ids).as_py()
        if limits["min"] is not None and limits["min"] < 0:
            raise ValueError(
                f"{where}, column {name!r} holds id {limits['min']}; ids count from 0: renumber "
                "them, or leave the column out of --categorical"
            )
        if limits["max"] is not None and limits["max"] >= 2**63 - 2:
            raise ValueError(
                f"{where}, column {name!r} holds id {limits['max']}; ids lie below 2**63 - 2: "
                "number them from 0 on, the most frequent first"
            )
        self.largest = max(self.largest, -1 if limits["max"] is None else limits["max"])
        self.nulls += ids.null_count


def describe(
    directory: Path,
    files: dict[str, tuple[str, ...]],
    *,
    label: str,
    dense: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
) -> Meta:
    """Read all files once and say what is in them.

    Args:
        directory: where ``meta.json`` is to lie.
        files: the Parquet files of each split, relative to ``directory``.
        label: the column to predict.
        dense: the dense columns; by default all of floating type but the label.
        categorical: the categorical columns; by default all of integers or lists of them but the
            label and the dense ones.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, a column is missing, of a wrong type or named twice, a label
            is missing or not in [0, 1], an id is negative.
    """
    first = next(name for names in files.values() for name in names)
    schema = _schema(directory / first)
    if dense is None:
        dense = [f.name for f in schema if pa.types.is_floating(f.type) and f.name != label]
    if categorical is None:
        taken = {label, *dense}
        categorical = [f.name for f in schema if _has_ids(f.type) and f.name not in taken]
    if not categorical:
        raise ValueError(
            f"{directory / first}: no categorical columns, and a model needs one: a column of "
            "integers or lists of integers, named with --categorical"
        )
    lists = {field.name for field in schema if pa.types.is_nested(field.type)}
    columns = [Categorical(name=c, cardinality=0, multi_hot=c in lists) for c in categorical]
    meta = Meta(label=label, dense=tuple(dense), categorical=tuple(columns), splits={})
    reader = RowGroupReader(directory, meta)
    groups = {
        split: [group for name in names for group in reader.open(directory / name)]
        for split, names in files.items()
    }
    seen = {column.name: Seen() for column in columns}
    positives = dict.fromkeys(files, 0)
    total = sum(group.rows for those in groups.values() for group in those)
    with tqdm(total=total, unit=" rows", unit_scale=True, disable=None) as progress:
        for split, those in groups.items():
            for group in those:
                table = reader.read_table(group)
                positives[split] += round(float(reader.labels(table, group).sum(dtype=np.float64)))
                for column in columns:
                    ids = table[column.name]
                    ids = pc.list_flatten(ids) if column.multi_hot else ids
                    seen[column.name].update(column.name, group, ids)
                progress.update(group.rows)
    return Meta(
        label=label,
        dense=tuple(dense),
        categorical=tuple(
            Categorical(
                name=column.name,
                cardinality=max(1, ids.largest + 1 + (ids.nulls > 0)),
                multi_hot=column.multi_hot,
                oov_id=ids.largest + 1 if ids.nulls else None,
            )
            for column, ids in zip(columns, seen.values(), strict=True)
        ),
        splits={
            split: Split(
                files=names,
                rows=sum(group.rows for group in groups[split]),
                positives=positives[split],
            )
            for split, names in files.items()
        },
        options={"made_by": DESCRIBED},
    )


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a complete Parquet file ({error})") from None


def _has_ids(kind: pa.DataType) -> bool:
    lists = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
    return pa.types.is_integer(kind.value_type if lists else kind)


def _found(directory: Path, patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that the patterns match, relative to the directory, each pattern's in order."""
    names: list[str] = []
    for pattern in patterns:
        named = (directory / pattern).is_file()  # as in part[1].parquet, which is a pattern too
        matches = [pattern] if named else sorted(glob.glob(pattern, root_dir=directory))
        if not matches:
            raise FileNotFoundError(
                f"no file {pattern!r} in {directory}; names are relative to that directory"
            )
        if folders := [name for name in matches if (directory / name).is_dir()]:
            raise ValueError(
                f"{directory / folders[0]} is a directory; name the files in it, as "
                f"'{folders[0].rstrip('/')}/*.parquet'"
            )
        names += matches
    return tuple(names)


def parser() -> Parser:
    """The command line."""
    made = Parser(__doc__)
    made.add_argument("directory", type=path_arg, help="where the files lie and meta.json goes")
    for split in SPLITS:
        made.add_argument(
            f"--{split}",
            nargs="+",
            default=[],
            metavar="FILE",
            help=f"Parquet files of the {split} split, in order, relative to the directory; "
            "patterns such as 'part-*.parquet' work (default: none)",
        )
    made.add_argument("--label", default="label", help="column to predict (default: label)")
    made.add_argument(
        "--dense", nargs="*", metavar="COLUMN", help="default: all columns of floating type"
    )
    made.add_argument(
        "--categorical",
        nargs="*",
        metavar="COLUMN",
        help="default: all other columns of integers or lists of integers",
    )
    made.add_argument(
        "--overwrite", action="store_true", help="replace a meta.json that is there (default: no)"
    )
    return made


def describe_and_tell(options: Namespace) -> None:
    """Describe, write, and print what was found."""
    directory: Path = options.directory
    if (directory / META_FILE).exists() and not options.overwrite:
        raise ValueError(f"{directory / META_FILE} exists; --overwrite replaces it")
    files = {split: _found(directory, getattr(options, split)) for split in SPLITS}
    if not files["train"]:
        raise ValueError("no training files; name them with --train FILE ...")
    names = [name for split in files.values() for name in split]
    for path, count in Counter((directory / name).resolve() for name in names).items():
        if count > 1:
            raise ValueError(f"{path} is named {count} times; a file belongs to one split, once")
    meta = describe(
        directory,
        {split: names for split, names in files.items() if names},
        label=options.label,
        dense=options.dense,
        categorical=options.categorical,
    )
    for column in meta.categorical:
        notes = "multi-hot" * column.multi_hot, "nulls" * (column.oov_id is not None)
        print(
            f"{column.name:24} {column.cardinality:>13,} rows  {' '.join(notes).strip()}".rstrip()
        )
    rows = sum(split.rows for split in meta.splits.values())
    for column in meta.categorical:
        if not column.multi_hot and column.cardinality > max(SPARSE * rows, 10**6):
            print(
                f"warning: {column.name} needs a table of {column.cardinality:,} rows for {rows:,} "
                "values: its ids look hashed; number them from 0 on, the most frequent first",
                file=sys.stderr,
            )
    for name, split in meta.splits.items():
        share = split.positives / max(1, split.rows)
        print(f"{name:24} {split.rows:>13,} rows in {len(split.files)} files, {share:.2%} positive")
    print(f"{len(meta.dense)} dense columns: {', '.join(meta.dense) or 'none'}")
    print(f"wrote {meta.write(directory)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser().parse_args(argv)
    return exit_status(lambda: describe_and_tell(options), "interrupted; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
