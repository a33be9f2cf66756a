"""Raw log files, plain or compressed, as blocks of complete lines."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BLOCK_BYTES = 16 << 20  # 70,000 rows of Criteo: fastest to parse, because it fits the caches
READ_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BZIP2_MAGIC = b"BZh"
ZSTD_CHECKSUM = 0b100  # in the byte after the magic number: the frame ends with a checksum


@dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Consecutive complete lines of one file."""

    path: Path
    lines: int
    data: bytes
    consumed: int
    """Bytes of the file (before decompression) read up to here, for progress."""


class BlockReader:
    """One input file, read once from start to end; its SHA-256 is computed on the way.

    A damaged compressed file is refused, whatever is to be done with bad rows: what is wrong with
    its rows can't be seen in them, and the checksum of a row comes at the end of its gzip member or
    zstd frame. Every row must come from one whose checksum is right, so nothing that was read
    before may be used if the file ends with an error.

    Args:
        path: lines of text, plain or compressed with gzip, bzip2 or zstd, in one or several parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _HashedFile(path)
        self._chunks = self._decompressed()

    def start(self, size: int) -> bytes:
        """The first ``size`` bytes of the text or a little more; the rest can't be read then.

        Raises:
            ValueError: a compressed file is damaged or ends early.
        """
        found = b""
        while len(found) < size and (chunk := next(self._chunks, b"")):
            found += chunk
        return found

    def blocks(
        self,
        limit: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        row_end: Callable[[bytearray, int], int] | None = None,
    ) -> Iterator[TextBlock]:
        """Yield the first ``limit`` lines, in blocks that depend only on the content; an empty file
        yields one block without lines.

        Args:
            row_end: where the last row of a buffer ends before a position, 0 if there is none;
                by default each line is a row.

        Raises:
            ValueError: a compressed file is damaged or ends early, there is no line end within
                ``block_bytes`` bytes, or the last row is not whole.
        """
        done = 0
        for data in _whole_lines(self.path, self._chunks, block_bytes, row_end or _line_end):
            lines = int(np.count_nonzero(_line_ends(data)))
            lines += bool(data and not data.endswith(b"\n"))
            if limit is not None and done + lines > limit:
                lines = limit - done
                data = data[: np.flatnonzero(_line_ends(data))[lines - 1] + 1]
            if not data and done:
                return
            yield TextBlock(path=self.path, lines=lines, data=data, consumed=self._file.consumed)
            done += lines
            if done == limit:
                return

    def sha256(self) -> str:
        """SHA-256 of the whole file, of which the blocks may be the first part.

        Raises:
            ValueError: a compressed file is damaged or ends early.
        """
        for _ in self._chunks:
            pass
        return self._file.digest.hexdigest()

    def _decompressed(self) -> Iterator[bytes]:
        with open(self.path, "rb") as start:
            magic = start.read(4)  # by content, whatever the suffix

        with self._file as file:
            stream: Any = file
            if magic.startswith(GZIP_MAGIC):
                stream = gzip.GzipFile(fileobj=file)
            elif magic == ZSTD_MAGIC or magic.startswith(BZIP2_MAGIC):
                codec = "zstd" if magic == ZSTD_MAGIC else "bz2"
                stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)

            try:
                while chunk := stream.read(READ_BYTES):
                    yield chunk
            except (OSError, EOFError, zlib.error) as error:
                if isinstance(error, OSError) and error.errno:  # it says nothing of the data
                    raise OSError(error.errno, error.strerror, str(self.path)) from None
                raise ValueError(
                    f"{self.path}: the compressed data is damaged or cut off before byte "
                    f"{file.consumed + 1:,} ({error}), and corrupt rows cannot be detected, even "
                    "with --bad-rows skip: copy the file again, or unpack what is left of it and "
                    "give that"
                ) from None


class _HashedFile(io.FileIO):
    """A file whose SHA-256 is computed while it is read from start to end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.digest = hashlib.sha256()
        self.consumed = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        self.digest.update(piece)
        self.consumed += len(piece)
        return piece


def is_unchecked_zstd(path: Path) -> bool:
    """Whether a file is compressed with zstd, of which the first frame has no checksum."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(5)
    return start.startswith(ZSTD_MAGIC) and len(start) == 5 and not start[4] & ZSTD_CHECKSUM


def _whole_lines(
    path: Path,
    chunks: Iterator[bytes],
    block_bytes: int,
    row_end: Callable[[bytearray, int], int],
) -> Iterator[bytes]:
    """Blocks of whole rows; the last may be empty."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= block_bytes:
            end = row_end(buffer, block_bytes)
            if not end:
                raise ValueError(
                    f"{path}: no line end in {block_bytes:,} bytes; the input must be "
                    "text in rows: unpack archives first (or is a quote never closed?)"
                )
            yield bytes(memoryview(buffer)[:end])
            del buffer[:end]

    # The last line need not have an end.
    data = bytes(buffer)
    buffer += b"" if data.endswith(b"\n") else b"\n"
    end = row_end(buffer, len(buffer))
    if end < len(buffer):
        raise ValueError(
            f"{path}: a quote is never closed, in the row that begins "
            f"{data[end : end + 40].decode(errors='replace')!r}; correct it, or set quotes: false "
            "in the YAML if quotes are ordinary characters"
        )
    yield data


def _line_end(buffer: bytearray, limit: int) -> int:
    return buffer.rfind(b"\n", 0, limit) + 1


def _line_ends(data: bytes) -> NDArray[np.bool]:
    return np.frombuffer(data, np.uint8) == ord("\n")  # counts 7 times as fast as bytes.count
