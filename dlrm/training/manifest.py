"""The manifest of a checkpoint: JSON with what is in its files, their digests and the run's state.

It is read from files that a stranger may have made. So it is bounded in bytes, values and depth,
every field is checked before it is used, and its own digest finds what was changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

MANIFEST = "manifest.json"
FORMAT, VERSION = "dlrm checkpoint", 1
MAX_BYTES = 32 << 20
MAX_VALUES = 1_000_000
MAX_DEPTH = 32
MAX_SIZE = 1 << 48  # of a count, a size or a position
MAX_DIMS = 8

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""Types of tensors by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FILE = re.compile(r"rank_\d{5,7}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredShard:
    """Where a shard of a tensor lies."""

    offset: tuple[int, ...]
    """In the whole tensor."""
    shape: tuple[int, ...]
    file: str
    start: int
    """First byte in the file."""
    sha256: str

    def __post_init__(self) -> None:
        _require(bool(_DIGEST.fullmatch(self.sha256)), f"sha256 {self.sha256!r}")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor, and its shards, which cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype {self.dtype!r}")
        _require(len(self.shape) <= MAX_DIMS, f"{len(self.shape)} dimensions")
        for shard in self.shards:
            _require(
                len(shard.offset) == len(shard.shape) == len(self.shape),
                f"a shard of shape {shard.shape} of a tensor of shape {self.shape}",
            )
        _require(_tile(self.shards, self.shape), "shards that overlap or are missing")

    def nbytes(self, shard: StoredShard) -> int:
        """Bytes of one shard."""
        return math.prod(shard.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of tensors, and its header, which no shard covers."""

    bytes: int
    header: int
    """Bytes of the header, with its length before it."""
    sha256: str
    """Of the header."""

    def __post_init__(self) -> None:
        _require(bool(_DIGEST.fullmatch(self.sha256)), f"sha256 {self.sha256!r}")


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is restored of a parameter group of an optimizer."""

    rule: str
    lr: float
    seed: int | None = None
    """Of stochastic rounding."""

    def __post_init__(self) -> None:
        valid = self.seed is None or -(1 << 63) <= self.seed < 1 << 63
        _require(valid, f"seed {self.seed}")


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The position in the data; see :meth:`dlrm.data.criteo.CriteoLoader.state_dict`."""

    epoch: int
    position: int
    order: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run besides its tensors."""

    model: dict[str, Any]
    """The specification: the arguments of :class:`dlrm.model.DLRM`."""
    config: dict[str, Any]
    """The configuration of the run, nested as in its file."""
    groups: tuple[tuple[Group, ...], ...] = ()
    """Parameter groups of each optimizer."""
    loader: LoaderState | None = None
    steps: int = 0
    epoch: int = 0
    best: float = -math.inf
    """Best validation AUC so far."""
    best_name: str | None = None
    """The checkpoint with it; None for this one, or without one."""
    fitted: dict[str, float] = field(default_factory=dict)
    """Metrics after ``--init_from``, before any step."""
    validated: tuple[int, dict[str, float]] = field(default_factory=lambda: (-1, {}))
    """Step and metrics of the last validation."""
    clock: dict[str, float] = field(default_factory=dict)
    """Samples and seconds of training so far."""
    losses: tuple[float, int] = (0.0, 0)
    """Sum and number of the losses since they were logged."""
    random: str | None = None
    """State of the random number generator in base64."""

    def random_state(self) -> Tensor | None:
        """The state of the random number generator; None if there is none."""
        if self.random is None:
            return None
        try:
            content = base64.b64decode(self.random, validate=True)
        except binascii.Error:
            raise ValueError("it has a random state that is not base64") from None
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint stores besides the values of its tensors."""

    run: str
    """A random id of the run, kept when it is resumed."""
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    state: RunState

    def __post_init__(self) -> None:
        _require(bool(_RUN.fullmatch(self.run)), f"run {self.run!r}")
        for name in self.files:
            _require(bool(_FILE.fullmatch(name)), f"file {name!r}: it must be like {_name(0)}")
        ends = {name: file.header for name, file in self.files.items()}
        for name, shard, size in self.shards_by_place:
            _require(shard.file in ends, f"tensor {name} in file {shard.file!r}, not one of its")
            gapless = shard.start == ends[shard.file]
            _require(gapless, f"tensor {name} at byte {shard.start} of {shard.file}, wrongly")
            ends[shard.file] += size
        for name, file in self.files.items():
            _require(ends[name] == file.bytes, f"{file.bytes} bytes in {name}, not {ends[name]}")

    @cached_property
    def shards_by_place(self) -> list[tuple[str, StoredShard, int]]:
        """Name, shard and bytes of all shards, in their order in the files."""
        found = [
            (name, shard, tensor.nbytes(shard))
            for name, tensor in self.tensors.items()
            for shard in tensor.shards
        ]
        return sorted(found, key=lambda entry: (entry[1].file, entry[1].start, entry[2]))

    def to_json(self) -> bytes:
        """The content of the file.

        Raises:
            ValueError: it is too long to be read again.
        """
        content = {
            "run": self.run,
            "files": {name: asdict(file) for name, file in self.files.items()},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "shards": [
                        [s.offset, s.shape, s.file, s.start, s.sha256] for s in tensor.shards
                    ],
                }
                for name, tensor in self.tensors.items()
            },
            "state": {key: _encoded(value) for key, value in asdict(self.state).items()},
        }
        body = _canonical(content)
        if len(body) > MAX_BYTES - 1024 or _values(body) > MAX_VALUES:
            shards = sum(len(tensor.shards) for tensor in self.tensors.values())
            raise ValueError(f"it has {shards:,} shards, too many: use larger pages")
        digest = hashlib.sha256(body).hexdigest()
        head = json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest})
        return head[:-1].encode() + b', "content": ' + body + b"}\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
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
        return cls(run=top.text("run"), files=files, tensors=tensors, state=state)


def _name(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def file_name(rank: int) -> str:
    """The file with the shards that a process writes."""
    return _name(rank)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it has {what}")


def _tile(shards: Sequence[StoredShard], shape: tuple[int, ...], dim: int = 0) -> bool:
    """Whether shards cover a tensor exactly: bands along the first dimension, each cut further."""
    if dim == len(shape):
        return len(shards) == 1
    bands: dict[tuple[int, int], list[StoredShard]] = {}
    for shard in shards:
        bands.setdefault((shard.offset[dim], shard.shape[dim]), []).append(shard)
    stop = 0
    for (start, length), members in sorted(bands.items()):
        if start != stop or not _tile(members, shape, dim + 1):
            return False
        stop += length
    return stop == shape[dim]


def _values(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


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
    if len(text) > MAX_BYTES or _values(text) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes or {MAX_VALUES:,} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    level, depth = [value], 0
    while level:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


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
    _require(type(value) is int and 0 <= value <= MAX_SIZE, f"size {value!r:.50}")
    return int(value)


def _counts(value: Any) -> tuple[int, ...]:
    _require(isinstance(value, list), f"shape {value!r:.50}")
    return tuple(map(_count, value))


def _tensor(fields: _Fields) -> StoredTensor:
    shards = []
    for entry in fields.any("shards", list):
        _require(isinstance(entry, list) and len(entry) == 5, f"shard {entry!r:.50}")
        offset, shape, file, start, digest = entry
        _require(isinstance(file, str) and isinstance(digest, str), f"shard {entry!r:.50}")
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
    _require(lists, "groups that are no lists")
    loader = fields.optional("loader")
    texts = {name: fields.optional(name) for name in ("best_name", "random")}
    _require(all(isinstance(t, str | None) for t in texts.values()), "best_name or random, wrongly")
    best, fitted = fields.optional("best"), fields.optional("fitted")
    _require(_is_number(best), f"best {best!r:.50}")
    _require(_are_numbers(fitted), "fitted metrics that are no numbers")
    validated = fields.optional("validated")
    _require(isinstance(validated, tuple) and len(validated) == 2, "validated, wrongly")
    step, metrics = validated
    _require(step == -1 or (_count(step) >= 0 and _are_numbers(metrics)), "validated, wrongly")
    clock, losses = fields.optional("clock"), fields.optional("losses")
    _require(_are_numbers(clock), "clock, wrongly")
    pair = isinstance(losses, tuple) and len(losses) == 2 and all(map(_is_number, losses))
    _require(pair, "losses, wrongly")
    return RunState(
        model=_decoded(fields.mapping("model")),
        config=_decoded(fields.mapping("config")),
        groups=tuple(tuple(map(_group, inner)) for inner in groups),
        loader=None if loader is None else _loader(_Fields(loader, "state.loader")),
        steps=fields.count("steps"),
        epoch=fields.count("epoch"),
        best=float(best),
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
    _require(seed is None or type(seed) is int, f"seed {seed!r:.50}")
    return Group(rule=fields.text("rule"), lr=float(fields.any("lr", (int, float))), seed=seed)


def _loader(fields: _Fields) -> LoaderState:
    return LoaderState(
        epoch=fields.count("epoch"),
        position=fields.count("position"),
        order=_decoded(fields.mapping("order")),
    )
