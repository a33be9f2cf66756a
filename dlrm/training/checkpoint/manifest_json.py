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
from pathlib import Path
from typing import Any

from dlrm.training.checkpoint.manifest import Manifest
from dlrm.training.checkpoint.tensor_files import open_regular
from dlrm.training.run_directory import MANIFEST
from dlrm.utils.documents import JsonLimits, json_values, parse_json
from dlrm.utils.validation import validate

FORMAT, VERSION = "dlrm checkpoint", 1
LIMITS = JsonLimits(size=32 << 20, values=1_000_000, depth=31)


def manifest_to_json(manifest: Manifest) -> bytes:
    """The content of a manifest's file.

    Raises:
        ValueError: it is too long to be read again.
    """
    content = {
        "run": manifest.run,
        "files": {name: vars(file) for name, file in manifest.files.items()},
        "tensors": {name: vars(tensor) for name, tensor in manifest.tensors.items()},
        "state": {key: _encoded(value) for key, value in asdict(manifest.state).items()},
    }
    body = _canonical(content)
    if len(body) > LIMITS.size - 1024 or json_values(body.decode()) > LIMITS.values:
        shards = sum(len(tensor.shards) for tensor in manifest.tensors.values())
        raise ValueError(f"it has {shards:,} shards, too many: use larger pages")
    digest = hashlib.sha256(body).hexdigest()
    head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
    return head[:-1].encode() + b', "content": ' + body + b"}\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    with open_regular(directory / MANIFEST) as file:
        text = file.read(LIMITS.size + 1)
    try:
        return manifest_from_json(text)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from None


def manifest_from_json(text: bytes) -> Manifest:
    """The manifest that a file holds.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    if len(text) > LIMITS.size:
        raise ValueError(f"it has more than {LIMITS.size:,} bytes")
    try:
        outer = parse_json(text.decode(), LIMITS)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from None

    found = outer.get("format") if isinstance(outer, dict) else None
    if found == "dlrm export":
        raise ValueError("it is an export: name the run that it was made of, or dlrm serve it")
    if found != FORMAT:
        raise ValueError(f"its format is {found!r:.50}, not {FORMAT!r}")
    if outer.get("version") != VERSION:
        raise ValueError(
            f"it has version {outer.get('version')!r:.50}, this program reads {VERSION}"
        )

    # Its own digest finds what was changed.
    content = outer.get("content")
    try:
        body = _canonical(content)
    except ValueError:
        raise ValueError("it has a number that is not finite, or invalid Unicode") from None
    if hashlib.sha256(body).hexdigest() != outer.get("sha256"):
        raise ValueError("its content does not have the digest that it states")
    return validate(Manifest, _decoded(content))


def _canonical(content: Any) -> bytes:
    """JSON as the digest covers it.

    Raises:
        ValueError: a number is not finite, or text is not valid Unicode.
    """
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    return text.encode()


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
