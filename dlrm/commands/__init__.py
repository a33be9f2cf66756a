"""The commands of ``dlrm``, most of them in a file of their own: they read what a user gives.

``dlrm train``, ``python -m dlrm train`` and ``python train.py`` are the same function. So are the
other commands and the files of their names in ``scripts/``. Two are programs of ``examples/``,
which need no dlrm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from dlrm import __version__
from dlrm.config.help import print_help
from dlrm.utils import startup
from dlrm.utils.messages import did_you_mean, print_error
from dlrm.utils.shipped import shipped_program

COMMANDS = {
    "prepare": "turn CSV, JSON lines, Parquet, or with --criteo logs of Criteo, into training data",
    "train": "train a model",
    "evaluate": "print the metrics of a trained model",
    "predict": "score rows with a trained model",
    "compare": "compare runs in a table and a plot",
    "export": "export a trained model for programs that do not have this package",
    "apply": "apply a delta of an export, which gives the newer export",
    "serve": "serve an exported model over HTTP",
}
EXAMPLES = {"apply": "apply_delta", "serve": "serve"}
CRITEO = "--criteo"
SERVING = ("starlette", "uvicorn", "prometheus_client")
WITHOUT_PANDAS = ("prepare", "prepare_table", "train", "evaluate", "predict")


def main() -> int:
    """Run ``dlrm COMMAND ...``; returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: dlrm COMMAND ...\n\ncommands:")
        for command, text in COMMANDS.items():
            print(f"  {command:10} {text}")
        print("\ndlrm COMMAND --help lists the options of a command.")
    elif name == "--version":
        print(f"dlrm {__version__}")
    elif name not in COMMANDS:
        print_error(f"error: unknown command {name}{did_you_mean(name, COMMANDS)}")
        return 2
    else:
        sys.argv[:2] = [f"dlrm {name}"]  # as messages name the program
        return run(name)
    return 0


def run(name: str, argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        name: of the command, or a file of this folder.
        argv: its arguments; by default those of this process, which then is the program's own.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    began = startup.begin() if argv is None else 0.0  # before the imports, which take seconds
    if name == "train" and print_help(arguments):
        return 0
    if argv is None and name in ("train", "evaluate"):
        startup.keep_memory()
    if argv is None and name in WITHOUT_PANDAS:
        startup.without_pandas()

    if name in EXAMPLES:
        startup.imported()
        return _run_example(name, arguments)
    if name == "prepare":
        name = "prepare_criteo" if CRITEO in arguments else "prepare_table"
        arguments = [each for each in arguments if each != CRITEO]
    command = import_module(f"dlrm.commands.{name}")
    more = {"began": began} if name == "train" else {}
    return int(command.main(arguments, **more))


def _run_example(name: str, arguments: Sequence[str]) -> int:
    """Run a program of ``examples/``; returns the exit status."""
    try:
        program = shipped_program(EXAMPLES[name])
    except ModuleNotFoundError as error:
        if error.name not in SERVING:
            raise
        print_error(f"error: {error.name} is not installed: pip install 'dlrm[serve]'")
        return 2
    sys.argv[1:] = arguments
    return int(program.main())
