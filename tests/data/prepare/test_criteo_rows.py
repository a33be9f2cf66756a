import gzip

import numpy as np
import pyarrow as pa
import pytest
from harness import Limits, Outcome, refusal, run_case

from dlrm.commands import prepare_criteo
from dlrm.data.prepare.bad_rows import BAD_ROWS_KEPT
from dlrm.data.prepare.criteo_rows import COLUMNS
from dlrm.data.prepare.keys import MISSING, hex_keys, hex_strings
from tests.data.prepare.plain_criteo import log_of
from tests.kit import first

GOOD = ["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))]


@pytest.fixture
def convert(tmp_path):
    """Converts lines; returns the good rows and the report on bad ones."""

    def work(*lines: bytes | list[str], end: bytes = b"\n"):
        data = end.join(x if isinstance(x, bytes) else "\t".join(x).encode() for x in lines)
        (tmp_path / "log").write_bytes(data)
        source = log_of(tmp_path / "log")
        (part,) = source.parts(1 << 24)
        converted = source.convert(part, skip_bad=True)
        return converted.result[0], converted.bad

    return work


def replaced(column: str, value: str) -> list[str]:
    row = list(GOOD)
    row[COLUMNS.index(column)] = value
    return row


def keys(batch: pa.RecordBatch, name: str) -> list[int]:
    return batch[name].dictionary_decode().to_pylist()


FIELDS, LABEL = "not a row of the table", "column 'label'"
BAD = [
    (GOOD[:-1], FIELDS, "39 fields, a row has 40: '1\\t0\\t1"),
    ([*GOOD, "1"], FIELDS, "41 fields, a row has 40"),
    (replaced("label", "01"), LABEL, "the value is '01'; it must be 0 or 1"),
    (replaced("I4", "four"), "column 'I4'", "'four' is not a number"),
    (replaced("I4", "0x10"), "column 'I4'", "'0x10' is not a number"),
    (replaced("I4", "-1e400"), "column 'I4'", "-inf is not a finite number"),
    (replaced("C7", "0123456g"), "column 'C7'", "'0123456g' is not 1 to 8 hex digits"),
    (replaced("C7", "@1234567"), "column 'C7'", "'@1234567' is not"),
    (replaced("C7", "012345678"), "column 'C7'", "'012345678' is not"),
    (replaced("C7", "é"), "column 'C7'", "'é' is not"),
    (replaced("C7", "f" * 99), "column 'C7'", f"'{'f' * 39}... is not"),
    (b"\xff" + "\t".join(GOOD).encode(), LABEL, "byte 1 (0xff) is not UTF-8"),
    (b"1\t\xff", FIELDS, "2 fields, a row has 40: '1\\t\\\\xff'"),
]


@pytest.mark.parametrize(("line", "kind", "message"), BAD)
def test_bad_rows_are_named_and_left_out(line, kind, message, convert):
    batch, bad = convert(GOOD, GOOD, line, replaced("C1", "5"))
    assert keys(batch, "C1") == [0, 0, 5]
    (row,) = bad.first
    assert bad.kinds == {kind: 1}
    assert (row["row"], row["kind"]) == (3, kind)
    assert message in row["message"]


@pytest.mark.parametrize(
    ("line", "megabytes"),
    [
        *((b"1\t1\n", 80), (b"\t" * 99 + b"\n", 80)),
        *((b"\t" * 39 + b"\n", 160), (b"0" + b"\t" * 39 + b"x\n", 160)),  # of 40 columns
    ],
    ids=["short", "long", "no values", "complete"],
)
def test_a_block_of_bad_rows_takes_memory_like_the_block(line, megabytes, convert):
    """Not an object for each of a million rows."""
    lines = (4 << 20) // len(line)
    convert(line)  # what is imported for that counts no more

    def run():
        batch, bad = convert(line * lines)
        assert bad.kinds.total() == lines
        assert (batch.num_rows, len(bad.first)) == (0, BAD_ROWS_KEPT)
        return Outcome.REFUSED

    result = run_case(run, Limits(memory=megabytes << 20))
    assert result.outcome == Outcome.REFUSED, result.detail


@first("line", [b"\t", b"\n", b"1\n", b"0" + b"\t" * 39 + b"x\n", b"\r"], slow=pytest.mark.slow)
def test_a_bomb_of_bad_rows_is_refused_cheaply(line, tmp_path):
    """A little file that unpacks to 16 MB."""
    path = tmp_path / "raw"
    path.write_bytes(gzip.compress(line * ((16 << 20) // len(line))))
    given = path, "--output", tmp_path / "out", "--bad-rows", "skip-all", "--workers", 2

    def run():
        assert refusal(prepare_criteo.main, *given)
        return Outcome.REFUSED

    result = run_case(run, size=path.stat().st_size)
    assert result.outcome == Outcome.REFUSED, result.detail


def test_hex_of_all_digits_and_lengths():
    values = [b"", b"0", b"f", b"1a", b"ABCDEF", b"abcdef01", b"23456789", b"80000000", b"ffffFFFF"]
    expected = [int(value, 16) if value else MISSING for value in values]
    assert hex_keys(pa.array(values)).tolist() == expected
    assert hex_keys(pa.array([b"ffffffff", b"00000000"])).tolist() == [2**32 - 1, 0]
    assert hex_keys(pa.array(values).slice(3, 4)).tolist() == expected[3:7]
    assert hex_keys(pa.array([b"", b""])).tolist() == [MISSING, MISSING]
    assert hex_keys(pa.array([], pa.binary())).tolist() == []


def test_every_other_byte_is_no_hex_digit():
    for byte in range(256):
        value = pa.array([b"0000000" + bytes([byte])])
        if chr(byte) in "0123456789abcdefABCDEF":
            assert hex_keys(value).tolist() == [int(chr(byte), 16)]
        else:
            with pytest.raises(ValueError, match="hex"):
                hex_keys(value)


def test_hex_strings_are_the_way_back():
    given = np.array([MISSING, 0, 1, 2**31, 2**32 - 1, MISSING, 0xABCDEF], np.int64)
    strings = hex_strings(given)
    texts = ["", "00000000", "00000001", "80000000", "ffffffff", "", "00abcdef"]
    assert strings.to_pylist() == texts
    assert hex_keys(strings.cast(pa.binary())).tolist() == given.tolist()
