"""Command line and YAML to a checked configuration; every mistake reported at once.

And what follows from the configuration and the data: the recipe of the model.
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse as parse_docstring
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser

from dlrm.config.schema import RunConfig
from dlrm.sparse_arch.table_plan import AUTO, TablePlan, options_of_table, parse_bytes
from dlrm.utils.device import is_out_of_memory, pick_device
from dlrm.utils.messages import did_you_mean


@dataclass(frozen=True)
class Option:
    """One option of the command line."""

    type: Any
    default: Any
    help: str


def parse(argv: Sequence[str], kinds: Mapping[str, type]) -> tuple[RunConfig, str]:
    """Read a run's configuration from the command line and the YAML file it may name.

    Args:
        argv: arguments without the program's name. ``--config FILE`` sets what the other options
            then override; dashes and underscores in names are the same.
        kinds: embedding kinds by name; their ``options()`` become ``--<kind>.<option>``.

    Returns:
        The configuration, and the same resolved as YAML that ``--config`` reads back.

    Raises:
        SystemExit: with status 2 after printing every mistake; with 0 after ``--help``.
    """
    schema = _schema(kinds)
    parser = _parser(schema)
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        raise SystemExit(0)
    given: dict[str, Any] = {}
    problems: list[str] = []
    for name, value, source in _given(argv, schema, problems):
        try:
            given[name] = _typed(parser, schema, name, value)
        except ArgumentError:
            wanted = _type_name(schema[name].type)
            problems.append(f"{source} is {value!r}, it must be {wanted}")
    config = _build(schema, given, kinds, problems)
    if config is None or problems:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        print("See --help for every option; nothing was started.", file=sys.stderr)
        raise SystemExit(2)
    if not config.resume:  # else the run's own file says which kinds there are
        _note_idle(argv, config, kinds)
    return config, _resolved(schema, given)


def resumed(arguments: Sequence[str]) -> str | None:
    """The value of ``--resume``, whose run has the options that all others are to fit."""
    found = None  # of several the last counts, as of any option
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name == "--resume":
            found = value if equals else following if not following.startswith("--") else None
    return found


def require_own(arguments: Sequence[str]) -> None:
    """Refuse options that would be taken for something beside ``--resume``.

    Raises:
        ValueError: there are such.
    """
    names = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    idle = [
        f"--{name}" for name in ("config", "init_from", "name", "output") if f"__{name}" in names
    ]
    if idle:
        raise ValueError(f"--resume goes on with the run's own {', '.join(idle)}: leave that out")


def _schema(kinds: Mapping[str, type]) -> dict[str, Option]:
    """Every option by its full name, from the dataclasses and the kinds' constructors."""
    schema: dict[str, Option] = {}

    def add(cls: type, prefix: str) -> None:
        hints = get_type_hints(cls)
        texts = {p.arg_name: p.description or "" for p in parse_from_object(cls).params}
        for field in fields(cls):
            if is_dataclass(hints[field.name]):
                add(hints[field.name], f"{field.name}.")
            elif field.name != "methods":
                default = (
                    field.default if field.default_factory is MISSING else field.default_factory()
                )
                schema[prefix + field.name] = Option(hints[field.name], default, texts[field.name])

    add(RunConfig, "")
    emb = schema["emb"]
    schema["emb"] = Option(
        emb.type, emb.default, f"{emb.help} One of: {', '.join([*sorted(kinds), AUTO])}."
    )
    for kind, cls in kinds.items():
        options: Mapping[str, inspect.Parameter] = cls.options()  # type: ignore[attr-defined]
        hints = get_type_hints(cls.__init__)  # type: ignore[misc]
        docs = parse_docstring(inspect.getdoc(cls) or "").params
        texts = {p.arg_name: p.description or "" for p in docs}
        for name, option in options.items():
            own = hints[name]
            if name in cls.per_table:  # type: ignore[attr-defined]
                # A list, one for each table of a group, is for code: here tables have names.
                own = Union[tuple(a for a in get_args(own) if get_origin(a) is not list)]  # noqa: UP007
            schema[f"{kind}.{name}"] = Option(
                own | dict[str, own],  # type: ignore[valid-type]
                option.default,
                texts.get(name, ""),
            )
    return schema


def _parser(schema: Mapping[str, Option]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="train.py",
        usage="%(prog)s [--config FILE] [--emb KIND] [--OPTION VALUE ...]",
        description="Train a DLRM whose sparse architecture is swapped by one flag. Options of a "
        "kind may differ by table: --tt.rank '{C3: 64, default: 16}'.",
        exit_on_error=False,
    )
    parser.add_argument("--config", help="YAML file with options; those given here override it.")
    groups = {name.partition(".")[0]: None for name in schema if "." in name}
    made = {group: parser.add_argument_group(f"--{group}.*") for group in groups}
    for name, option in schema.items():
        group = made.get(name.partition(".")[0], parser) if "." in name else parser
        text = " ".join(option.help.replace("``", "").split())
        made_of = {"type": option.type, "default": option.default, "help": text}
        action = group.add_argument(f"--{name}", **made_of)
        action.option_strings = [f"--{name}"]  # lists have a second, to append, unknown here
    return parser


def _given(
    argv: Sequence[str], schema: Mapping[str, Option], problems: list[str]
) -> Iterator[tuple[str, Any, str]]:
    """Name, value and origin of every option set by the YAML file and then the command line."""
    groups: list[list[str]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            groups.append([name.replace("-", "_"), *([value] if equals else [])])
        elif groups:
            groups[-1].append(token)
        else:
            problems.append(f"unexpected {token!r}: options are written --name value")
    for name, *values in groups:
        if name == "config" and "".join(values):
            yield from _from_file(" ".join(values), schema, problems)
        elif name == "config":
            problems.append("--config needs a value: a YAML file")
    for name, *values in groups:
        if name == "config":
            continue
        if name not in schema:
            problems.append(f"unknown option --{name}{_did_you_mean(name, schema)}")
        elif not values and schema[name].type is not bool:
            problems.append(f"--{name} needs a value: {_type_name(schema[name].type)}")
        elif len(values) > 1 and schema[name].type in (str, str | None):
            told = " ".join(values)
            problems.append(f"--{name} takes one value, here are {len(values)}: write '{told}'")
        else:
            value = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
            yield name, value if values else "true", f"--{name}"


def _from_file(
    path: str, schema: Mapping[str, Option], problems: list[str]
) -> Iterator[tuple[str, Any, str]]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:  # of a date that is none, too
        problems.append(f"--config {path} can't be read: {' '.join(str(error).split())}")
        return
    if not isinstance(content, dict):
        problems.append(f"--config {path} must hold options as name: value")
        return
    entries = [(str(name), value) for name, value in content.items()]
    while entries:
        name, value = entries.pop(0)
        if name in schema:
            yield name, value, f"{path}: {name}"
        elif isinstance(value, dict) and any(key.startswith(f"{name}.") for key in schema):
            entries[:0] = [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif any(key.startswith(f"{name}.") for key in schema):
            problems.append(f"{path}: {name} is {value!r}, it must hold options as name: value")
        else:
            problems.append(f"{path}: unknown option {name}{_did_you_mean(name, schema)}")


def _did_you_mean(name: str, schema: Mapping[str, Option]) -> str:
    match = [full for full in schema if full.rpartition(".")[2] == name]
    match = match or difflib.get_close_matches(name.lower(), [*schema, "config", "help"], n=1)
    return f", did you mean --{match[0]}?" if match else "; --help lists all"


def _typed(parser: ArgumentParser, schema: Mapping[str, Option], name: str, value: Any) -> Any:
    """``value`` as the option's type; a lone value is a list of one where a list is wanted."""
    if isinstance(value, dict | list) and schema[name].type in (str, str | None):
        raise ArgumentError(None, f"{name} must be text")
    try:
        plain = isinstance(value, str | date)
        text = str(value) if plain else json.dumps(value, default=str)
    except (TypeError, ValueError) as error:  # names that are no text, values inside themselves
        raise ArgumentError(None, str(error)) from None
    try:
        typed = parser.parse_args([f"--{name}={text}"])[name]
    except ArgumentError:
        typed = parser.parse_args([f"--{name}=[{text}]"])[name]
    # Tables may be named 0, 1, 2, which YAML takes for numbers.
    return {str(table): own for table, own in typed.items()} if isinstance(typed, dict) else typed


def _type_name(annotation: Any) -> str:
    """``int or a mapping of tables to int`` rather than ``int | dict[str, int]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is dict:
        return f"a mapping of tables to {_type_name(arguments[1])}, as in {{C3: ..., C12: ...}}"
    if origin in (tuple, list):
        return f"a list, each {_type_name(arguments[0])}"
    if arguments:
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        annotation, str(annotation)
    )


def _build(
    schema: Mapping[str, Option],
    given: Mapping[str, Any],
    kinds: Mapping[str, type],
    problems: list[str],
) -> RunConfig | None:
    """The dataclasses, each checking itself; None if any found a mistake."""
    values = {name: given.get(name, option.default) for name, option in schema.items()}
    hints = get_type_hints(RunConfig)
    parts: dict[str, Any] = {}
    for field in fields(RunConfig):
        group = hints[field.name]
        if is_dataclass(group):
            own = {f.name: values[f"{field.name}.{f.name}"] for f in fields(group)}
            try:
                parts[field.name] = group(**own)  # type: ignore[operator]
            except ValueError as error:
                problems.append(f"--{field.name}: {error}")
        elif field.name != "methods":
            parts[field.name] = values[field.name]
    parts["methods"] = _methods(given, kinds, values["model.embedding_dim"], problems)
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
    try:
        return RunConfig(**parts)
    except ValueError as error:
        problems.append(f"--{error}".replace("; ", "; --"))
        return None


def _check_budget(text: str | None) -> None:
    if text is not None:
        try:
            parse_bytes(text, 0)
        except ValueError as error:
            raise ValueError(f"--budget: {error}") from None


def _note_idle(argv: Sequence[str], config: RunConfig, kinds: Mapping[str, type]) -> None:
    """Say which options on the command line are of kinds that no table has."""
    used = {config.emb, *config.tables.kinds.values()}
    for token in argv:
        kind, dot, _ = token.removeprefix("--").partition(".")
        if dot and token.startswith("--") and kind in kinds.keys() - used:
            option = token.partition("=")[0]
            print(f"note: {option} changes nothing, no table is of kind {kind}", file=sys.stderr)


def note_budgeted(config: RunConfig, chosen: TablePlan) -> None:
    """Say which options of the kind that was asked for none of its tables has: a budget chose."""
    own = [options for kind, options in chosen if kind == config.emb]
    for name, value in config.methods.get(config.emb, {}).items():
        if config.budget and own and all(options.get(name) != value for options in own):
            option = f"--{config.emb}.{name}"
            print(f"note: {option} changes nothing, it follows from --budget", file=sys.stderr)


def _methods(
    given: Mapping[str, Any], kinds: Mapping[str, type], dim: int, problems: list[str]
) -> dict[str, dict[str, Any]]:
    """The options of each kind that differ from the default, each tried out on a small table."""
    methods: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for full, value in given.items():
        kind, _, name = full.partition(".")
        if kind not in kinds or value == kinds[kind].options()[name].default:  # type: ignore[attr-defined]
            continue  # so that a resolved configuration, which has them all, means the same
        methods[kind][name] = value
    for kind, options in methods.items():
        for name, value in options.items():
            for table, single in (value if isinstance(value, dict) else {"default": value}).items():
                why = _refusal(kinds[kind], dim, {name: single})
                if why and _refusal(
                    kinds[kind], dim, options_of_table(table, options)
                ):  # as d and q
                    problems.append(f"--{kind}.{name} {single}: {why}")
    return methods


def _refusal(kind: type, dim: int, options: Mapping[str, Any]) -> str:
    """Why a kind does not take these options; nothing if it does."""
    try:
        kind([1], dim, **options)
    except ValueError as error:
        return str(error)
    except (RuntimeError, MemoryError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        return "memory has no room for that; lower it"
    return ""


def _resolved(schema: Mapping[str, Option], given: Mapping[str, Any]) -> str:
    """All options with their values as nested YAML."""
    nested: dict[str, Any] = {}
    for name, option in schema.items():
        if name == "resume":  # what a run went on from is not part of what it is
            continue
        value = given.get(name, option.default)
        value = list(value) if isinstance(value, tuple) else value
        group, dot, leaf = name.partition(".")
        (nested.setdefault(group, {}) if dot else nested)[leaf or group] = value
    return yaml.safe_dump(nested, sort_keys=False)
