"""Run one benchmark on this machine, and write its figures as JSON.

    python scripts/benchmarks/run.py step --output benchmarks/step_h200.json
    python scripts/benchmarks/run.py step --help

Each benchmark is a file in ``scripts/benchmarks/cases/``. A wrong result is an error: its times are
not reported. ``--small`` tries a benchmark out with tiny inputs, on a CPU too.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from dlrm.distributed.world import World
from dlrm.utils.device import pick_device
from dlrm.utils.program import Parser, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks.harness import Record

CASES = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py"))


def load(name: str) -> ModuleType:
    """A benchmark by its name.

    It is a module with ``arguments(parser)``, which adds its options; ``measure(options, record)``;
    ``SMALL``, the options of ``--small``; and ``NEEDS_GPU``, if it measures nothing else.
    """
    return importlib.import_module(f"scripts.benchmarks.cases.{name}")


def parser_of(name: str) -> Parser:
    """The command line of a benchmark."""
    case = load(name)
    parser = Parser(case.__doc__, prog=f"run.py {name}")
    parser.add_argument("--output", type=path_arg, help="JSON file to write (default: print only)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--small", action="store_true", help=f"try it out: {case.SMALL}")
    case.arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    chooser = Parser(__doc__)
    chooser.add_argument("case", choices=CASES, help="what to measure")
    name = chooser.parse_args(tokens[:1]).case

    case, parser = load(name), parser_of(name)
    small = shlex.split(case.SMALL) if "--small" in tokens else []
    options = parser.parse_args([*tokens[1:], *small])
    needs_gpu = getattr(case, "NEEDS_GPU", False) and not options.small
    if needs_gpu and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU; --small tries it out on a CPU")

    def measure() -> None:
        options.device = str(pick_device(options.device))
        case.measure(options, Record(options.output))

    return exit_status(measure, report=World.from_environment().print_error_once)


if __name__ == "__main__":
    sys.exit(main())
