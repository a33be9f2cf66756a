"""The manifest of a checkpoint: JSON with what is in its files, their digests and the run's state.

What does not fit together can't be made: shards tile their tensors and their files exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Interval, MaxLen
from pydantic import AfterValidator, Field

from dlrm.utils.validation import Number, Whole, validate

MAX_SIZE = 1 << 48
MAX_LR = 1e30  # products with it are finite in fp32

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""Types of tensors by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Count = Annotated[Whole, Interval(ge=0, le=MAX_SIZE)]
"""A count, a size or a position."""
Step = Annotated[Whole, Interval(ge=-1, le=MAX_SIZE)]
"""A step; -1 for none."""
Shape = Annotated[tuple[Count, ...], MaxLen(8)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 of bytes, in hexadecimal."""
FileName = Annotated[str, Field(pattern=r"^rank_[0-9]{5,7}\.safetensors$")]
CheckpointName = Annotated[str, Field(pattern=r"^step_[0-9]{1,15}\+*$")]
Metrics = dict[str, Number]


class StoredShard(NamedTuple):
    """Where a shard of a tensor lies."""

    offset: Shape
    """In the whole tensor."""
    shape: Shape
    file: str
    start: Count
    """First byte in the file."""
    sha256: Digest


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor, and its shards, which cover it exactly."""

    dtype: str
    shape: Shape
    shards: tuple[StoredShard, ...]

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, f"dtype {self.dtype!r}")
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

    bytes: Count
    header: Count
    """Bytes of the header, with its length before it."""
    sha256: Digest
    """Of the header."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is restored of a parameter group of an optimizer."""

    rule: str
    lr: Annotated[Number, Interval(ge=0, le=MAX_LR)]
    seed: Annotated[Whole, Interval(ge=-(1 << 63), lt=1 << 63)] | None = None
    """Of stochastic rounding."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The position in the data; see :meth:`dlrm.data.loader.BatchLoader.state_dict`."""

    epoch: Count
    position: Count
    order: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class UsedOptions:
    """The options in the configuration of a run that other programs use."""

    data: str = ""
    precision: str = "fp32"
    eval_batch_size: Annotated[Whole, Interval(ge=1, lt=1 << 31)] = 16384


def _require_options(config: dict[str, Any]) -> dict[str, Any]:
    validate(UsedOptions, config)
    return config


@dataclass(kw_only=True)
class Progress:
    """How far a run has come: what changes from step to step besides the tensors.

    The run keeps one and changes it. A checkpoint stores every field, and a resumed run begins with
    them: a new field needs one line here.
    """

    steps: Count = 0
    epoch: Count = 0
    best: Number = -math.inf
    """Best validation AUC so far."""
    best_step: Step = -1
    """Its step; -1 without one."""
    validated: tuple[Step, Metrics] = field(default_factory=lambda: (-1, {}))
    """Step and metrics of the last validation."""
    fitted: Metrics = field(default_factory=dict)
    """Metrics after ``--init_from``, before any step."""
    fine_tune: Annotated[Number, Interval(gt=0, le=MAX_LR)] = 1.0
    """Factor on the learning rates after ``--init_from``."""
    clock: Metrics = field(default_factory=dict)
    """Samples and seconds of training so far."""
    losses: tuple[Number, Count] = (0.0, 0)
    """Sum and number of the losses since they were logged."""
    loader: LoaderState | None = None


@dataclass(kw_only=True)
class RunState(Progress):
    """The state of a run besides its tensors."""

    model: dict[str, Any]
    """The specification: the arguments of :class:`dlrm.model.DLRM`."""
    config: Annotated[dict[str, Any], AfterValidator(_require_options)]
    """The configuration of the run, nested as in its file."""
    groups: tuple[tuple[Group, ...], ...] = ()
    """Parameter groups of each optimizer."""
    best_name: CheckpointName | None = None
    """The checkpoint with the best validation AUC; None for this one, or without one."""
    fingerprint: str | None = None
    """Of the data; see :func:`dlrm.data.prepare.fingerprint.fingerprint`."""

    @property
    def progress(self) -> Progress:
        """The part from which a resumed run continues."""
        return Progress(**{each.name: getattr(self, each.name) for each in fields(Progress)})

    @property
    def used_options(self) -> UsedOptions:
        """The options of the run that other programs use."""
        return validate(UsedOptions, self.config)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint stores besides the values of its tensors."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    """A random id of the run, kept when it is resumed."""
    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]
    state: RunState

    def __post_init__(self) -> None:
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
