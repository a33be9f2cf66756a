"""Prepare any table for training: Parquet per split, vocabularies, transforms and meta.json."""

from __future__ import annotations

import shlex
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm.data.prepare.column_options import TableOptions, read_options
from dlrm.data.prepare.columns import ColumnPlan
from dlrm.data.prepare.files import RawFile
from dlrm.data.prepare.infer import ColumnsError
from dlrm.data.prepare.kinds import OF_THE_DAY
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.rates import rate_names
from dlrm.data.prepare.raw_rows import PREPARATION
from dlrm.data.prepare.table import (
    open_and_plan,
    open_later_rows,
    prepare_table,
)
from dlrm.data.prepare.workspace import BAD_ROWS_FILE, OPTIONS_FILE, TRANSFORM_FILE
from dlrm.data.schema import HASHED, Meta
from dlrm.utils.documents import parse_yaml, read_json
from dlrm.utils.messages import listing, printable
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg, peak_process_memory
from dlrm.utils.validation import validate

EPILOG = """\
With --criteo, raw logs of Criteo are prepared: dlrm prepare --criteo --help.

Input: CSV, TSV, JSON lines (plain, gzip, bzip2 or zstd) or Parquet: files, directories, or patterns
such as 'part-*.csv'. All files have the same columns.

What each column is (a number, a vector, a category, a list, a time) is found in the first rows and
printed. --columns overrides it, and so does a YAML file; every option has a default:

  label: clicked
  split: {by: time, column: when, train: 0.8, val: 0.1, test: 0.1}
  min_count: 2
  columns:
    price: {kind: number, transform: log}
    user: {kind: category, cap: 1000000}
    tags: {kind: list, separator: "|"}
    when: {kind: time, parts: [hour, weekday]}
    comment: drop
    row_id: pass

Output in DIR: train.parquet, val.parquet and test.parquet; vocabulary/NAME.parquet (value, id,
count; value "" is a missing value, null stands for all values without their own id);
transform.json, which with the vocabularies turns new rows into the same features; table.yaml, all
options; bad_rows.json; and meta.json, written last. Ids are in order of falling frequency in the
training rows.

Rows that come later get the ids and the scaling of those that were prepared before with --ids-of
DIR, which may also be a run. All options but the split are those of DIR.

If the program is killed, start it again with the same options: it continues, and the output has the
same bytes.

Examples:
  dlrm prepare clicks.csv --output data/clicks --label clicked
  dlrm prepare 'logs/*.parquet' --output data/logs --config logs.yaml --dry-run
  dlrm prepare tuesday.csv --output data/tuesday --ids-of data/clicks
  dlrm prepare tuesday.csv --output data/tuesday --ids-of data/clicks --append-new \\
      --split 0.9 0.1 0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status, which is 2 for bad input."""
    options = _parser().parse_args(argv)
    return exit_status(lambda: _prepare(options), "interrupted; run the same command to continue")


def _prepare(options: Namespace) -> None:
    """Print what each column is, prepare, and print a summary."""
    began = time.perf_counter()

    # What each column is; it is printed before an error about columns, too.
    content, skip_bad = _content(options), options.bad_rows != "stop"
    if options.ids_of is None:
        where = f"{options.config}: " if options.config else ""
        try:
            files, plan = open_and_plan(options.inputs, content, where, skip_bad=skip_bad)
        except ColumnsError as error:
            print(error.summary, flush=True)
            raise
    else:
        files, plan = _later_rows(options.inputs, options.ids_of, content, options.config)
    print(format_plan(plan), flush=True)

    # What the program decided that the user may not expect.
    if plan.rated:
        columns = f"{len(plan.rated)} column{'s' * (len(plan.rated) > 1)}"
        print(f"counts and rates of the ids of {columns}, from other rows (rates: false: none)")
    moments = (column for column in plan.columns if column.kind == "time")
    times = [column.name for column in moments if column.options.format not in OF_THE_DAY]
    if times and plan.options.split.by == "rows" and options.ids_of is None:
        option = shlex.join(["--split-by", f"time:{times[0]}"])
        print(f"split in the order of the rows (by time: {option})")
    if options.dry_run:
        print(f"\n{plan.as_yaml()}\nnothing was prepared (--dry-run)")
        return

    meta = prepare_table(
        files,
        plan,
        options.output,
        ids_of=options.ids_of,
        grow=options.append_new,
        evict_after=options.forget,
        bad_rows=options.bad_rows,
        overwrite=options.overwrite,
        workers=options.workers,
    )
    print_summary(options.output, meta, began)


def _content(options: Namespace) -> dict[str, Any]:
    """The options of the table, from the file and the command line."""
    content = {} if options.config is None else read_options(options.config)

    # One label, and what of it counts as 1.
    if len(options.label or ()) > 1:
        raise ValueError(
            f"--label is given {len(options.label)} times ({', '.join(options.label)}), but a "
            "model has one binary label; prepare the rows once for each, and leave the others out "
            f"of its features with columns: {{{options.label[-1]}: drop}}"
        )
    given = {"label": options.label and options.label[0], "weight": options.weight}
    given["positive"] = options.positive
    given |= {"ids": options.ids, "min_count": options.min_count}
    content |= {name: value for name, value in given.items() if value is not None}

    # The split.
    split: dict[str, str] = {}
    if options.split is not None:
        if len(options.split) != 3:
            raise ValueError(f"--split has {len(options.split)} values; give train, val and test")
        split |= dict(zip(("train", "val", "test"), options.split, strict=True))
    if options.split_by is not None:
        split["by"], _, column = options.split_by.partition(":")
        split |= {"column": column} if column else {}

    # Next to those of the file, which is checked later.
    for name, values in (("split", split), ("columns", options.columns)):
        if values and isinstance(there := content.get(name) or {}, dict):
            content[name] = there | values
    return content


def print_summary(output: Path, meta: Meta, began: float) -> None:
    """Print what a preparation made since ``began``, as :func:`time.perf_counter` has it."""
    for name, part in meta.splits.items():
        share = f", {part.positives / part.rows:.2%} positive" if part.rows else ""
        print(f"{name:5} {part.rows:>13,} rows{share}")

    transform, options = output / TRANSFORM_FILE, output / OPTIONS_FILE
    scalings = read_json(transform)["scalings"] if transform.is_file() else {}
    for kind in sorted({scaling["transform"] for scaling in scalings.values()}):
        names = [name for name in scalings if scalings[name]["transform"] == kind]
        names = [name for name in names if name in meta.dense]
        print(f"{kind:8} {len(names):>10,} numbers: {printable(listing(names, 50))}")
    rated = [names for names in map(rate_names, meta.tables) if names[1] in meta.dense]
    counts = sum(count in meta.dense for count, _ in rated)
    if counts < len(rated):
        print(f"counts   {counts:>10,} of {len(rated):,} kept: the others explain no more labels")
    known = [column.cardinality for column in meta.categorical if column.cardinality < HASHED]
    hashed = len(meta.categorical) - len(known)
    more = f", hashed in {hashed}" if hashed else ""
    print(f"ids   {sum(known):>13,} in {len(known):,} columns{more}")

    bad = read_json(output / BAD_ROWS_FILE)
    if bad["skipped"]:
        kinds = printable(", ".join(f"{kind}: {count:,}" for kind, count in bad["kinds"].items()))
        print(f"skipped {bad['skipped']:,} ({kinds}); the first are in {output / BAD_ROWS_FILE}")

    seconds, peak = time.perf_counter() - began, peak_process_memory()
    rate = sum(part.rows for part in meta.splits.values()) / seconds
    memory = "" if peak is None else f", peak memory {peak / 1e9:.2f} GB"
    where = f"{output} (options in {options})" if options.is_file() else str(output)
    print(f"{seconds:.1f} s, {rate:,.0f} rows/s{memory}: {where}")


def _later_rows(
    inputs: list[str], ids_of: Path, content: dict[str, Any], config: Path | None
) -> tuple[list[RawFile], ColumnPlan]:
    """The files and the plan of rows with the ids of ``ids_of``."""
    if others := [name for name in content if name != "split"]:
        raise ValueError(
            f"{', '.join(others)}: with --ids-of, only the split is given; everything else is as "
            f"{ids_of} was prepared"
        )
    split = content.get("split") or {"train": "0", "val": "0", "test": "1"}
    options = validate(TableOptions, {"split": split}, f"{config}: " if config else "")
    files, plan, left_out = open_later_rows(inputs, ids_of, options.split)
    for name in left_out:
        print(f"note: column {printable(name)} is left out, {ids_of} was prepared without it")
    return files, plan


def _parser() -> Parser:
    parser = Parser(__doc__, epilog=EPILOG)
    add = parser.add_argument

    # The rows, and a file with options.
    add("inputs", nargs="+", metavar="INPUT", help="files, directories or patterns")
    add("--config", metavar="FILE", type=path_arg, help="options in YAML (default: none)")

    # The columns that no feature is made of.
    label = "column to predict, one binary label: 0 and 1, or a comparison that says what counts "
    label += "as 1, such as 'rating >= 4' or 'status == paid' (default: label)"
    add("--label", action="append", metavar="COLUMN", help=label)
    positive = "a value of the label that counts as 1; its one other value counts as 0. Repeat it "
    positive += "for more (default: 1 or true)"
    add("--positive", action="append", metavar="VALUE", help=positive)
    add("--weight", metavar="COLUMN", help="column of sample weights (default: none)")
    columns = "what columns are, in YAML, such as '{zip: category, row_id: drop}' (default: found)"
    add("--columns", metavar="YAML", type=_columns_arg, help=columns)

    # Which rows are trained on, and the ids of their values.
    shares = "the shares of train, val and test (default: 0.8 0.1 0.1; with --ids-of 0 0 1)"
    add("--split", nargs="+", metavar="SHARE", help=shares)
    way = "rows: in the order of the rows. days: the same, by whole files, as with --criteo. "
    way += "random. time:COLUMN: earlier rows for training. "
    way += "column:COLUMN: its values are train, val and test (default: rows)"
    add("--split-by", metavar="WAY", help=way)
    ids = "vocabulary: contiguous ids of the values of the training rows. hash: 64-bit hashes "
    ids += "of the values, for dlrm train --emb dynamic; later rows need no --ids-of "
    ids += "(default: vocabulary)"
    add("--ids", choices=("vocabulary", "hash"), help=ids)
    rare = "values that occur fewer than N times in the training rows share the id of unseen ones "
    rare += "(default: 1)"
    add("--min-count", type=count_arg, metavar="N", help=rare)

    dry = "print what each column is, as a table and as YAML for --config, and stop"
    add("--dry-run", action="store_true", help=dry)
    add_shared(parser)
    return parser


def _columns_arg(text: str) -> dict[str, Any]:
    """The ``type`` of an option that is a mapping, in YAML."""
    try:
        columns = parse_yaml(text)
    except ValueError as error:
        raise ArgumentTypeError(f"is {text!r}: {error}") from None
    if not isinstance(columns, dict):
        raise ArgumentTypeError(f"is {text!r}, it must be as in '{{row_id: drop}}'")
    return columns


def _prepared_arg(text: str) -> Path:
    """The ``type`` of an option that is a prepared directory, or a run, which has one."""
    path = path_arg(text)
    of_run = path / PREPARATION
    return of_run if of_run.is_dir() else path


def add_shared(parser: Parser) -> None:
    """Add the options that all preparations have."""
    add = parser.add_argument
    add("--output", metavar="DIR", type=path_arg, required=True, help="directory to write to")
    add("--workers", type=count_arg, metavar="N", help="threads (default: one per core)")

    # Bad rows, and data that is there already.
    bad = "stop: end with an error at the first bad row. skip: prepare the other rows as if bad "
    bad += "ones were not there, count these by kind and report the first 20; more than half of "
    bad += "all is an error. skip-all: any number. A damaged file is always an error, since rows "
    bad += "before the damage may be wrong too (default: stop)"
    add("--bad-rows", choices=("stop", "skip", "skip-all"), default="stop", help=bad)
    overwrite = "replace what was prepared in DIR from other inputs or with other options, which "
    overwrite += "changes the ids under the runs that were trained on it (default: no)"
    add("--overwrite", action="store_true", help=overwrite)

    # Rows that get the ids of earlier ones.
    ids_of = "give rows the ids and the scaling of a prepared directory or a run, so that its "
    ids_of += "models can score them or train on them; other values get its id of unseen ones "
    ids_of += "(default: new ids)"
    add("--ids-of", metavar="DIR", type=_prepared_arg, help=ids_of)
    append = "with --ids-of: values of the training rows that DIR does not list get ids after its "
    append += "own, so that a model trained on it can be trained on (dlrm train --init_from) with "
    append += "rows for them (default: no)"
    add("--append-new", action="store_true", help=append)
    forget = "with --append-new: new values first get the ids of values that the training rows of "
    forget += "the last K preparations, this one included, did not have; these then count as "
    forget += "unseen (default: none is forgotten)"
    add("--forget", type=count_arg, metavar="K", help=forget)
