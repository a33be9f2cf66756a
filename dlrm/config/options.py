"""Every option of the command line, from the dataclasses and the kinds of embeddings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser

from dlrm.config.schema import HOUSEKEEPING, RunConfig, default_dtype
from dlrm.kernels.update.rules import RULES
from dlrm.sparse_arch.table_plan import AUTO
from dlrm.utils.documents import parse_json, parse_yaml

_NULLS = ("null", "Null", "NULL", "~")  # of YAML


@dataclass(frozen=True)
class Option:
    """One option of the command line."""

    type: Any
    default: Any
    help: str


def option_schema(kinds: Mapping[str, type]) -> dict[str, Option]:
    """Every option by its full name.

    Args:
        kinds: embedding kinds by name; the arguments of their constructors are options as well.
    """
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
    valid = ", ".join([*sorted(kinds), AUTO])
    schema["emb"] = Option(emb.type, emb.default, f"{emb.help} One of: {valid}.")
    for name in ("optim.dense", "optim.embeddings"):
        schema[name] = Option(Literal[RULES], schema[name].default, schema[name].help)
    for kind, cls in kinds.items():
        options: Mapping[str, inspect.Parameter] = cls.options()  # type: ignore[attr-defined]
        hints = get_type_hints(cls.__init__)  # type: ignore[misc]
        docs = parse_docstring(inspect.getdoc(cls) or "").params
        texts = {p.arg_name: p.description or "" for p in docs}
        for name, option in options.items():
            own = hints[name]
            if name in cls.per_table:  # type: ignore[attr-defined]
                # Lists, with a value for each table of a group, are for code: here, use names.
                own = Union[tuple(a for a in get_args(own) if get_origin(a) is not list)]  # noqa: UP007
            schema[f"{kind}.{name}"] = Option(
                own | dict[str, own],  # type: ignore[valid-type]
                option.default,
                texts.get(name, ""),
            )
    return schema


def changed_options(options: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The options of a run that change results and differ from their defaults, by full name.

    Args:
        options: nested, as in the ``config.yaml`` of a run; unknown ones, of another version, are
            left out.
        kinds: embedding kinds by name. The options of those that the run has not are left out.
    """
    used = {options.get("emb"), *((options.get("tables") or {}).get("kinds") or {}).values()}
    own_kinds = {kind: cls for kind, cls in kinds.items() if kind in used}
    changed = {}
    for name, option in option_schema(own_kinds).items():
        group, _, leaf = name.rpartition(".")
        own = options.get(group) or {} if group else options
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        if name == "tables.dtype" and own.get(leaf) is not None:  # older runs all name it
            default = default_dtype(str(options.get("emb")), options.get("budget"))
        if name not in HOUSEKEEPING and own.get(leaf, default) != default:
            changed[name] = own[leaf]
    return changed


def make_parser(schema: Mapping[str, Option]) -> ArgumentParser:
    """A parser of single options, which also prints the help."""
    parser = ArgumentParser(
        prog="train.py",
        usage="%(prog)s [--config FILE] [--emb KIND] [--OPTION VALUE ...]",
        description="Train a DLRM whose sparse architecture is swapped by one flag. Options of a "
        "kind may differ by table: --tt.rank '{C3: 64, default: 16}'.",
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", help="YAML file with options. Options on the command line override it."
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="Print all options as YAML, which --config reads, and stop.",
    )
    groups = {name.partition(".")[0]: None for name in schema if "." in name}
    made = {group: parser.add_argument_group(f"--{group}.*") for group in groups}
    for name, option in schema.items():
        group = made.get(name.partition(".")[0], parser) if "." in name else parser
        text = " ".join(option.help.replace("``", "").split())
        kwargs = {"type": option.type, "default": option.default, "help": text}
        action = group.add_argument(f"--{name}", **kwargs)
        action.option_strings = [f"--{name}"]  # jsonargparse adds --NAME+ to append to lists
    return parser


def typed_value(schema: Mapping[str, Option], name: str, value: Any) -> Any:
    """Convert ``value`` to the type of an option; a single value may stand for a list of one.

    Raises:
        ArgumentError: it can't be converted.
    """
    wanted = schema[name].type
    if wanted in (str, str | None) and isinstance(value, dict | list):
        raise ArgumentError(None, f"{name} must be text")
    if wanted is str and value is None:
        raise ArgumentError(None, f"{name} has no value")
    try:
        plain = isinstance(value, str | date)
        text = str(value) if plain else json.dumps(value, default=str)
        text.encode()  # half a character is no text
        if wanted in (str, str | None):
            return None if text in _NULLS and wanted is not str else text
        content = parse_yaml(text)  # within limits, unlike what follows
        if content is None and text not in _NULLS:
            raise ValueError(f"{name} is empty")
    except (TypeError, ValueError) as error:  # keys that are not text
        raise ArgumentError(None, str(error)) from None
    # The time of jsonargparse is quadratic in the number of lists in a mapping.
    if isinstance(content, dict) and any(isinstance(own, list) for own in content.values()):
        return _value_of_each_table(schema, name, content)
    parser = make_parser({name: schema[name]})  # ten times faster than one of all options
    try:
        typed = parser.parse_args([f"--{name}={text}"])[name]
    except ArgumentError:
        typed = parser.parse_args([f"--{name}=[{text}]"])[name]
    try:
        parse_json(json.dumps(typed))  # text of a list becomes numbers, which have limits too
    except ValueError as error:
        raise ArgumentError(None, str(error)) from None
    # Tables may be named 0, 1, 2, which YAML takes for numbers.
    return {str(table): own for table, own in typed.items()} if isinstance(typed, dict) else typed


def _value_of_each_table(
    schema: Mapping[str, Option], name: str, tables: dict[Any, Any]
) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for value in tables.values():
        if repr(value) not in typed:
            typed[repr(value)] = typed_value(schema, name, value)
    by_table = any(get_origin(a) is dict for a in get_args(schema[name].type))
    if not by_table or any(isinstance(value, dict) for value in typed.values()):
        raise ArgumentError(None, f"{name} can't be a mapping of these")
    return {str(table): copy(typed[repr(value)]) for table, value in tables.items()}


def type_name(annotation: Any) -> str:
    """``int or a mapping of tables to int`` rather than ``int | dict[str, int]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is dict:
        return f"a mapping of tables to {type_name(arguments[1])}, as in {{C3: ..., C12: ...}}"
    if origin in (tuple, list):
        return f"a list, each {type_name(arguments[0])}"
    if arguments:
        return " or ".join(type_name(a) for a in arguments if a is not type(None))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        annotation, str(annotation)
    )
