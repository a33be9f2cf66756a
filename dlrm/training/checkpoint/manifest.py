"""The manifest of a checkpoint: JSON with what is in its files, their digests and the run's state.

What does not fit together can't be made: shards tile their tensors and their files exactly.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
        require(bool(_DIGEST.fullmatch(self.sha256)), f"sha256 {self.sha256!r}")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor, and its shards, which cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"dtype {self.dtype!r}")
        require(len(self.shape) <= MAX_DIMS, f"{len(self.shape)} dimensions")
        for shard in self.shards:
            require(
                len(shard.offset) == len(shard.shape) == len(self.shape),
                f"a shard of shape {shard.shape} of a tensor of shape {self.shape}",
            )
        require(_tile(self.shards, self.shape), "shards that overlap or are missing")

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
        require(bool(_DIGEST.fullmatch(self.sha256)), f"sha256 {self.sha256!r}")


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is restored of a parameter group of an optimizer."""

    rule: str
    lr: float
    seed: int | None = None
    """Of stochastic rounding."""

    def __post_init__(self) -> None:
        valid = self.seed is None or -(1 << 63) <= self.seed < 1 << 63
        require(valid, f"seed {self.seed}")


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The position in the data; see :meth:`dlrm.data.loader.BatchLoader.state_dict`."""

    epoch: int
    position: int
    order: dict[str, Any]


@dataclass(kw_only=True)
class Progress:
    """How far a run has come: what changes from step to step besides the tensors.

    The run keeps one and changes it. A checkpoint stores every field, and a resumed run begins with
    them: a new field needs one line here.
    """

    steps: int = 0
    epoch: int = 0
    best: float = -math.inf
    """Best validation AUC so far."""
    best_step: int = -1
    """Its step; -1 without one."""
    validated: tuple[int, dict[str, float]] = field(default_factory=lambda: (-1, {}))
    """Step and metrics of the last validation."""
    fitted: dict[str, float] = field(default_factory=dict)
    """Metrics after ``--init_from``, before any step."""
    fine_tune: float = 1.0
    """Factor on the learning rates after ``--init_from``."""
    clock: dict[str, float] = field(default_factory=dict)
    """Samples and seconds of training so far."""
    losses: tuple[float, int] = (0.0, 0)
    """Sum and number of the losses since they were logged."""
    loader: LoaderState | None = None
    random: str | None = None
    """State of the random number generator in base64."""


@dataclass(kw_only=True)
class RunState(Progress):
    """The state of a run besides its tensors."""

    model: dict[str, Any]
    """The specification: the arguments of :class:`dlrm.model.DLRM`."""
    config: dict[str, Any]
    """The configuration of the run, nested as in its file."""
    groups: tuple[tuple[Group, ...], ...] = ()
    """Parameter groups of each optimizer."""
    best_name: str | None = None
    """The checkpoint with the best validation AUC; None for this one, or without one."""
    fingerprint: str | None = None
    """Of the data; see :func:`dlrm.data.prepare.fingerprint.fingerprint`."""

    @property
    def progress(self) -> Progress:
        """The part that a resumed run goes on from."""
        return Progress(**{each.name: getattr(self, each.name) for each in fields(Progress)})

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
        require(bool(_RUN.fullmatch(self.run)), f"run {self.run!r}")
        for name in self.files:
            require(bool(_FILE.fullmatch(name)), f"file {name!r}: it must be like {file_name(0)}")
        ends = {name: file.header for name, file in self.files.items()}
        for name, shard, size in self.shards_by_place:
            require(shard.file in ends, f"tensor {name} in file {shard.file!r}, not one of its")
            gapless = shard.start == ends[shard.file]
            require(gapless, f"tensor {name} at byte {shard.start} of {shard.file}, wrongly")
            ends[shard.file] += size
        for name, file in self.files.items():
            require(ends[name] == file.bytes, f"{file.bytes} bytes in {name}, not {ends[name]}")

    @cached_property
    def shards_by_place(self) -> list[tuple[str, StoredShard, int]]:
        """Name, shard and bytes of all shards, in their order in the files."""
        found = [
            (name, shard, tensor.nbytes(shard))
            for name, tensor in self.tensors.items()
            for shard in tensor.shards
        ]
        return sorted(found, key=lambda entry: (entry[1].file, entry[1].start, entry[2]))


def file_name(rank: int) -> str:
    """The file with the shards that a process writes."""
    return f"rank_{rank:05}.safetensors"


def require(holds: bool, what: str) -> None:
    """Raise a ``ValueError`` that a manifest has something wrong, unless that holds."""
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
