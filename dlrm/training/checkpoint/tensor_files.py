"""Tensors in safetensors files: a header, then the bytes of every shard.

Threads write and read several shards at once, a slice at a time, so that no second copy of a table
is in memory. The digests are computed on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from threading import Lock, local
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dlrm.training.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    Manifest,
    StoredFile,
    StoredShard,
)
from dlrm.utils.cpus import cpu_count
from dlrm.utils.streams import stream_of

SLICE = 16 << 20
"""Bytes that are copied from a GPU at a time; each thread has two buffers of that size."""
PART = 64 << 20
"""Bytes of a tensor that are written, hashed and read one after another."""
THREADS = 8
SYNCED = PART // 2
"""Bytes of a part for which its thread waits until they are on disk. Without it, the disk would be
idle until all is written, and a checkpoint of 6.6 GB would take twice as long."""
READERS = 16  # threads
_PIECE = 4 << 20  # bytes that are read at a time
_REGULAR = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Flags for opening a file; Windows lacks the first two, and others the last."""


@dataclass(frozen=True)
class Piece:
    """A shard of a tensor: its values, and their position in the whole tensor."""

    name: str
    offset: tuple[int, ...]
    values: Tensor


class Stopped(BaseException):
    """A file was not completed, as it was not wanted any more."""


def write_file(
    path: Path,
    pieces: Iterable[Piece],
    metadata: Mapping[str, str],
    stopped: Callable[[], bool] = bool,
) -> tuple[StoredFile, list[tuple[str, StoredShard]]]:
    """Write pieces to a file, and wait until they are on disk.

    Args:
        path: of the file.
        pieces: what to write.
        metadata: what the header says besides the tensors.
        stopped: says whether the file is not wanted any more.

    Returns:
        What a manifest says of the file, and of each piece by the name of its tensor.

    Raises:
        OSError: it can't be written.
        Stopped: it is not wanted any more.
    """
    pieces = [part for piece in pieces for part in _parts(piece)]
    pieces.sort(key=lambda piece: -piece.values.itemsize)  # keeps them aligned
    header = _header(pieces, metadata)
    # The header has the sizes, so that every piece has its place before any is written.
    sizes = [piece.values.nbytes for piece in pieces]
    starts = list(accumulate(sizes, initial=len(header)))

    with path.open("wb") as file, ThreadPoolExecutor(min(THREADS, cpu_count())) as threads:
        file.write(header)
        file.flush()
        written = [
            threads.submit(_write_piece, file, piece, start, stopped)
            for piece, start in zip(pieces, starts, strict=False)
        ]
        digests = [each.result() for each in written]
        file.flush()
        os.fsync(file.fileno())

    shards = [
        StoredShard(
            offset=tuple(piece.offset),
            shape=tuple(piece.values.shape),
            file=path.name,
            start=start,
            sha256=digest,
        )
        for piece, start, digest in zip(pieces, starts, digests, strict=False)
    ]
    sha256 = hashlib.sha256(header).hexdigest()
    stored = StoredFile(bytes=starts[-1], header=len(header), sha256=sha256)
    return stored, [(piece.name, shard) for piece, shard in zip(pieces, shards, strict=True)]


def _parts(piece: Piece) -> Iterator[Piece]:
    """A piece in parts of some rows each, since a single thread computes the digest of a part."""
    values = piece.values
    rows = len(values) if values.dim() else 1
    most = max(1, rows * PART // max(1, values.nbytes))
    if most >= rows:
        yield piece
        return
    for start in range(0, rows, most):
        offset = (piece.offset[0] + start, *piece.offset[1:])
        yield Piece(piece.name, offset, values[start : start + most])


def _header(pieces: Sequence[Piece], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: its length, then JSON, padded to align what follows."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for piece in pieces:
        start, stop = stop, stop + piece.values.nbytes
        at = ",".join(map(str, piece.offset))
        content[f"{piece.name}@{at}" if any(piece.offset) else piece.name] = {
            "dtype": DTYPE_NAMES[piece.values.dtype],
            "shape": list(piece.values.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_piece(file: BinaryIO, piece: Piece, at: int, stopped: Callable[[], bool]) -> str:
    """Write a piece to a position of a file; returns its digest."""
    digest = hashlib.sha256()
    for content in slices(piece.values):
        if stopped():
            raise Stopped
        part = content.numpy().data
        digest.update(part)
        while part:
            count = _write_some(file, part, at)
            part, at = part[count:], at + count
    if piece.values.nbytes >= SYNCED:
        _sync(file.fileno())
    return digest.hexdigest()


_sync = getattr(os, "fdatasync", os.fsync)  # macOS and Windows have only the latter


_position = Lock()  # of files on Windows, which lacks pread and pwrite


def _write_some(file: BinaryIO, content: memoryview, at: int) -> int:
    """Write to a position, next to other threads; returns the number of bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file.fileno(), content, at)
    with _position:  # Windows
        file.seek(at)
        return file.write(content)


_staging = local()  # two pinned buffers in each thread that copies from a GPU


def slices(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor on any device, in order: a slice at a time, valid until the next one.

    A slice of a GPU's tensor is copied while the one before it is used, on a stream that must wait
    for the values: see :func:`dlrm.training.checkpoint.snapshot.take`.
    """
    if not tensor.numel():
        return
    if not tensor.is_cuda:
        yield from _flat(tensor).split(SLICE)
        return

    # Two buffers: a slice is copied to one while the other is used.
    if not hasattr(_staging, "buffers"):
        _staging.buffers = [torch.empty(SLICE, dtype=torch.uint8, pin_memory=True) for _ in "12"]
    buffers = _staging.buffers
    copied: list[tuple[Tensor, torch.cuda.Event]] = []
    with torch.cuda.device(tensor.device):
        stream = stream_of(tensor.device, "saves")
        with torch.cuda.stream(stream):
            parts = _flat(tensor).split(SLICE)
        for number, part in enumerate(parts):
            arrived = torch.cuda.Event(blocking=True)  # no core is kept busy by waiting
            with torch.cuda.stream(stream):
                buffer = buffers[number % 2][: len(part)].copy_(part, non_blocking=True)
                arrived.record()
            copied.append((buffer, arrived))
            if number:
                yield _arrived(*copied[number - 1])
        yield _arrived(*copied[-1])


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; a copy if they do not follow each other."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _arrived(buffer: Tensor, event: torch.cuda.Event) -> Tensor:
    event.synchronize()
    return buffer


class TensorFiles:
    """The open files of a checkpoint. What is open stays, even if its directory is removed.

    Args:
        directory: of the checkpoint.
        manifest: what is in it.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is not as the manifest says.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files: dict[str, BinaryIO] = {}
        for path in directory.iterdir():
            if path.name not in manifest.files and path.suffix == ".safetensors":
                raise ValueError(f"{path.name} is not in its manifest")
        for name, stored in manifest.files.items():
            self._files[name] = file = open_regular(directory / name)
            if (size := os.fstat(file.fileno()).st_size) != stored.bytes:
                raise ValueError(f"{name} has {size:,} bytes, not {stored.bytes:,}")

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(READERS, cpu_count()))

    def verify(self, rank: int = 0, size: int = 1) -> Callable[[], None]:
        """Start to compare the digests of all shards, or of a process's share.

        Returns:
            A function that waits for the end. It raises ``OSError`` if a file can't be read, and
            ``ValueError`` if a digest differs; the message names the tensor and the file.
        """
        parts: list[tuple[str, str, int, int, str]] = [
            ("the header", name, 0, file.header, file.sha256)
            for name, file in self._manifest.files.items()
        ]
        for name, shard, length in self._manifest.shards_by_place:
            parts.append((f"tensor {name}", shard.file, shard.start, length, shard.sha256))

        largest_first = sorted(parts, key=lambda part: -part[3])
        found = self._threads.map(self._damage, largest_first[rank::size])

        def wait() -> None:
            damaged = [what for what in found if what]
            damaged.sort(key=lambda text: not text.startswith("the header"))  # of a file mixed in
            if damaged:
                more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
                raise ValueError(f"{damaged[0]} does not have the digest of the manifest{more}")

        return wait

    def _damage(self, part: tuple[str, str, int, int, str]) -> str | None:
        """The name of a part whose digest differs."""
        what, name, start, length, sha256 = part
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_PIECE, length)))
        for at in range(start, start + length, _PIECE):
            piece = buffer[: min(_PIECE, start + length - at)]
            self._read(name, at, piece)
            digest.update(piece)
        return None if digest.hexdigest() == sha256 else f"{what} in {name}"

    def read_into(self, pieces: Iterable[Piece]) -> None:
        """Copy blocks of tensors to pieces on any device, whichever shards they are stored in.

        Raises:
            OSError: a file can't be read.
            ValueError: a tensor is missing or of another type.
        """
        reads = []
        for piece in pieces:
            if (stored := self._manifest.tensors.get(piece.name)) is None:
                raise ValueError(
                    f"it has no tensor {piece.name}: an earlier version stored such tables in "
                    "another way; load it with that version, or train again"
                )
            if piece.values.dtype != DTYPES[stored.dtype]:
                here = DTYPE_NAMES.get(piece.values.dtype, piece.values.dtype)
                raise ValueError(f"{piece.name} is {stored.dtype} there and {here} here")
            reads += [self._threads.submit(self._read_shard, piece, s) for s in stored.shards]
        for read in reads:
            read.result()

    def _read_shard(self, piece: Piece, shard: StoredShard) -> None:
        """Copy what a piece and a shard have in common."""
        places = zip(piece.offset, piece.values.shape, shard.offset, shard.shape, strict=True)
        to, block = [], []
        for here, own_size, stored, stored_size in places:
            start, stop = max(here, stored), min(here + own_size, stored + stored_size)
            if start >= stop:
                return
            to.append(slice(start - here, stop - here))
            block.append(slice(start - stored, stop - stored))

        target = piece.values.detach()
        target = target[tuple(to)] if to else target.view(1)
        self._read_block(target, shard, block or [slice(0, 1)])

    def _read_block(self, target: Tensor, shard: StoredShard, block: Sequence[slice]) -> None:
        """Copy a block of a shard to a tensor of its shape."""
        inner = shard.shape[1:]
        row = math.prod(inner) * target.element_size()
        at = shard.start + block[0].start * row
        for part in target.split(max(1, _PIECE // row)):
            buffer = torch.empty(len(part) * row, dtype=torch.uint8)
            self._read(shard.file, at, buffer.numpy().data)
            rows = buffer.view(target.dtype).view(len(part), *inner)
            part.copy_(rows[(slice(None), *block[1:])])
            at += len(buffer)

    def _read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from a position of a file."""
        done = 0
        while done < len(into):
            count = _read_some(self._files[name], start + done, into[done:])
            if not count:
                raise ValueError(f"{name} has become shorter")
            done += count

    def close(self) -> None:
        """Close the files."""
        self._threads.shutdown()
        for file in self._files.values():
            file.close()


def _read_some(file: BinaryIO, start: int, into: memoryview) -> int:
    """Read from a position, next to other threads; returns the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [into], start)
    with _position:  # Windows
        file.seek(start)
        return file.readinto(into)  # type: ignore[attr-defined]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading: no link, device or pipe.

    Raises:
        OSError: it can't be read.
        ValueError: it is something else.
    """
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link, it must be a file")
    opened = os.open(path, os.O_RDONLY | _REGULAR)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ValueError(f"{path.name} is not a regular file")
    return os.fdopen(opened, "rb", buffering=0)
