"""Values from files and the command line, checked against types.

The fields of a dataclass say what is valid: :func:`validate` makes one from plain values with
pydantic, and reports every mistake, each with the name, the value and the rule. Numbers are strict,
since ``"3"`` or ``true`` in a file is a mistake.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from .documents import MAX_SHOWN, shown
from .messages import did_you_mean

MAX_MISTAKES = 3
"""Number of mistakes that an error lists."""

T = TypeVar("T")

_RULES = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text, in quotes",
    "tuple_type": "it must be a list",
    "list_type": "it must be a list",
    "dict_type": "it must hold names and values, as name: value",
    "mapping_type": "it must hold names and values, as name: value",
    "dataclass_type": "it must hold names and values, as name: value",
}
"""The rule by the type of pydantic's error, where its own words are less plain."""

_SHORTER = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    " after validation": "",
}


def _as_text(value: Any) -> Any:
    plain = isinstance(value, int | float | date) and not isinstance(value, bool)
    return str(value) if plain else value


def as_list(value: Any) -> Any:
    """A single value as a list of one, for fields that may be either."""
    return value if value is None or isinstance(value, list | tuple) else [value]


Whole = Annotated[int, Strict()]
"""A whole number; ``true``, ``3.0`` and ``"3"`` are none."""
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), BeforeValidator(_as_text)]
"""Text that a YAML file may write without quotes though it looks like a number or a date."""
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_list)]
"""A list of texts; a single one stands for a list of one."""


def must(rule: str, holds: Callable[[Any], object]) -> AfterValidator:
    """A rule that types can't say, for ``Annotated``: the value must ``rule``.

    Args:
        rule: such as ``"name a directory"``.
        holds: whether it holds for a value.
    """

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("rule", f"It should {rule}")
        return value

    return AfterValidator(check)


class Closed:
    """Base of dataclasses whose files may have no other names."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def validate(kind: type[T], value: Any, where: str = "") -> T:
    """Plain values as an object of a type.

    Args:
        kind: a dataclass, or any type that pydantic knows.
        value: what YAML or JSON holds.
        where: begins each mistake, such as ``"FILE: "``.

    Raises:
        ValueError: there are mistakes; it lists the first three, and the number of the others.
    """
    try:
        adapter: TypeAdapter[T] = _adapter(kind)  # type: ignore[arg-type]
        return adapter.validate_python(value)
    except ValidationError as error:
        found = [f"{where}{mistake}" for mistake in mistakes(error, kind)]
        more = [f"{len(found) - MAX_MISTAKES:,} more mistakes"] * (len(found) > MAX_MISTAKES)
        raise ValueError("; ".join([*found[:MAX_MISTAKES], *more])) from None


def chosen(value: Any) -> Any:
    """The fields of a dataclass that are not the default, as plain values of YAML and JSON."""
    kind: Any = type(value)
    return dict(_adapter(kind).dump_python(value, mode="json", exclude_defaults=True))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def mistakes(error: ValidationError, kind: Any) -> list[str]:
    """Every mistake in one line.

    Args:
        error: of pydantic.
        kind: the type that the values were to have.
    """
    found = error.errors(include_url=False)
    # A list is too short without its wrong values, but these are the mistake.
    around = {one["loc"][:-1] for one in found}
    cause = [one for one in found if one["type"] != "too_short" or one["loc"] not in around]
    return [_mistake(one, kind) for one in cause]


def _mistake(error: Any, kind: Any) -> str:
    *outer, last = error["loc"] or ("",)
    name, value, context = _dotted(error["loc"]), error["input"], error.get("ctx", {})
    inside = f"{_dotted(outer)}: " if outer else ""

    # Mistakes that are more than a wrong value.
    match error["type"]:
        case "value_error":
            return f"{name}: {context['error']}" if name else str(context["error"])
        case "missing":
            return f"{name} is missing"
        case "invalid_key":
            return f"{inside}the name {shown(last)} is not text: put it in quotes"
        case "unexpected_keyword_argument":
            valid = [field.name for field in fields(_type_at(kind, outer))]
            return f"{inside}unknown option {shown(last)}{did_you_mean(last, valid)}"
        case "literal_error":
            valid = re.findall(r"'([^']*)'|\"([^\"]*)\"", context["expected"])
            return f"{name} is {shown(value)}{did_you_mean(str(value), map(''.join, valid))}"

    rule = _RULES.get(error["type"]) or "it must" + error["msg"].partition(" should")[2]
    for long, short in _SHORTER.items():
        rule = rule.replace(long, short)
    return f"{name} is {shown(value)}, {rule}" if name else rule


def _dotted(location: Sequence[int | str]) -> str:
    name = ".".join(map(str, location))
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def _type_at(kind: Any, location: Sequence[int | str]) -> Any:
    """The dataclass of the values at a place in values of a type."""
    for key in location:
        if not is_dataclass(kind):  # but a mapping or a list of them
            kind = _dataclass_in(kind)
            continue
        kind = get_type_hints(kind)[str(key)]
        if get_origin(kind) in (Union, UnionType):
            kind = _dataclass_in(kind)
    return kind


def _dataclass_in(kind: Any) -> Any:
    return next(inner for inner in get_args(kind) if is_dataclass(inner))
