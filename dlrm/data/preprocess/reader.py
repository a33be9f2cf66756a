"""Raw log files, plain or compressed with gzip or zstd, as blocks of complete lines."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BLOCK_BYTES = 16 << 20  # 70,000 rows of Criteo: fastest to parse, because it fits the caches
READ_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A bad row, or a bad end of a file."""

    file: str
    line: int
    """Counted from 1; 0 for the file as a whole."""
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}{f', line {self.line}' if self.line else ''}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Consecutive complete lines of one file."""

    path: Path
    first_line: int
    """Number of the first line in the file, counted from 1."""
    lines: int
    data: bytes
    consumed: int
    """Bytes of the file (before decompression) read up to here, for progress."""
    problem: BadRow | None = None
    """What ended the file after these lines, if it is damaged or empty."""


class RawFile:
    """One input file, read once from start to end; its SHA-256 is computed on the way.

    Args:
        path: lines of text, plain or compressed with gzip or zstd, of one or several members.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._consumed = 0
        self._pieces = self._read()

    def blocks(
        self, limit: int | None = None, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[RawBlock]:
        """Yield the first ``limit`` lines, in blocks that depend only on the content.

        An empty, truncated or damaged file yields every complete line, and its last block has a
        ``problem``.

        Raises:
            ValueError: there is no line end within ``block_bytes`` bytes.
        """
        done = 0
        for data, damage in _whole_lines(self.path, self._decompressed(), block_bytes):
            lines = int(np.count_nonzero(_line_ends(data)))
            lines += bool(data and not data.endswith(b"\n"))
            if limit is not None and done + lines > limit:
                lines = limit - done
                data, damage = _first_lines(data, lines), None
            problem = None
            if damage is not None:
                problem = self._problem(
                    "truncated file",
                    f"the file is truncated or damaged after line {done + lines} ({damage})",
                )
            elif not data and not done:
                problem = self._problem("empty file", "the file is empty")
            elif not data:
                return
            yield RawBlock(
                path=self.path,
                first_line=done + 1,
                lines=lines,
                data=data,
                consumed=self._consumed,
                problem=problem,
            )
            done += lines
            if done == limit:
                return

    def sha256(self) -> str:
        """SHA-256 of the whole file; reads to the end if the blocks did not."""
        for _ in self._pieces:
            pass
        return self._digest.hexdigest()

    def _problem(self, kind: str, message: str) -> BadRow:
        return BadRow(file=str(self.path), line=0, kind=kind, message=message)

    def _read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                self._digest.update(piece)
                self._consumed += len(piece)
                yield piece

    def _decompressed(self) -> Iterator[bytes]:
        first = next(self._pieces, b"")
        if first.startswith(GZIP_MAGIC):  # by content, whatever the suffix
            yield from _gunzip(first, self._pieces)
        elif first.startswith(ZSTD_MAGIC):
            yield from _unzstd(first, self._pieces)
        else:
            yield first
            yield from self._pieces


def _whole_lines(
    path: Path, chunks: Iterator[bytes], block_bytes: int
) -> Iterator[tuple[bytes, Exception | None]]:
    """Blocks of whole lines, the last with the error that ended the input, if any."""
    buffer, damage = bytearray(), None
    try:
        for chunk in chunks:
            buffer += chunk
            while len(buffer) >= block_bytes:
                end = buffer.rfind(b"\n", 0, block_bytes) + 1
                if not end:
                    raise ValueError(
                        f"{path}: no line end in {block_bytes:,} bytes; the input must be "
                        "tab-separated text, one row a line (unpack archives first)"
                    )
                yield _take(buffer, end), None
    except (EOFError, OSError, zlib.error) as error:
        damage = error
        del buffer[buffer.rfind(b"\n") + 1 :]  # this line may be incomplete
    yield bytes(buffer), damage


def _take(buffer: bytearray, size: int) -> bytes:
    data = bytes(memoryview(buffer)[:size])
    del buffer[:size]
    return data


def _first_lines(data: bytes, lines: int) -> bytes:
    return data[: np.flatnonzero(_line_ends(data))[lines - 1] + 1]


def _line_ends(data: bytes) -> NDArray[np.bool]:
    return np.frombuffer(data, np.uint8) == ord("\n")  # counts 7 times as fast as bytes.count


_STEP = 1 << 12  # bytes decompressed at a time: an error loses at most these


def _gunzip(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress gzip members up to the last byte of the file (GzipFile drops the end)."""
    member = zlib.decompressobj(wbits=31)
    steps = (
        piece[start : start + _STEP]
        for piece in itertools.chain((first,), pieces)
        for start in range(0, len(piece), _STEP)
    )
    for piece in steps:
        while piece:
            if member.eof:
                piece = piece.lstrip(b"\0")  # members may be padded with zeros
                if not piece:
                    break
                member = zlib.decompressobj(wbits=31)
            yield member.decompress(piece)
            piece = member.unused_data
    if not member.eof:
        raise EOFError("the gzip stream ends early")


def _unzstd(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(_Joined(first, pieces), "r"), "zstd")
    while chunk := stream.read(_STEP):
        yield chunk


class _Joined:
    """Chunks of bytes as a file object, as far as pyarrow needs it."""

    closed = False

    def __init__(self, first: bytes, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = first

    def read(self, size: int) -> bytes:
        data = self._rest or next(self._pieces, b"")
        data, self._rest = data[:size], data[size:]
        return data

    def close(self) -> None:
        self.closed = True
