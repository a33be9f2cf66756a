"""The exported model that serve.py serves: its files are checked, copied into memory and loaded."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch._inductor.config
from serve_rows import one_line
from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20  # a manifest has some hundred bytes for each column
CHUNK = 16 << 20  # bytes of a file that a thread reads at a time
READERS = 4
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors by their names in a safetensors file."""


class Scorer:
    """An exported model that scores raw rows.

    Nothing of it remains in the files once it is loaded: they may then be changed or removed.

    Args:
        export: directory that dlrm export made.
        threads: threads of PyTorch for a batch.

    Raises:
        ValueError: it is no export, or a file is damaged.
        OSError: a file can't be read.
    """

    def __init__(self, export: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.manifest = read_manifest(export)
        if not self.manifest["raw_rows"]:
            raise ValueError(f"{export} can't read raw rows: its data was not made from any")

        weights_file = self.manifest["weights"]
        for name, digest in self.manifest["files"].items():
            if name == weights_file:
                weights = read_weights(export / name, digest)
            else:
                require_digest(export / name, digest)

        if "dlrm_reader" not in sys.modules:
            sys.path.insert(0, str(export))
        from dlrm_reader import InputReader

        self._reader = InputReader.load(export)
        if compiled := self.manifest["compiled"].get("cpu"):
            # Otherwise PyTorch spends seconds on compiling tests for this processor.
            torch._inductor.config.cpp.vec_isa_ok = True
            self._model = torch._inductor.aoti_load_package(str(export / compiled))
            self._weights = {name: weights[name] for name in self._model.get_constant_fqns()}
            self._model.load_constants(self._weights, check_full_update=True, user_managed=True)
        else:
            program = torch.export.load(export / self.manifest["program"])
            program.state_dict.update(weights)
            self._model = program.module()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read; others in a request are ignored."""
        return self._reader.transform.needed

    def score(self, rows: pa.Table) -> list[float]:
        """The probability of each row.

        Raises:
            ValueError: a column is missing, a value does not fit, or the result is no number.
        """
        if not len(rows):
            return []
        arrays = self._reader.arrays(rows)
        with torch.inference_mode():
            probabilities = self._model(*map(torch.from_numpy, arrays)).tolist()

        for number, probability in enumerate(probabilities, 1):
            if not math.isfinite(probability):
                raise ValueError(
                    f"row {number}: its probability is no number, as a value is too large"
                )
        return probabilities


def read_manifest(export: Path) -> dict[str, Any]:
    """The manifest of an export, with all entries that serving needs.

    Raises:
        ValueError: it is damaged, or of another format.
        OSError: it can't be read.
    """
    path = export / MANIFEST
    if not path.is_file():
        raise ValueError(f"{export} is no export: make one with dlrm export RUN EXPORT")
    try:
        with path.open("rb") as file:
            content = file.read(MANIFEST_BYTES + 1)
        if len(content) > MANIFEST_BYTES:
            raise ValueError(f"it has more than {MANIFEST_BYTES:,} bytes")
        manifest = json.loads(content)
        require_entries(manifest)
    except RecursionError:
        raise ValueError(f"{path} can't be read: it is nested too deep") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} can't be read: {one_line(error)}") from None
    return dict(manifest)


def require_entries(manifest: Any) -> None:
    """Check the entries of a manifest.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: one is missing or of another type.
    """
    if (manifest["format"], manifest["version"]) != ("dlrm export", 1):
        raise ValueError("its format or version is another one")
    types = {"run": str, "step": int, "tables": str, "raw_rows": bool, "weights": str}
    types |= {"program": str, "compiled": dict, "files": dict}
    for name, kind in types.items():
        if not isinstance(manifest[name], kind):
            raise TypeError(f"{name!r} is {manifest[name]!r}, it must be of type {kind.__name__}")

    files = manifest["files"]
    for name, digest in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names {name!r}, which is in another directory")
        if not isinstance(digest["bytes"], int) or not isinstance(digest["sha256"], str):
            raise TypeError(f"the digest of {name!r} is {digest!r}")
    for name in (manifest["weights"], manifest["program"], *manifest["compiled"].values()):
        if name not in files:
            raise ValueError(f"it has no digest of {name!r}")


def require_digest(path: Path, digest: dict[str, Any]) -> None:
    """Check that a file is the one that was exported.

    Raises:
        ValueError: it is another one.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest["sha256"]:
        raise ValueError(f"{path} is damaged, or not that of {MANIFEST}: copy it again")


def read_weights(path: Path, digest: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of this process.

    If they were mapped, a file that is overwritten would change the scores, and one that is
    truncated would end the process. Threads read the file while its digest is computed.

    Args:
        path: the file.
        digest: its ``bytes`` and ``sha256``.

    Raises:
        ValueError: it is another file than the digest's, or a weight is NaN or infinite.
        OSError: it can't be read.
    """
    damaged = f"{path} is damaged, or not that of {MANIFEST}: copy it again"
    if path.stat().st_size != digest["bytes"]:
        raise ValueError(damaged)
    content = torch.empty(digest["bytes"], dtype=torch.uint8)
    memory = memoryview(content.numpy())

    def read(start: int) -> memoryview:
        part = memory[start : start + CHUNK]
        with path.open("rb") as file:
            file.seek(start)
            file.readinto(part)
        return part

    found = hashlib.sha256()
    with ThreadPoolExecutor(READERS) as readers:
        for part in readers.map(read, range(0, len(memory), CHUNK)):
            found.update(part)
    if found.hexdigest() != digest["sha256"]:
        raise ValueError(damaged)

    tensors = tensors_in(content)
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if not torch.stack(value.aminmax()).isfinite().all():
            raise ValueError(f"{path}: {name} has a weight that is no finite number")
    return tensors


def tensors_in(content: Tensor) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file, which share their memory."""
    size = int.from_bytes(content[:8].numpy().tobytes(), "little")
    header = json.loads(content[8 : 8 + size].numpy().tobytes())
    header.pop("__metadata__", None)

    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = content[begin:end].view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
