"""Prepare raw Criteo logs for training: Parquet per split, vocabularies and meta.json."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlrm.commands.prepare_table import add_shared, print_summary
from dlrm.data.criteo import Options, prepare
from dlrm.data.parquet import column_limits
from dlrm.data.prepare.text_blocks import is_unchecked_zstd
from dlrm.data.schema import Meta
from dlrm.utils.messages import listing, print_error
from dlrm.utils.name_order import in_order_of_numbers
from dlrm.utils.program import Parser, exit_status, path_arg
from dlrm.utils.validation import validate

EPILOG = """\
Input: tab-separated lines of label, I1..I13 (numbers, may be empty) and C1..C26 (up to 8 hex
digits, may be empty), as in Kaggle's train.txt or Terabyte's day_0 .. day_23; plain, gzip, bzip2 or
zstd.

Output in DIR: train.parquet, val.parquet and test.parquet (label uint8, I1..I13 float32, C1..C26
int32); vocabulary/C1.parquet .. C26.parquet (value, id, count; the row number is the id; value ""
is a missing value, null stands for all values without their own id); bad_rows.json; and meta.json,
written last. Ids start at 0, in order of falling frequency in the rows of the vocabulary. With
--ids hash, C1..C26 are int64 and the vocabularies are empty.

If the program is killed, start it again with the same options: it continues, and the output has the
same bytes. While it runs, DIR/.prepare takes up to 180 bytes per row, including the output.

Examples:
  dlrm prepare --criteo train.txt --output data/kaggle
  dlrm prepare --criteo train.txt --output data/kaggle_ref --vocabulary all
  dlrm prepare --criteo sample.tsv.gz --output data/sample --split 0.85 0 0.15 --min-count 2
  dlrm prepare --criteo day_{0..23}.gz --output data/terabyte --cap 40000000 --vocabulary all
  dlrm prepare --criteo new.txt --output data/new --ids-of data/kaggle --split 0 0 1
  dlrm prepare --criteo day_0 --output days/00 --ids hash --split 1 0 0
  dlrm prepare --criteo day_1 --output days/01 --ids-of days/00 --split 1 0 0
  dlrm prepare --criteo day_8 --output data/8 --ids-of data/7 --append-new --split 0.9 0.1 0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status, which is 2 for bad input."""
    arguments = vars(_parser().parse_args(argv))
    return exit_status(
        lambda: _prepare(**arguments), "interrupted; run the same command to continue"
    )


def _prepare(
    inputs: list[Path], output: Path, workers: int | None, overwrite: bool, **given: Any
) -> None:
    """Prepare and print a summary."""
    began = time.perf_counter()
    _note_order(inputs)
    if unchecked := next((path for path in inputs if is_unchecked_zstd(path)), None):
        print_error(
            f"note: {unchecked} has no checksums, so damage may not be noticed; zstd --check "
            "writes them"
        )

    ids_of = given["ids_of"] and str(given["ids_of"])
    options = validate(Options, given | {"ids_of": ids_of})
    meta = prepare(inputs, output, options, overwrite=overwrite, workers=workers)

    _note_constant(output, meta)
    print_summary(output, meta, began)


def _note_constant(output: Path, meta: Meta) -> None:
    """Note dense columns from which nothing can be learned, such as those without any number: by
    the statistics in the files, they have the same value in all rows.
    """
    rows = meta.splits["train"].rows
    if rows < 2:
        return
    limits = column_limits(output / "train.parquet", meta.dense)
    if constant := [name for name, found in limits.items() if len(found) == 1]:
        print_error(
            f"note: columns with the same number, or none, in all {rows:,} training rows, of which "
            f"a model learns nothing: {listing(constant)}"
        )


def _note_order(inputs: Sequence[Path]) -> None:
    """Warn if the numbers of files go back: in a shell, ``day_*`` has day_10 before day_2."""
    for one, other in pairwise(inputs):
        (parts, _), (others, _) = map(in_order_of_numbers, (one, other))
        if parts[::2] == others[::2] and parts > others:
            print_error(
                f"note: {one} comes before {other}, but inputs must be in the order of time: in a "
                "shell, day_{0..23} is in the order of numbers, day_* is not"
            )
            return


def _parser() -> Parser:
    parser = Parser(__doc__, epilog=EPILOG)
    add, default = parser.add_argument, Options()

    inputs = "raw files, or patterns such as 'day_*.gz', in the order of time"
    add("inputs", nargs="+", metavar="INPUT", type=path_arg, help=inputs)

    # The rows of each split.
    split = "days: the reference protocol, in which the last day is halved into test and val, and "
    split += "the days before it are for training; a day is a file of which rows are read, or a "
    split += "seventh of the rows if there is only one such file. Or three numbers: the shares of "
    split += "train, val and test, which follow one another in this order (0.85 0 0.15; a share "
    split += "may be 0). Default: days"
    add("--split", nargs="+", default=default.split, metavar="SHARE", help=split)

    # The ids of their values.
    ids = "vocabulary: contiguous ids of the values. hash: the hexadecimal values themselves, for "
    ids += "dlrm train --emb dynamic, without a pass over the rows to number them. Default: "
    ids += "vocabulary"
    add("--ids", choices=("vocabulary", "hash"), default=default.ids, help=ids)
    of = "rows whose values get their own ids. train: the rows of the train split; all other "
    of += "values share an out-of-vocabulary id. all: all rows, as in the reference. Default: train"
    add("--vocabulary", choices=("train", "all"), default=default.vocabulary, help=of)
    rare = "values that occur fewer than N times in the rows of the vocabulary share the "
    rare += "out-of-vocabulary id. Default: 1"
    add("--min-count", type=int, default=default.min_count, metavar="N", help=rare)
    cap = "take the hexadecimal values modulo N before they are counted, as in the reference "
    cap += "(MLPerf: 40000000); a missing value remains a value of its own. Default: no cap"
    add("--cap", type=int, metavar="N", help=cap)

    # The numbers, and how many rows are read.
    dense = "transform of I1..I13; a missing number counts as 0. log1p: log(max(x, 0) + 1), as in "
    dense += "the reference. log3: log(max(x, -2) + 3), as in TorchRec. Default: log1p"
    transforms = ("log1p", "log3")
    add("--dense-transform", choices=transforms, default=default.dense_transform, help=dense)
    limit = "read only the first N lines of the input, counted over all files. Default: all"
    add("--limit", type=int, metavar="N", help=limit)
    add_shared(parser)
    return parser
