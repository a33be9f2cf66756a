"""Write the predictions of a trained model: ``dlrm predict RUN ROWS OUTPUT``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from dlrm.utils import startup
from dlrm.utils.program import Parser, add_run, add_scoring, exit_status, path_arg

SUFFIXES = (".parquet", ".csv")
EPILOG = """\
ROWS is one of these:
  raw rows of the kind that the model's data was prepared from, with or without a label: rows of
    Criteo as text, or a table as CSV, JSON lines or Parquet; plain or packed; a file, a
    directory of a table, or a pattern in quotes. The run holds all that they need.
  a prepared directory with meta.json, of which --split is scored. It must have been prepared with
    the ids of the model's data.

OUTPUT is Parquet or CSV, by its suffix. It has the columns row (the number of the row in all files,
from 1, without headers; rows that are left out are counted), those that are passed through (by the
preparation, or --keep), probability, and label if the rows have one. It appears when it is
complete.

Examples:
  dlrm predict runs/mine new.csv scores.csv --keep user
  dlrm predict runs/mine 'logs/*.parquet' scores.parquet
  dlrm predict runs/kaggle test.txt scores.parquet --bad-rows skip
  dlrm predict runs/kaggle data/kaggle scores.parquet --split val
"""


def scores_arg(text: str) -> Path:
    """The ``type`` of the output."""
    path = path_arg(text)
    if path.is_dir():
        raise ArgumentTypeError(f"is {text!r}, a directory; name the file to write")
    if path.suffix not in SUFFIXES:
        raise ArgumentTypeError(f"is {text!r}, its name must end in {' or '.join(SUFFIXES)}")
    return path


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__, epilog=EPILOG)
    add = parser.add_argument

    # The model, the rows and the file of scores.
    add_run(parser)
    add("rows", metavar="ROWS", type=path_arg, help="raw rows, or a prepared directory")
    add("output", metavar="OUTPUT", type=scores_arg, help="file to write, .parquet or .csv")
    add("--split", help="split of a prepared directory (default: test)")

    keep = "columns of the rows to copy to the output, such as keys (default: those that the "
    keep += "preparation passes through)"
    add("--keep", nargs="+", default=[], metavar="COLUMN", help=keep)
    bad = "stop: end with an error at the first bad row. skip: leave bad rows out, as the "
    bad += "preparation does; row numbers tell which are there"
    add("--bad-rows", choices=("stop", "skip"), default="stop", help=bad)

    add_scoring(parser, "16384; on a GPU as many as fit well, at most 524288")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    if options.device in ("auto", "cuda"):
        startup.open_gpu()

    from dlrm.commands.scores import write_scores  # with PyTorch, which takes seconds

    return exit_status(lambda: write_scores(options), "interrupted; nothing was written")
