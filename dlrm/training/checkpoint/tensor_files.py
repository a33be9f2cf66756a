"""Tensors in safetensors files, written and read through PyTorch's distributed checkpoints.

PyTorch plans which process writes and reads which shards. Each process writes one file: a header,
then the bytes of its shards, a slice at a time, so that no second copy of a table is in memory. The
digests are computed on the way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrm.training.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    Manifest,
    StoredFile,
    StoredShard,
    StoredTensor,
    file_name,
)
from dlrm.utils.cpus import cpu_count

SLICE = 64 << 20  # bytes that are copied from a GPU at a time
_PIECE = 4 << 20  # bytes that are hashed at a time
_THREADS = 4
_REGULAR = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
"""Flags for opening a file; Windows lacks the first two, and others the last."""


class TensorFileWriter(dcp.StorageWriter):
    """Writes one file per process into a directory, and a last one when all have written.

    Args:
        directory: where to write; it exists.
        about: what the headers of the files say besides the tensors.
        finish: called by the first process with the tensors and files that were written.
    """

    def __init__(
        self,
        directory: Path,
        about: Mapping[str, str],
        finish: Callable[[dict[str, StoredTensor], dict[str, StoredFile]], None],
    ) -> None:
        self._directory, self._about, self._finish = directory, dict(about), finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: all processes write alike."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file of each process."""
        return [replace(plan, storage_data=file_name(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this process."""
        name = plan.storage_data
        items = sorted(plan.items, key=lambda item: -_dtype(item).itemsize)  # keeps them aligned
        header = _header(items, self._about)
        results = []
        with ThreadPoolExecutor(1) as hasher, (self._directory / name).open("wb") as file:
            file.write(header)
            for item in items:
                start, digest = file.tell(), hashlib.sha256()
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                for piece in _bytes_of(tensor.detach()):
                    hashed = hasher.submit(digest.update, piece)  # while it is written
                    file.write(piece)
                    hashed.result()
                shard = StoredShard(
                    offset=tuple(_chunk(item).offsets),
                    shape=tuple(_chunk(item).sizes),
                    file=name,
                    start=start,
                    sha256=digest.hexdigest(),
                )
                results.append(WriteResult(item.index, file.tell() - start, shard))
            file.flush()
            os.fsync(file.fileno())
            sha256 = hashlib.sha256(header).hexdigest()
            stored = StoredFile(bytes=file.tell(), header=len(header), sha256=sha256)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(MetadataIndex(name), 0, stored)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Collect what was written."""
        files: dict[str, StoredFile] = {}
        shards: dict[str, list[StoredShard]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, StoredFile):
                files[result.index.fqn] = result.storage_data
            else:
                shards[result.index.fqn].append(result.storage_data)
        tensors = {
            name: StoredTensor(
                dtype=DTYPE_NAMES[stored.properties.dtype],
                shape=tuple(stored.size),
                shards=tuple(shards[name]),
            )
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._finish(tensors, files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Refuse to be chosen by a path."""
        return False


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _header(items: list[WriteItem], about: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: its length, then JSON, padded to align what follows."""
    content: dict[str, Any] = {"__metadata__": dict(about)}
    stop = 0
    for item in items:
        start, shape = stop, list(_chunk(item).sizes)
        stop += torch.Size(shape).numel() * _dtype(item).itemsize
        at = ",".join(map(str, _chunk(item).offsets))
        name = f"{item.index.fqn}@{at}" if any(_chunk(item).offsets) else item.index.fqn
        content[name] = {
            "dtype": DTYPE_NAMES[_dtype(item)],
            "shape": shape,
            "data_offsets": [start, stop],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor on any device, in order, a slice at a time."""
    if not tensor.numel():
        return
    rows = tensor if tensor.dim() else tensor.view(1)
    for part in rows.split(max(1, SLICE * len(rows) // tensor.nbytes)):
        content = part.contiguous().cpu().reshape(-1).view(torch.uint8)
        for piece in content.split(_PIECE):
            yield piece.numpy().data


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
        self._directory, self._manifest = directory, manifest
        self._files: dict[str, BinaryIO] = {}
        self._position = Lock()
        for path in directory.iterdir():
            if path.name not in manifest.files and path.suffix == ".safetensors":
                raise ValueError(f"{path.name} is not in its manifest")
        for name, stored in manifest.files.items():
            self._files[name] = file = open_regular(directory / name)
            if (size := os.fstat(file.fileno()).st_size) != stored.bytes:
                raise ValueError(f"{name} has {size:,} bytes, not {stored.bytes:,}")

    def verify(self, rank: int = 0, size: int = 1) -> None:
        """Compare the digests of all shards, or of a process's share.

        Raises:
            OSError: a file can't be read.
            ValueError: a digest differs; the message names the tensor and the file.
        """
        parts: list[tuple[str, str, int, int, str]] = [
            ("the header", name, 0, file.header, file.sha256)
            for name, file in self._manifest.files.items()
        ]
        for name, shard, length in self._manifest.shards_by_place:
            parts.append((f"tensor {name}", shard.file, shard.start, length, shard.sha256))
        largest_first = sorted(parts, key=lambda part: -part[3])
        with ThreadPoolExecutor(min(_THREADS, cpu_count())) as threads:
            damaged = [d for d in threads.map(self._damage, largest_first[rank::size]) if d]
        damaged.sort(key=lambda text: not text.startswith("the header"))  # of a file mixed in
        if damaged:
            more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            raise ValueError(f"{damaged[0]} does not have the digest of the manifest{more}")

    def _damage(self, part: tuple[str, str, int, int, str]) -> str | None:
        """The name of a part whose digest differs."""
        what, name, start, length, sha256 = part
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_PIECE, length)))
        for at in range(start, start + length, _PIECE):
            piece = buffer[: min(_PIECE, start + length - at)]
            self._read(name, at, piece)
            digest.update(piece)
        return None if digest.hexdigest() == sha256 else f"{what} in {name}"

    def read_into(self, tensor: Tensor, dtype: str, shard: StoredShard, item: ReadItem) -> None:
        """Copy a block of a shard to a tensor of its shape, on any device."""
        if tensor.dim() == 0:  # as a row of one element
            tensor = tensor.view(1)
        first = item.storage_offsets[0] if item.storage_offsets else 0
        inner = shard.shape[1:]
        row = math.prod(inner) * tensor.element_size()
        at = shard.start + first * row
        for part in tensor.split(max(1, _PIECE // row)):
            buffer = torch.empty(len(part) * row, dtype=torch.uint8)
            self._read(shard.file, at, buffer.numpy().data)
            block = buffer.view(DTYPES[dtype]).view(len(part), *inner)
            for dim in range(1, part.dim()):
                block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            part.copy_(block)
            at += len(buffer)

    def _read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` from a position of a file."""
        done = 0
        while done < len(into):
            count = self._read_some(self._files[name], start + done, into[done:])
            if not count:
                raise ValueError(f"{name} has become shorter")
            done += count

    def _read_some(self, file: BinaryIO, start: int, into: memoryview) -> int:
        """Read from a position, next to other threads; returns the number of bytes."""
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [into], start)
        with self._position:  # Windows
            file.seek(start)
            return file.readinto(into)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


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


class TensorFileReader(dcp.StorageReader):
    """Reads the tensors of a checkpoint whose files are open and verified."""

    def __init__(self, manifest: Manifest, files: TensorFiles) -> None:
        self._manifest, self._files = manifest, files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The tensors of the manifest."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.shape))
                        for shard in tensor.shards
                    ],
                )
                for name, tensor in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: the files are open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan of this process asks for."""
        shards = {
            (name, shard.offset): (tensor.dtype, shard)
            for name, tensor in self._manifest.tensors.items()
            for shard in tensor.shards
            if 0 not in shard.shape
        }
        for item in plan.items:
            if 0 in item.lengths:
                continue
            name = item.storage_index.fqn
            dtype, shard = shards[name, tuple(item.storage_index.offset or ())]
            tensor = planner.resolve_tensor(item).detach()
            if tensor.dtype != DTYPES[dtype]:
                raise ValueError(f"{name} is {dtype} there and {tensor.dtype} here")
            self._files.read_into(tensor, dtype, shard, item)
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Refuse to be chosen by a path."""
        return False
