"""Command line and YAML to a checked configuration; every mistake is reported at once."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from dlrm.config.build import optimizer_specs
from dlrm.config.dry_run import describe
from dlrm.config.help import print_help
from dlrm.config.options import Option, option_schema, type_name, typed_value
from dlrm.config.schema import RENAMED, OptimConfig, RunConfig
from dlrm.data.days import first_day
from dlrm.sparse_arch.table_plan import AUTO, options_of_table, parse_bytes
from dlrm.utils.device import is_out_of_memory, pick_device
from dlrm.utils.documents import read_yaml, shown
from dlrm.utils.messages import did_you_mean, print_error, require_local
from dlrm.utils.shipped import shipped
from dlrm.utils.validation import mistakes

MAX_PROBLEMS = 20
"""Number of mistakes that are printed."""

PRINT = "print_config"


def parse(argv: Sequence[str], kinds: Mapping[str, type]) -> tuple[RunConfig, str]:
    """Read a run's configuration from the command line and the YAML file of ``--config``.

    Args:
        argv: arguments without the program's name. They override the options in the file. Dashes
            and underscores in names are the same.
        kinds: embedding kinds by name; their ``options()`` become ``--<kind>.<option>``.

    Returns:
        The configuration, and all its options as YAML that ``--config`` reads back.

    Raises:
        SystemExit: with status 2 after printing every mistake; with 0 after ``--help``,
            ``--print_config`` and ``--dry_run``.
        ValueError, OSError: ``--dry_run`` found no data, or data that does not fit.
    """
    if print_help(argv):
        raise SystemExit(0)
    try:
        config, resolved = check(argv, kinds)
    except Mistakes as error:
        _print_problems(error.problems)
        raise SystemExit(2) from None

    if any(name == PRINT for name, _ in _tokens(argv, [])):
        print(resolved, end="")
        raise SystemExit(0)
    if config.dry_run:
        print(describe(config))
        raise SystemExit(0)
    return config, resolved


class Mistakes(ValueError):
    """Mistakes in a configuration: ``problems``, each in one line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = list(dict.fromkeys(problems))  # each once, however many tables have it
        super().__init__("; ".join(self.problems[:MAX_PROBLEMS]))


def check(
    argv: Sequence[str],
    kinds: Mapping[str, type],
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[RunConfig, str]:
    """The configuration of a command line, without its actions such as ``--help``.

    Args:
        argv, kinds: see :func:`parse`.
        keywords: more options, by name or by group, as a YAML file has them; they come last.

    Raises:
        Mistakes: there are mistakes.
    """
    # Each option with the value that was given last.
    schema = option_schema(kinds)
    given: dict[str, Any] = {}
    problems: list[str] = []
    in_files = _given(argv, schema, problems)
    for name, value, source in chain(in_files, _from_mapping("", keywords, schema, problems)):
        try:
            require_local(value)
        except ValueError as error:
            problems.append(f"{source}: {error}")
            continue
        try:
            given[name] = typed_value(schema[name], value)
        except ValueError:
            wanted = type_name(schema[name].type)
            problems.append(f"{source} is {shown(value)}, it must be {wanted}")

    # A run that follows days begins with the first one.
    if given.get("follow"):
        data = given.get("data")
        try:
            given["data"] = first_day(given["follow"], None if data == RunConfig.data else data)
        except (OSError, ValueError) as error:
            problems.append(str(error))

    config = _build(schema, given, kinds, problems)
    if config is None or problems:
        raise Mistakes(problems)

    if not config.resume:  # else the kinds are those of the run's own file
        _note_idle(argv, config, kinds)
    return config, _resolved(schema, given)


def _print_problems(problems: list[str]) -> None:
    for problem in problems[:MAX_PROBLEMS]:
        print_error(f"error: {problem}")
    if (more := len(problems) - MAX_PROBLEMS) > 0:
        print(f"error: {more:,} more mistakes", file=sys.stderr)
    print("See --help for every option; nothing was started.", file=sys.stderr)


def resumed_path(argv: Sequence[str]) -> str | None:
    """The value of ``--resume``; the options of that run apply as well."""
    found = [values for name, values in _tokens(argv, []) if name == "resume"]
    return " ".join(found[-1]) if found and found[-1] else None  # the last one wins


def refuse_with_resume(argv: Sequence[str], resume: str | None) -> None:
    """If a run is resumed, refuse options that it takes from its own configuration.

    Raises:
        ValueError: there are such options.
    """
    if not resume:
        return
    given = {name for name, _ in _tokens(argv, [])}
    wrong = [f"--{name}" for name in ("config", "init_from", "name", "output") if name in given]
    if wrong:
        raise ValueError(f"--resume takes {', '.join(wrong)} from the run: remove it here")


def _tokens(argv: Sequence[str], problems: list[str]) -> list[tuple[str, list[str]]]:
    """The options of a command line in their order, each with its values."""
    options: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            options.append((name.replace("-", "_"), [value] if equals else []))
        elif options:
            options[-1][1].append(token)
        else:
            problems.append(f"unexpected {token!r}: options are written --name value")
    return options


def _given(
    argv: Sequence[str], schema: Mapping[str, Option], problems: list[str]
) -> Iterator[tuple[str, Any, str]]:
    """Name, value and source of each option in the YAML file, then on the command line."""
    options = _tokens(argv, problems)
    resumed = any(name == "resume" for name, _ in options)  # the file is that of the run
    for name, values in options:
        if name == "config" and "".join(values):
            yield from _from_file(" ".join(values), schema, problems, saved=resumed)
        elif name == "config":
            problems.append("--config needs a value: a YAML file")

    # The command line comes last, so that it overrides the file.
    for name, values in options:
        if name == PRINT and values:
            problems.append(f"--{PRINT} takes no value, got {' '.join(values)}")
        if name in ("config", PRINT):
            continue
        if name not in schema:
            problems.append(f"unknown option --{name}{_suggestion(name, schema)}")
        elif not values and schema[name].type is not bool:
            problems.append(f"--{name} needs a value: {_value_of(schema[name])}")
        elif len(values) > 1 and schema[name].is_text:
            text = " ".join(values)
            problems.append(f"--{name} takes one value, got {len(values)}: write '{text}'")
        else:
            value = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
            yield name, value if values else "true", f"--{name}"


def _value_of(option: Option) -> str:
    """The value that an option needs: its type; for a text, as the help begins."""
    if not option.is_text:
        return type_name(option.type)
    text = option.help.partition(". ")[0].rstrip(" ,.")
    return text[:1].lower() + text[1:]


def _from_file(
    path: str, schema: Mapping[str, Option], problems: list[str], saved: bool
) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, value and source of each option in a YAML file; ``saved``: of a run."""
    # A file that can't be used is one mistake; the options of the command line are still checked.
    try:
        require_local(path)
        content = read_yaml(find_config(path))
    except OSError as error:
        problems.append(f"--config {path} can't be read: {error}")
        return
    except ValueError as error:  # its message says so
        problems.append(f"--config {error}")
        return
    if not isinstance(content, dict):
        problems.append(f"--config {path} must hold options as name: value")
        return

    yield from _from_mapping(f"{path}: ", content, schema, problems, saved)


def _from_mapping(
    where: str,
    content: Mapping[Any, Any],
    schema: Mapping[str, Option],
    problems: list[str],
    saved: bool = False,
) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, value and source of each option; groups are mappings of options.

    The file of a run names all options of the version that wrote it. Those that have another name
    since get it, and those that are gone are left out, with a note.
    """
    entries = [(str(name), value) for name, value in content.items()]
    while entries:
        name, value = entries.pop(0)
        if saved and name in RENAMED:
            name = RENAMED[name]
        if name in schema:
            yield name, value, f"{where}{name}"
        elif isinstance(value, dict) and any(key.startswith(f"{name}.") for key in schema):
            entries[:0] = [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif any(key.startswith(f"{name}.") for key in schema):
            problems.append(f"{where}{name} is {shown(value)}, it must hold options as name: value")
        elif saved:
            print_error(
                f"note: {where}this version has no option {name}, which is left out: if the run "
                "needs it, resume with the version that wrote the run"
            )
        else:
            problems.append(f"{where}unknown option {name}{_suggestion(name, schema)}")


def find_config(path: str) -> Path:
    """The file of ``--config``: a path, or else the name of a configuration of this package.

    Raises:
        FileNotFoundError: there is neither.
    """
    given = Path(path)
    if given.exists():
        return given
    there = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    if given.stem not in there or given.parent.name not in ("", "configs"):
        raise FileNotFoundError(f"there is no such file{did_you_mean(given.stem, there)}")
    return there[given.stem]


def _suggestion(name: str, schema: Mapping[str, Option]) -> str:
    """The new name of an unknown option, or a similar one."""
    if name in RENAMED:
        return f": it is called --{RENAMED[name]} now"
    match = [full for full in schema if full.rpartition(".")[2] == name]
    match = match or difflib.get_close_matches(
        name.lower(), [*schema, "config", "help", PRINT], n=1
    )
    return f", did you mean --{match[0]}?" if match else "; --help lists all"


def _build(
    schema: Mapping[str, Option],
    given: Mapping[str, Any],
    kinds: Mapping[str, type],
    problems: list[str],
) -> RunConfig | None:
    """The configuration, in which every mistake is looked for; None if it can't be made."""
    values = {name: given.get(name, option.default) for name, option in schema.items()}
    options = _nested({n: v for n, v in values.items() if n.partition(".")[0] not in kinds})
    methods = _methods(given, kinds, values["model.embedding_dim"], problems)

    # Names of kinds, which depend on what is installed.
    named = {"--emb": values["emb"]}
    named |= {f"--tables.kinds {t}": kind for t, kind in values["tables.kinds"].items()}
    for source, kind in named.items():
        valid = [*kinds, AUTO] if source == "--emb" else [*kinds]
        if kind not in valid:
            problems.append(f"{source} is {kind!r}{did_you_mean(kind.lower(), valid)}")
    if values["emb"] == AUTO and values["budget"] is None:
        problems.append("--emb auto needs a budget: set --budget 20MB or --budget 100x")

    for name, check in (("budget", _check_budget), ("device", pick_device)):
        try:
            check(values[name])
        except ValueError as error:
            problems.append(str(error))

    # Types, ranges and what excludes each other. The rules of the optimizers check their options.
    try:
        optimizer_specs(OptimConfig(**options["optim"]))
    except ValidationError:
        pass  # reported below
    except ValueError as error:
        problems.append(f"--optim: {error}")
    try:
        return RunConfig(**options, methods=methods)
    except ValidationError as error:
        problems += [f"--{mistake}" for mistake in mistakes(error, RunConfig)]
        return None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by full name as a mapping for each group."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        group, _, leaf = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[leaf] = value
    return nested


def _check_budget(text: str | None) -> None:
    if text is not None:
        try:
            parse_bytes(text, 0)
        except ValueError as error:
            raise ValueError(f"--budget: {error}") from None


def _note_idle(argv: Sequence[str], config: RunConfig, kinds: Mapping[str, type]) -> None:
    """Print which options on the command line belong to kinds that no table has."""
    idle = kinds.keys() - {config.emb, *config.tables.kinds.values()}
    for name, _ in _tokens(argv, []):
        kind, dot, _ = name.partition(".")
        if dot and kind in idle:
            print_error(f"note: --{name} has no effect, no table is of kind {kind}")


def _methods(
    given: Mapping[str, Any], kinds: Mapping[str, type], dim: int, problems: list[str]
) -> dict[str, dict[str, Any]]:
    """The options of each kind that differ from the default, each tried out on a small table."""
    methods: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for full, value in given.items():
        kind, _, name = full.partition(".")
        if kind not in kinds or value == kinds[kind].options()[name].default:  # type: ignore[attr-defined]
            continue  # the file of a run lists the defaults too
        methods[kind][name] = value
    for kind, options in methods.items():
        for name, value in options.items():
            for table, single in (value if isinstance(value, dict) else {"default": value}).items():
                why = _refusal(kinds[kind], dim, {name: single})
                # Some options are valid only together, such as d and q of tt.
                if why and _refusal(kinds[kind], dim, options_of_table(table, options)):
                    problems.append(f"--{kind}.{name} {single}: {why}")
    return methods


def _refusal(kind: type, dim: int, options: Mapping[str, Any]) -> str:
    """Why a kind refuses these options; empty if it takes them."""
    try:
        kind([1], dim, **options)
    except ValueError as error:
        return str(error)
    except (RuntimeError, MemoryError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        return "there is not enough memory for that; lower it"
    return ""


def _resolved(schema: Mapping[str, Option], given: Mapping[str, Any]) -> str:
    """All options with their values as nested YAML."""
    values = {name: given.get(name, option.default) for name, option in schema.items()}
    for name in ("resume", "dry_run"):  # not part of the configuration
        del values[name]
    lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return yaml.safe_dump(_nested(lists), sort_keys=False)
