"""YAML and JSON, read within limits: a file from someone else is cheap to refuse.

Every YAML or JSON file that a user may be given is read by :func:`read_yaml`, :func:`read_json` or
:func:`read_json_lines`. Bytes, values, depth and digits are limited, names are given once, and text
is valid Unicode. Aliases of YAML count as often as they are used.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MAX_YAML_BYTES = 1 << 20
MAX_YAML_VALUES = 10_000
MAX_JSON_BYTES = 1 << 23
MAX_DEPTH = 32
MAX_DIGITS = 64
MAX_SHOWN = 200  # characters of a value in an error message

_LONG = 50  # characters of a text that count as one more value
_MISFITS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors of PyYAML for a text that does not fit its tag: ``!!int ""``, 2024-02-30."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster than in Python


class JsonLimits(NamedTuple):
    """The limits of a JSON text."""

    size: int = MAX_JSON_BYTES
    """Bytes of a file, characters of a text."""
    values: int = 400_000
    depth: int = MAX_DEPTH


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file.

    Raises:
        OSError: it can't be read.
        ValueError: it is not YAML, or beyond the limits; the message names the file.
    """
    return _parsed(path, MAX_YAML_BYTES, parse_yaml)


def read_json(path: str | Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it can't be read.
        ValueError: it is not JSON, or beyond the limits; the message names the file.
    """
    refuse_pipe(path)
    return _parsed(path, MAX_JSON_BYTES, parse_json)


def read_json_lines(path: str | Path) -> Iterator[Any]:
    """The value of each line of a JSON lines file; an incomplete last line is skipped.

    Raises:
        OSError: it can't be read.
        ValueError: a line is not JSON, or beyond the limits; the message names the line.
    """
    refuse_pipe(path)
    with Path(path).open("rb") as file:
        number = 0
        while line := file.readline(MAX_JSON_BYTES + 1):
            number += 1
            if len(line) <= MAX_JSON_BYTES and not line.endswith(b"\n"):
                return
            try:
                yield parse_json(_decoded(line, MAX_JSON_BYTES))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None


def refuse_pipe(path: str | Path) -> None:
    """Refuse a pipe or a device where a file belongs: opening one may block forever.

    Raises:
        ValueError: it is one.
    """
    with suppress(OSError):  # what can't be found can't be opened either
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"{path} is a pipe or a device, it must be a file: restore it")


def parse_yaml(text: str) -> Any:
    """The content of a YAML text.

    Raises:
        ValueError: it is not YAML, beyond a limit, refers to itself or repeats a name.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"it has more than {MAX_YAML_BYTES:,} bytes")
    try:
        _check_events(text)
        loader = _LOADER(text)
        if (root := loader.get_single_node()) is None:
            return None
        values = 0
        for size in _sizes(root, ()):
            values += size
            _require_within(values, 0)
        return loader.construct_document(root)
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode") from None
    except (yaml.YAMLError, *_MISFITS) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def parse_json(text: str, limits: JsonLimits = JsonLimits()) -> Any:  # noqa: B008, it is immutable
    """The content of a JSON text.

    Raises:
        ValueError: it is not JSON, beyond a limit, or repeats a name.
    """
    if len(text) > limits.size:
        raise ValueError(f"it has more than {limits.size:,} bytes")
    if json_values(text) > limits.values:
        raise ValueError(f"it has more than {limits.values:,} values")
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested more than {limits.depth} deep") from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _inner(outer)]:
        depth += 1
        if depth > limits.depth:
            raise ValueError(f"it is nested more than {limits.depth} deep")
    if "\\ud" in text.lower():  # the only way to write half of a character
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it is not valid Unicode") from None
    return value


def json_values(text: str) -> int:
    """At least the number of values in a JSON text, as :func:`parse_json` counts them."""
    return text.count(",") + text.count("[") + text.count("{")


def shown(value: object) -> str:
    """``repr(value)`` in one line for an error message: its beginning, if it is long."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _parsed(path: str | Path, limit: int, parse: Callable[[str], Any]) -> Any:
    with Path(path).open("rb") as file:  # a pipe too, whose size is known at its end
        content = file.read(limit + 1)
    try:
        return parse(_decoded(content, limit))
    except ValueError as error:
        raise ValueError(f"{path} can't be read: {error}") from None


def _decoded(content: bytes, limit: int) -> str:
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content.decode()


def _check_events(text: str) -> None:
    """Check a YAML text before its values are made, each of which has an event or two."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        _require_within(number // 2 - 4, depth)


def _sizes(node: yaml.Node, around: tuple[yaml.Node, ...]) -> Iterator[int]:
    """As how many values a node of YAML counts, and each node in it, aliases resolved.

    Args:
        node: the node.
        around: those that contain it.
    """
    if node in around:
        raise ValueError("an alias refers to a value that contains it")
    if isinstance(node, yaml.ScalarNode):
        _require_within(0, len(around))
        yield _size(node)
        return

    yield 1
    around = (*around, node)
    _require_within(0, len(around))
    inner = node.value
    if isinstance(node, yaml.MappingNode):
        names = Counter(name.value for name, _ in inner if isinstance(name, yaml.ScalarNode))
        del names["<<"]
        if names and (most := names.most_common(1)[0])[1] > 1:
            raise ValueError(f"it names {shown(most[0])} twice")
        inner = [each for pair in inner for each in pair]
    for each in inner:
        yield from _sizes(each, around)


def _size(node: yaml.ScalarNode) -> int:
    """How many values a text counts as. A long number is refused: some take quadratic time."""
    text = node.value
    text.encode()  # which fails for half of a character
    if len(text) > MAX_DIGITS and node.tag.endswith((":int", ":float")):
        raise ValueError(f"it holds a number of {len(text):,} characters, more than {MAX_DIGITS}")
    return 1 + len(text) // _LONG


def _require_within(values: int, depth: int) -> None:
    if values > MAX_YAML_VALUES:
        raise ValueError(f"it has more than {MAX_YAML_VALUES:,} values, aliases resolved")
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(text):,} digits, more than {MAX_DIGITS}")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {shown(name)} twice")
    return result


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
