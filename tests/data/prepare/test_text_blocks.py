import bz2
import gzip
import hashlib
from pathlib import Path

import pyarrow as pa
import pytest

from dlrm.data.prepare.text_blocks import BlockReader

LINES = b"".join(b"line %d of the file\n" % i for i in range(1, 5001))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def gzip_members(data: bytes) -> bytes:
    half = len(data) // 2  # in the middle of a line
    return gzip.compress(data[:half]) + gzip.compress(data[half:]) + bytes(100)


def zstd_frames(data: bytes) -> bytes:
    half = len(data) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


def bzip2_streams(data: bytes) -> bytes:
    return bz2.compress(data[:999]) + bz2.compress(data[999:])


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, gzip_members, zstd_frames, bzip2_streams]
)
@pytest.mark.parametrize("block_bytes", [1000, 10_000, 1 << 20])
def test_blocks_are_the_same_whole_lines_of_any_compression(tmp_path, compress, block_bytes):
    plain = list(BlockReader(write(tmp_path / "plain", LINES)).blocks(block_bytes=block_bytes))
    path = write(tmp_path / "raw", compress(LINES))
    file = BlockReader(path)
    blocks = list(file.blocks(block_bytes=block_bytes))
    assert [block.data for block in blocks] == [block.data for block in plain]
    assert b"".join(block.data for block in blocks) == LINES
    for block in blocks:
        assert block.lines == block.data.count(b"\n")
        assert len(block.data) <= block_bytes
    assert blocks[-1].consumed == path.stat().st_size
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("limit", [1, 7, 4999, 5000, 5001])
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_limit_and_checksum_of_the_whole_file(tmp_path, limit, block_bytes):
    file = BlockReader(write(tmp_path / "raw", LINES))
    blocks = list(file.blocks(limit, block_bytes))
    assert b"".join(block.data for block in blocks) == b"".join(
        LINES.splitlines(keepends=True)[:limit]
    )
    assert sum(block.lines for block in blocks) == min(limit, 5000)
    assert file.sha256() == hashlib.sha256(LINES).hexdigest()


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize(("text", "lines"), [(b"one\ntwo", 2), (b"", 0)])
def test_a_last_line_without_a_line_end_and_an_empty_file(tmp_path, compress, text, lines):
    (block,) = BlockReader(write(tmp_path / "raw", compress(text))).blocks()
    assert (block.data, block.lines) == (text, lines)


DAMAGED = "damaged or cut off .* even with --bad-rows skip: copy the file again"


@pytest.mark.parametrize("compress", [gzip.compress, gzip_members, zstd_frames])
def test_a_truncated_file_is_refused_at_any_limit(tmp_path, compress):
    data = compress(LINES)
    path = write(tmp_path / "raw", data[: len(data) * 3 // 4])

    def read(limit):
        file = BlockReader(path)
        list(file.blocks(limit, block_bytes=1000))
        return file.sha256()

    for limit in (10, None):
        with pytest.raises(ValueError, match=f"^{path}: .* {DAMAGED}"):
            read(limit)


@pytest.mark.parametrize("bit", range(0, 8 * 400, 97))
def test_no_row_of_a_damaged_gzip_is_silently_wrong(tmp_path, bit):
    """Whatever bit is flipped: the lines are right, or the file is refused."""
    data = bytearray(
        gzip.compress(LINES[:2000], mtime=0) + gzip.compress(LINES[2000:4000], mtime=0)
    )
    data[bit // 8 + 2] ^= 1 << bit % 8  # the first two bytes say that it is gzip
    file, read = BlockReader(write(tmp_path / "raw", bytes(data))), b""
    try:
        read = b"".join(block.data for block in file.blocks())
    except ValueError:
        return
    assert read == LINES[:4000]


@pytest.mark.parametrize("rest", [b"garbage", bytes(10) + b"garbage", b"\x1f"])
def test_garbage_after_the_last_member_is_refused(tmp_path, rest):
    path = write(tmp_path / "raw", gzip.compress(LINES) + rest)
    with pytest.raises(ValueError, match=DAMAGED):
        list(BlockReader(path).blocks())


def test_no_line_end(tmp_path):
    path = write(tmp_path / "raw", bytes(2000))
    with pytest.raises(ValueError, match=r"raw: no line end in 1,000 bytes.*unpack archives"):
        list(BlockReader(path).blocks(block_bytes=1000))
