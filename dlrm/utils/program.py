"""Parts that all programs share: types of options, a parser, the exit status."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from dlrm.utils import signals, startup
from dlrm.utils.messages import did_you_mean, print_error, require_local


def count_arg(text: str) -> int:
    """The ``type`` of an option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be a whole number, 1 or more")
    return int(text)


def positive_arg(text: str) -> float:
    """The ``type`` of an option that is a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be a number above 0")
    return value


def path_arg(text: str) -> Path:
    """The ``type`` of an option that is a file or directory.

    An empty path, for example from an unset shell variable, would be the current directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty, it must be a path")
    return Path(text)


def figure_arg(text: str) -> Path:
    """The ``type`` of an option that is the file of a plot."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        message = f"is {text!r}, its name must end in .png, .svg or .pdf"
        raise argparse.ArgumentTypeError(message)
    return Path(text)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keep the layout of the description, and add defaults that the help texts leave out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if isinstance(default, list | tuple):  # as it would be typed
            default = shlex.join(str(value) for value in default if value is not None)
        silent = default in (None, False, "", argparse.SUPPRESS) or "default" in text.lower()
        if silent or not action.option_strings:
            return text
        return f"{text} (default: {str(default).replace('%', '%%')})".lstrip()


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with status 2.

    An unknown option is reported before a missing one, with the most similar option.
    """

    def __init__(self, description: str | None = None, **options: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            **options,
        )

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument; its default is shown even if it has no help text."""
        action = super().add_argument(*names, **options)
        if action.help is None and action.option_strings:
            action.help = _Formatter("")._get_help_string(action)
        return action

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments; the first mistake ends the program."""
        tokens = sys.argv[1:] if args is None else args
        for token in takewhile(lambda token: token != "--", tokens):  # no options follow it
            name, _, value = token.partition("=")
            try:
                require_local(value if name.startswith("--") else token)
            except ValueError as error:
                self.error(str(error))
            if name.startswith("--") and name not in self._option_string_actions:
                options = [option for option in self._option_string_actions if len(option) > 2]
                self.error(f"unknown option {name}{did_you_mean(name, options)}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        print_error(f"error: {message}")
        raise SystemExit(2)


def add_run(parser: Parser) -> None:
    """Add the arguments that name a trained model."""
    add = parser.add_argument
    named = "run directory, whose best checkpoint is taken, or one of its checkpoints/"
    add("checkpoint", metavar="RUN", type=path_arg, help=named)
    last = "take the latest checkpoint of the run, not the best (default: no)"
    add("--last", action="store_true", help=last)


def add_scoring(parser: Parser, batch_size: str) -> None:
    """Add the options of programs that score rows.

    Args:
        parser: of the program.
        batch_size: the default, in words.
    """
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--batch-size", type=count_arg, help=f"samples per batch (default: {batch_size})")
    outside = "read the files that meta.json lists outside of its directory too (default: no)"
    add("--allow-outside", action="store_true", help=outside)


def exit_status(
    work: Callable[[], object],
    interrupted: str | Callable[[], str] = "interrupted",
    report: Callable[[str], object] = print_error,
) -> int:
    """Run a program, and report a mistake in its input, or a signal, in one line.

    Args:
        work: the program.
        interrupted: the line for a signal.
        report: prints a line.

    Returns:
        The exit status: 0; 2 for a mistake; 130, 143 or 129 for SIGINT, SIGTERM or SIGHUP; 141 if
        the reader of the output has gone, as after ``| head``.
    """
    startup.imported()
    try:
        with signals.raised():
            work()
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at the exit
        return 128 + 13
    except (ValueError, OSError) as error:
        report(f"error: {error}")
        return 2
    except KeyboardInterrupt as stop:
        report(interrupted if isinstance(interrupted, str) else interrupted())
        return signals.status_of(stop)
    return 0


def peak_process_memory() -> int | None:
    """Return the peak memory of this process in bytes; None on Windows, which reports none."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
