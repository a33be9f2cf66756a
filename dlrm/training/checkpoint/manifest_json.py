"""The manifest of a checkpoint as JSON.

It is read from files that a stranger may have made. So it is bounded in bytes, values and depth,
every field is checked before it is used, and its own digest finds what was changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dlrm.training.checkpoint.manifest import (
    Group,
    LoaderState,
    Manifest,
    RunState,
    StoredFile,
    StoredShard,
    StoredTensor,
    require,
)
from dlrm.utils.documents import JsonLimits, json_values, parse_json

FORMAT, VERSION = "dlrm checkpoint", 1
LIMITS = JsonLimits(size=32 << 20, values=1_000_000, depth=31)
MAX_SIZE = 1 << 48  # of a count, a size or a position


def manifest_to_json(manifest: Manifest) -> bytes:
    """The content of a manifest's file.

    Raises:
        ValueError: it is too long to be read again.
    """
    content = {
        "run": manifest.run,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "shards": [[s.offset, s.shape, s.file, s.start, s.sha256] for s in tensor.shards],
            }
            for name, tensor in manifest.tensors.items()
        },
        "state": {key: _encoded(value) for key, value in asdict(manifest.state).items()},
    }
    body = _canonical(content)
    if len(body) > LIMITS.size - 1024 or json_values(body.decode()) > LIMITS.values:
        shards = sum(len(tensor.shards) for tensor in manifest.tensors.values())
        raise ValueError(f"it has {shards:,} shards, too many: use larger pages")
    digest = hashlib.sha256(body).hexdigest()
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
    return head[:-1].encode() + b', "content": ' + body + b"}\n"


def manifest_from_json(text: bytes) -> Manifest:
    """The manifest that a file holds.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    outer = _parsed(text)
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise ValueError(f"it is not the manifest of a {FORMAT}")
    if outer.get("version") != VERSION:
        raise ValueError(
            f"it has version {outer.get('version')!r:.50}, this program reads {VERSION}"
        )
    content = outer.get("content")
    try:
        body = _canonical(content)
    except ValueError:
        raise ValueError("it has a number that is not finite, or invalid Unicode") from None
    if hashlib.sha256(body).hexdigest() != outer.get("sha256"):
        raise ValueError("its content does not have the digest that it states")
    top = _Fields(content, "")
    tensors = {
        name: _tensor(_Fields(value, f"tensors.{name}"))
        for name, value in top.mapping("tensors").items()
    }
    files = {
        name: StoredFile(
            bytes=entry.count("bytes"),
            header=entry.count("header"),
            sha256=entry.text("sha256"),
        )
        for name, value in top.mapping("files").items()
        for entry in [_Fields(value, f"files.{name}")]
    }
    state = _state(_Fields(top.mapping("state"), "state"))
    return Manifest(run=top.text("run"), files=files, tensors=tensors, state=state)


def _canonical(content: Any) -> bytes:
    """JSON as the digest covers it.

    Raises:
        ValueError: a number is not finite, or text is not valid Unicode.
    """
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    return text.encode()


def _parsed(text: bytes) -> Any:
    if len(text) > LIMITS.size:
        raise ValueError(f"it has more than {LIMITS.size:,} bytes")
    try:
        return parse_json(text.decode(), LIMITS)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _encoded(value: Any) -> Any:
    """A value with what JSON lacks: ``{"tuple": [...]}``, and ``{"float": "nan"}`` or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(inner) for inner in value]}
    if isinstance(value, list):
        return [_encoded(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): _encoded(inner) for key, inner in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    if isinstance(value, dict):
        if value.keys() == {"tuple"} and isinstance(value["tuple"], list):
            return tuple(_decoded(inner) for inner in value["tuple"])
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return value


class _Fields:
    """The fields of a JSON object, each of a type."""

    def __init__(self, value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"its {name or 'content'} is not an object")
        self._value, self._name = value, name

    def any(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A field whose value is an instance of ``kind``."""
        value = self._value.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            where = f"{self._name}.{key}".lstrip(".")
            raise ValueError(f"its {where:.100} is missing or wrong")
        return value

    def text(self, key: str) -> str:
        """A text."""
        return str(self.any(key, str))

    def count(self, key: str) -> int:
        """A whole number that may be a size or a position."""
        return _count(self.any(key, int))

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping."""
        return dict(self.any(key, dict))

    def optional(self, key: str) -> Any:
        """Anything, decoded; None if it is not there."""
        return _decoded(self._value.get(key))


def _count(value: Any) -> int:
    require(type(value) is int and 0 <= value <= MAX_SIZE, f"size {value!r:.50}")
    return int(value)


def _counts(value: Any) -> tuple[int, ...]:
    require(isinstance(value, list), f"shape {value!r:.50}")
    return tuple(map(_count, value))


def _tensor(fields: _Fields) -> StoredTensor:
    shards = []
    for entry in fields.any("shards", list):
        require(isinstance(entry, list) and len(entry) == 5, f"shard {entry!r:.50}")
        offset, shape, file, start, digest = entry
        require(isinstance(file, str) and isinstance(digest, str), f"shard {entry!r:.50}")
        shards.append(
            StoredShard(
                offset=_counts(offset),
                shape=_counts(shape),
                file=file,
                start=_count(start),
                sha256=digest,
            )
        )
    shape = _counts(fields.any("shape", list))
    return StoredTensor(dtype=fields.text("dtype"), shape=shape, shards=tuple(shards))


def _state(fields: _Fields) -> RunState:
    groups = fields.optional("groups")
    lists = isinstance(groups, tuple) and all(isinstance(inner, tuple) for inner in groups)
    require(lists, "groups that are no lists")
    loader = fields.optional("loader")
    texts = {name: fields.optional(name) for name in ("best_name", "random", "fingerprint")}
    for name, text in texts.items():
        require(isinstance(text, str | None), f"{name}, wrongly")
    best, fitted = fields.optional("best"), fields.optional("fitted")
    require(_is_number(best), f"best {best!r:.50}")
    require(_are_numbers(fitted), "fitted metrics that are no numbers")
    best_step, fine_tune = fields.optional("best_step"), fields.optional("fine_tune")
    require(best_step == -1 or _count(best_step) >= 0, f"best_step {best_step!r:.50}")
    positive = _is_number(fine_tune) and 0 < fine_tune < math.inf
    require(positive, f"fine_tune {fine_tune!r:.50}")
    validated = fields.optional("validated")
    require(isinstance(validated, tuple) and len(validated) == 2, "validated, wrongly")
    step, metrics = validated
    require(step == -1 or (_count(step) >= 0 and _are_numbers(metrics)), "validated, wrongly")
    clock, losses = fields.optional("clock"), fields.optional("losses")
    require(_are_numbers(clock), "clock, wrongly")
    pair = isinstance(losses, tuple) and len(losses) == 2 and all(map(_is_number, losses))
    require(pair, "losses, wrongly")
    return RunState(
        model=_decoded(fields.mapping("model")),
        config=_decoded(fields.mapping("config")),
        groups=tuple(tuple(map(_group, inner)) for inner in groups),
        loader=None if loader is None else _loader(_Fields(loader, "state.loader")),
        steps=fields.count("steps"),
        epoch=fields.count("epoch"),
        best=float(best),
        best_step=best_step,
        fine_tune=float(fine_tune),
        fitted=fitted,
        validated=(step, metrics),
        clock=clock,
        losses=losses,
        **texts,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _group(value: Any) -> Group:
    fields = _Fields(value, "state.groups")
    seed = fields.optional("seed")
    require(seed is None or type(seed) is int, f"seed {seed!r:.50}")
    return Group(rule=fields.text("rule"), lr=float(fields.any("lr", (int, float))), seed=seed)


def _loader(fields: _Fields) -> LoaderState:
    return LoaderState(
        epoch=fields.count("epoch"),
        position=fields.count("position"),
        order=_decoded(fields.mapping("order")),
    )
