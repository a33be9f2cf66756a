"""Mutations of JSON and YAML: of the values that a file holds, and of its text."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from harness import mutate

NASTY = (
    *(None, True, False, 0, 1, -1, 2, 7, 20_000, 10**9, 2**31, 2**32 + 1, 2**53 + 1, 2**62),
    *(2**63 - 1, 2**63, 2**64, 10**40, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e308),
    *(float("inf"), float("nan")),
    *("", " ", "x", "null", "1", "-1", "1e400", "9" * 70, "9" * 5000, "\ud800", "\x1b[31m", "\x00"),
    *("../x", "/etc/passwd", "a/b", ".", "é\U0001f600", "x" * 10_000, "[" * 500, "{a: &a [*a]}"),
    *([], {}, [[]], [None], ["x"], [1, 2, 3], {"x": 1}, {"": None}, {"default": 2}),
    *([0] * 3000, [1] * 100_000),
)


def mutate_values(rng: random.Random, root: Any) -> tuple[str, Any]:
    """A copy of some nested values with one to three changes, and the name of the last one."""
    root, name = [copy.deepcopy(root)], ""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [*_places(root)]
        parent, key = rng.choice(places)
        changes = _changes(rng, parent, key, rng.choice(places), is_root=parent is root)
        name = rng.choice([*changes])
        changes[name]()
    return name, root[0]


def _changes(
    rng: random.Random, parent: Any, key: Any, other: tuple[Any, Any], *, is_root: bool
) -> dict[str, Callable[[], Any]]:
    """What can be done to a value."""
    changes: dict[str, Callable[[], Any]] = {
        "value replaced": lambda: _set(parent, key, copy.deepcopy(rng.choice(NASTY))),
        "values swapped": lambda: _swap(parent, key, *other),
        "value in a list": lambda: _set(parent, key, [parent[key]]),
        "value in a mapping": lambda: _set(parent, key, {"x": parent[key]}),
        "number changed": lambda: _nudge(rng, parent, key),
    }
    if not is_root:
        changes["value removed"] = lambda: parent.pop(key)
    if isinstance(parent, dict):
        names = [key[:-1], key + "x", key.upper(), *parent, *NASTY]
        changes["name changed"] = lambda: _set(parent, str(rng.choice(names)), parent.pop(key))
    elif not is_root:
        changes["value repeated"] = lambda: parent.insert(key, copy.deepcopy(parent[key]))
    return changes


def mutate_text(rng: random.Random, text: str) -> tuple[str, bytes]:
    """A text with bytes changed, or with a piece that is hard to read, and the name of it."""
    number = "1" + "0" * rng.choice((63, 64, 400, 5000))
    deep = rng.choice((10, 31, 33, 500, 100_000))
    bomb = "&a [x, x, x, x, x, x, x, x]"
    for level in range(rng.choice((1, 8))):
        bomb = f"{{a{level}: {bomb}, b: &{'b' * (level + 1)} [{', '.join(['*a'] * 8)}]}}"
    pieces = {
        "long number": number,
        "long hexadecimal number": "0x" + "f" * len(number),
        "deep": "[" * deep + "1" + "]" * deep,
        "deep mapping": '{"a": ' * deep + "1" + "}" * deep,
        "half a character": '"\\ud800"',
        "aliases": "{x: " + bomb + "}",
        "merged": "{<<: {epochs: 1}, <<: {epochs: 2}}",
        "tag": rng.choice(("!!int ''", "!!python/none ''", "!!bool x", "!!binary x", "!!set {a}")),
        "many values": "[" + "1, " * rng.choice((100, 10**4, 10**6)) + "1]",
        "comment": "# ",
        "document": "\n---\n",
    }
    if rng.random() < 0.5:
        return mutate(rng, text.encode(errors="surrogatepass"))
    name = rng.choice([*pieces])
    at = rng.choice([i for i, c in enumerate(text) if c in " :,[{"] or [0])
    until = text.find("\n", at) if rng.random() < 0.5 else at + 1
    return name, (text[: at + 1] + pieces[name] + text[max(until, at + 1) :]).encode(
        errors="surrogatepass"
    )


def as_json(value: Any) -> bytes:
    """JSON as a hand or another program may write it: any text, any number."""
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    """YAML of nested values."""
    return yaml.safe_dump(value, sort_keys=False).encode(errors="surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or mapping in ``value``, once with each of its keys."""
    keys = range(len(value)) if isinstance(value, list) else value
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _set(parent: Any, key: Any, value: Any) -> None:
    parent[key] = value


def _swap(parent: Any, key: Any, other: Any, other_key: Any) -> None:
    one, two = copy.deepcopy(parent[key]), copy.deepcopy(other[other_key])
    other[other_key] = one
    if key in parent if isinstance(parent, dict) else key < len(parent):
        parent[key] = two


def _nudge(rng: random.Random, parent: Any, key: Any) -> None:
    if type(parent[key]) in (int, float):
        parent[key] += rng.choice((-1, 1, 10, 1000))
