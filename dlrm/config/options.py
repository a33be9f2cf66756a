"""Every option of the command line, from the dataclasses and the kinds of embeddings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from dlrm.config.schema import HOUSEKEEPING, RunConfig, default_dtype
from dlrm.kernels.update.rules import RULES
from dlrm.sparse_arch.table_plan import AUTO
from dlrm.utils.documents import parse_yaml

_NULLS = ("null", "Null", "NULL", "~")  # of YAML
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)  # in a docstring
_EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")  # 1e-3, which is text in YAML 1.1


@dataclass(frozen=True)
class Option:
    """One option of the command line."""

    type: Any
    """Without the range of its values, which the dataclasses check."""
    default: Any
    help: str

    @property
    def is_text(self) -> bool:
        """Whether a value is taken as it is written."""
        return self.type in (str, str | None)


def option_schema(kinds: Mapping[str, type]) -> dict[str, Option]:
    """Every option by its full name.

    Args:
        kinds: embedding kinds by name; the arguments of their constructors are options as well.
    """
    schema = _options_of(RunConfig)

    emb = schema["emb"]
    valid = ", ".join([*sorted(kinds), AUTO])
    schema["emb"] = Option(emb.type, emb.default, f"{emb.help} One of: {valid}.")
    for name in ("optim.dense", "optim.embeddings"):
        schema[name] = Option(Literal[RULES], schema[name].default, schema[name].help)

    for kind, cls in kinds.items():
        schema |= _options_of_kind(kind, cls)
    return schema


def _options_of(cls: Any, prefix: str = "") -> dict[str, Option]:
    """The fields of a dataclass, and of the dataclasses in it."""
    found: dict[str, Option] = {}
    hints = get_type_hints(cls)
    for name, field in cls.__pydantic_fields__.items():
        if is_dataclass(hints[name]):
            found |= _options_of(hints[name], f"{name}.")
        elif name != "methods":
            default = field.get_default(call_default_factory=True)
            found[prefix + name] = Option(hints[name], default, field.description or "")
    return found


def _options_of_kind(kind: str, cls: Any) -> dict[str, Option]:
    """The options of an embedding kind, each of which may have one value for each table."""
    found: dict[str, Option] = {}
    hints = get_type_hints(cls.__init__)
    arguments = (inspect.getdoc(cls) or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts = dict(_ARGUMENT.findall(arguments))
    for name, option in cls.options().items():
        hint: Any = hints[name]
        if name in cls.per_table:
            # Lists, with a value for each table of a group, are for code: here, use names.
            hint = Union[tuple(a for a in get_args(hint) if get_origin(a) is not list)]  # noqa: UP007
        text = texts.get(name, "")
        found[f"{kind}.{name}"] = Option(hint | dict[str, hint], option.default, text)
    return found


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
        values = options.get(group) or {} if group else options
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        if name == "tables.dtype" and values.get(leaf) is not None:  # older runs all name it
            default = default_dtype(str(options.get("emb")), options.get("budget"))
        if name not in HOUSEKEEPING and values.get(leaf, default) != default:
            changed[name] = values[leaf]
    return changed


def option_texts(schema: Mapping[str, Option]) -> dict[str, str]:
    """The help of every option in one line, with its type and default."""
    texts = {}
    for name, option in schema.items():
        default = option.default if isinstance(option.default, str) else json.dumps(option.default)
        text = " ".join(option.help.replace("``", "").split())
        texts[name] = f"{text} (type: {type_name(option.type)}; default: {default})"
    return texts


def typed_value(option: Option, value: Any) -> Any:
    """Convert a value to the type of an option; a single value may stand for a list of one.

    Args:
        option: the option.
        value: text of the command line, or what a YAML file holds.

    Raises:
        ValueError: it can't be converted.
    """
    if option.is_text:
        return _text(value, optional=option.type is not str)
    if isinstance(value, str):
        content = parse_yaml(value)
        if content is None and value not in _NULLS:
            raise ValueError("it is empty")
        value = content

    adapter = TypeAdapter(option.type)
    try:
        written = json.dumps(_with_exponents(value), default=str)  # names of tables become text
        try:
            return adapter.validate_json(written, strict=True)
        except ValidationError:
            return adapter.validate_json(f"[{written}]", strict=True)
    except TypeError as error:  # a name that JSON lacks, such as a date
        raise ValueError(str(error)) from None


def _text(value: Any, *, optional: bool) -> str | None:
    if isinstance(value, bool | list | dict) or (value is None and not optional):
        raise ValueError("it must be text")
    if optional and (value is None or value in _NULLS):
        return None
    text = str(value)
    text.encode()  # which fails for half of a character
    return text


def _with_exponents(value: Any) -> Any:
    """A value whose texts like ``1e-3`` are numbers."""
    if isinstance(value, list):
        return [_with_exponents(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _with_exponents(inner) for name, inner in value.items()}
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def type_name(annotation: Any) -> str:
    """``a whole number or a mapping of tables to a whole number``, not ``int | dict[str, int]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(arguments)}"
    if origin is dict:
        return f"a mapping of tables to {type_name(arguments[1])}, as in {{NAME: ...}}"
    if origin in (tuple, list):
        return f"a list, each {type_name(arguments[0])}"
    if arguments:
        return " or ".join(type_name(a) for a in arguments if a is not NoneType)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        annotation, str(annotation)
    )
