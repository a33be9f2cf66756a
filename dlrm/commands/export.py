"""Export a trained model to a directory that does not need this package."""

from __future__ import annotations

from argparse import Namespace

from dlrm.export.delta import export_delta
from dlrm.export.directory import ExportOptions, export_run
from dlrm.export.programs import DEVICES, has_compiler
from dlrm.export.rows import PRECISIONS
from dlrm.utils.program import Parser, add_run, exit_status, path_arg

EPILOG = """\
OUTPUT gets the weights as safetensors, the model as a program for torch.export.load, compiled
programs for C++ and Python, a reader of raw rows, and manifest.json. docs/export.md shows how to
load it.

Examples:
  dlrm export runs/mine exported
  dlrm export runs/mine exported --tables int8
  dlrm export runs/mine exported --emb auto --budget 100x
  dlrm export runs/mine exported --compile cpu cuda --onnx
  dlrm export runs/tuesday delta --delta-from exported
"""


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__, epilog=EPILOG)
    add = parser.add_argument
    add_run(parser)
    add("output", metavar="OUTPUT", type=path_arg, help="directory to make")

    # How the tables are stored.
    tables = "number format of the rows of tables (default: fp32, or what --emb auto chose)"
    add("--tables", choices=PRECISIONS, help=tables)
    add("--emb", metavar="KIND", help="compress the trained tables by this kind, or by auto")
    add("--budget", help="memory for all tables, with --emb: 20MB, or 100x")

    # The programs, or a delta.
    programs = "compile ahead of time for machines like this one; without a name, for none "
    programs += "(default: cpu, if there is a C++ compiler)"
    add("--compile", nargs="*", choices=DEVICES, help=programs)
    add("--onnx", action="store_true", help="also write ONNX (default: no)")
    delta = "export only what changed since EXPORT, for dlrm apply; number format and compiled "
    delta += "programs are those of EXPORT"
    add("--delta-from", metavar="EXPORT", type=path_arg, help=delta)

    # The source.
    data = "prepared data of the run, if the run has no copy of its preparation (default: the "
    data += "data of its configuration)"
    add("--data", type=path_arg, help=data)
    return parser


def export(options: Namespace) -> None:
    """Export the model."""
    if options.delta_from is not None and options.compile is not None:
        raise ValueError(
            "--compile: with --delta-from, the same programs are compiled as before: leave it out"
        )

    compiled = options.compile
    if compiled is None:
        compiled = ["cpu"] if has_compiler() else []
        if not compiled and options.delta_from is None:
            print("note: nothing is compiled ahead of time, which needs a C++ compiler such as g++")

    chosen = ExportOptions(
        tables=options.tables,
        emb=options.emb,
        budget=options.budget,
        devices=tuple(dict.fromkeys(compiled)),
        onnx=options.onnx,
        last=options.last,
        data=options.data,
    )

    if options.delta_from is not None:
        export_delta(options.checkpoint, options.output, options.delta_from, chosen)
    else:
        export_run(options.checkpoint, options.output, chosen)
    print(f"exported to {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: export(options), "interrupted; nothing was written")
