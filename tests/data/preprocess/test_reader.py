import gzip
import hashlib
from pathlib import Path

import pyarrow as pa
import pytest

from dlrm.data.preprocess.reader import RawFile

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


@pytest.mark.parametrize("compress", [bytes, gzip.compress, gzip_members, zstd_frames])
@pytest.mark.parametrize("block_bytes", [1000, 10_000, 1 << 20])
def test_blocks_are_whole_lines_of_any_compression(tmp_path, compress, block_bytes):
    path = write(tmp_path / "raw", compress(LINES))
    file = RawFile(path)
    blocks = list(file.blocks(block_bytes=block_bytes))
    assert b"".join(block.data for block in blocks) == LINES
    line = 1
    for block in blocks:
        assert block.first_line == line
        assert block.lines == block.data.count(b"\n")
        assert len(block.data) <= block_bytes
        assert block.problem is None
        line += block.lines
    assert blocks[-1].consumed == path.stat().st_size
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_cuts_do_not_depend_on_compression(tmp_path):
    cuts = [
        [block.data for block in RawFile(write(tmp_path / "raw", data)).blocks(block_bytes=700)]
        for data in (LINES, gzip.compress(LINES), gzip_members(LINES), zstd_frames(LINES))
    ]
    assert all(cut == cuts[0] for cut in cuts)


@pytest.mark.parametrize("limit", [1, 7, 4999, 5000, 5001])
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_limit_and_checksum_of_the_whole_file(tmp_path, limit, block_bytes):
    file = RawFile(write(tmp_path / "raw", LINES))
    blocks = list(file.blocks(limit, block_bytes))
    assert b"".join(block.data for block in blocks) == b"".join(
        LINES.splitlines(keepends=True)[:limit]
    )
    assert sum(block.lines for block in blocks) == min(limit, 5000)
    assert file.sha256() == hashlib.sha256(LINES).hexdigest()


def test_last_line_needs_no_line_end(tmp_path):
    (block,) = RawFile(write(tmp_path / "raw", b"one\ntwo")).blocks()
    assert (block.data, block.lines) == (b"one\ntwo", 2)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_empty_file(tmp_path, compress):
    path = write(tmp_path / "raw", compress(b""))
    (block,) = RawFile(path).blocks()
    assert str(block.problem) == f"{path}: the file is empty"
    assert (block.problem.kind, block.lines) == ("empty file", 0)


@pytest.mark.parametrize(
    ("compress", "recovered"), [(gzip.compress, 0.7), (gzip_members, 0.7), (zstd_frames, 0.45)]
)
def test_truncated_file_yields_the_lines_before(tmp_path, compress, recovered):
    data = compress(LINES)
    path = write(tmp_path / "raw", data[: len(data) * 3 // 4])
    blocks = list(RawFile(path).blocks(block_bytes=10_000))
    whole = b"".join(block.data for block in blocks)
    assert LINES.startswith(whole)
    assert whole.endswith(b"\n")
    assert len(whole) > recovered * len(LINES)
    assert [block.problem for block in blocks[:-1]] == [None] * (len(blocks) - 1)
    lines = whole.count(b"\n")
    assert blocks[-1].problem.kind == "truncated file"
    assert f"{path}: the file is truncated or damaged after line {lines}" in str(blocks[-1].problem)


def test_damaged_gzip(tmp_path):
    data = bytearray(gzip.compress(LINES))
    data[-6] ^= 1  # in the check sum
    *_, last = RawFile(write(tmp_path / "raw", bytes(data))).blocks()
    assert last.problem.kind == "truncated file"


def test_no_line_end(tmp_path):
    path = write(tmp_path / "raw", bytes(2000))
    with pytest.raises(ValueError, match=r"raw: no line end in 1,000 bytes.*unpack archives"):
        list(RawFile(path).blocks(block_bytes=1000))
