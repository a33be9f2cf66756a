import codecs
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from harness import Limits, Outcome, run_case

from dlrm.data.prepare import criteo_rows
from dlrm.data.prepare.bad_rows import BAD_ROWS_KEPT
from dlrm.data.prepare.criteo_rows import COLUMNS, parse_block
from dlrm.data.prepare.hex_keys import MISSING, hex_keys, hex_strings
from dlrm.data.prepare.numbers import Scaling
from dlrm.data.prepare.text_blocks import TextBlock

GOOD = ["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))]


def block(*lines: bytes | list[str], end: bytes = b"\n") -> TextBlock:
    data = end.join(x if isinstance(x, bytes) else "\t".join(x).encode() for x in lines)
    return TextBlock(path=Path("day_0"), first_line=11, lines=len(lines), data=data, consumed=0)


def replaced(column: str, value: str) -> list[str]:
    row = list(GOOD)
    row[COLUMNS.index(column)] = value
    return row


def keys(batch: pa.RecordBatch, name: str) -> list[int]:
    return batch[name].dictionary_decode().to_pylist()


def test_a_bad_row_of_long_numbers_is_found_at_once():
    """Not by trying every way to read 13 numbers of many digits: that takes years."""
    row = ["0", *["9" * 30] * 13, *["0a"] * 25, "xyz"]
    batch, _, found = parse_block(block(row))
    (bad,) = found.first
    assert len(batch) == 0
    assert "C26" in bad["message"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_good_rows(end):
    batch, _, bad = parse_block(
        block(GOOD, replaced("C3", "ffffffff"), replaced("C3", ""), end=end)
    )
    assert not bad.kinds
    assert batch.schema.names == list(COLUMNS)
    assert batch["label"].to_pylist() == [1, 1, 1]
    assert keys(batch, "C3") == [2, 0xFFFFFFFF, MISSING]
    assert keys(batch, "C26") == [25, 25, 25]
    assert batch["I13"].to_numpy() == pytest.approx(np.full(3, math.log(13)), rel=1e-7)


def test_a_label_and_nothing_else():
    batch, _, bad = parse_block(block(["0", *[""] * 39]))
    assert not bad.kinds
    assert [batch[name][0].as_py() for name in ("label", "I1", "I13")] == [0, 0, 0]
    assert keys(batch, "C1") == [MISSING]


BAD = [
    (b"", "too few columns", "1 columns, a row has 40: ''"),
    (GOOD[:-1], "too few columns", "39 columns, a row has 40: '1\\t0\\t1"),
    ([*GOOD, "1"], "too many columns", "41 columns, a row has 40"),
    (replaced("label", "2"), "label not 0 or 1", "label is '2', must be 0 or 1"),
    (replaced("label", ""), "label not 0 or 1", "label is '', must be 0 or 1"),
    (replaced("label", "01"), "label not 0 or 1", "label is '01', must be 0 or 1"),
    (replaced("I4", "four"), "not a number", "I4 is 'four', must be a number or empty"),
    (replaced("I4", "0x10"), "not a number", "I4 is '0x10'"),
    (replaced("I4", "nan"), "not a number", "I4 is 'nan'"),
    (replaced("I4", "-inf"), "not a number", "I4 is '-inf'"),
    (replaced("I4", "-1e400"), "not a number", "I4 is '-1e400', beyond the range of float64"),
    (replaced("I4", "1\r2"), "not a number", "I4 is '1\\r2'"),
    (replaced("C7", "xyz"), "not hex", "C7 is 'xyz', must be 1 to 8 hex digits or empty"),
    (replaced("C7", "0123456g"), "not hex", "C7 is '0123456g'"),
    (replaced("C7", "@1234567"), "not hex", "C7 is '@1234567'"),
    (replaced("C7", "012345678"), "not hex", "C7 is '012345678'"),
    (replaced("C7", "-1"), "not hex", "C7 is '-1'"),
    (replaced("C7", "é"), "not hex", "C7 is 'é'"),
    (replaced("C7", "f" * 99), "not hex", f"C7 is '{'f' * 40}...'"),
    (b"\xff" + "\t".join(GOOD).encode(), "invalid UTF-8", "byte 1 (0xff) is not UTF-8"),
]


@pytest.mark.parametrize(("line", "kind", "message"), BAD)
def test_bad_rows_are_named_and_left_out(line, kind, message):
    batch, _, bad = parse_block(block(GOOD, GOOD, line, replaced("C1", "5")))
    assert keys(batch, "C1") == [0, 0, 5]
    (row,) = bad.first
    assert bad.kinds == {kind: 1}
    assert (row["line"], row["kind"]) == (3, kind)
    assert message in row["message"]


def test_a_byte_order_mark_is_left_out_alone_and_beside_bad_rows():
    first = codecs.BOM_UTF8 + "\t".join(GOOD).encode()
    for lines, count in (((first, GOOD), 0), ((first, GOOD, b"bad"), 1)):
        batch, _, bad = parse_block(block(*lines))
        assert batch.num_rows == 2
        assert bad.kinds.total() == len(bad.first) == count


def test_nothing_but_bad_rows():
    batch, _, bad = parse_block(block(*(line for line, _, _ in BAD)))
    assert batch.num_rows == 0
    assert [row["kind"] for row in bad.first] == [kind for _, kind, _ in BAD[:BAD_ROWS_KEPT]]
    assert [row["line"] for row in bad.first] == list(range(1, 1 + BAD_ROWS_KEPT))
    assert bad.kinds == Counter(kind for _, kind, _ in BAD)


def test_the_first_bad_rows_in_order_and_a_count_of_all(monkeypatch):
    """Also where the block is looked at in many pieces, which lines of any length may exceed."""
    monkeypatch.setattr(criteo_rows, "PIECE_BYTES", 300)
    kinds = [
        ("too few columns", b"1"),
        ("too many columns", b"\t" * 50),
        ("not hex", replaced("C1", "x")),
    ]
    kinds += [("good", GOOD), ("too few columns", b"a" * 1000), ("too few columns", b"")]
    lines = random.Random(1).choices(kinds, k=400)
    batch, _, bad = parse_block(block(*(line for _, line in lines)))
    expected = [(1 + i, kind) for i, (kind, _) in enumerate(lines) if kind != "good"]
    assert [(row["line"], row["kind"]) for row in bad.first] == expected[:BAD_ROWS_KEPT]
    assert bad.kinds == Counter(kind for _, kind in expected)
    assert batch.num_rows == 400 - len(expected)


@pytest.mark.parametrize(
    "line",
    [b"\n", b"1\n", b"\t" * 99 + b"\n", b"0" + b"\t" * 39 + b"x\n"],
    ids=["empty", "short", "long", "complete"],
)
def test_a_block_of_bad_rows_takes_memory_like_the_block(line):
    """Not an object for each of 4 million rows."""
    lines = (4 << 20) // len(line)
    data = TextBlock(path=Path("x"), first_line=1, lines=lines, data=line * lines, consumed=0)

    def run():
        batch, _, bad = parse_block(data)
        assert bad.kinds.total() == lines
        assert (batch.num_rows, len(bad.first)) == (0, BAD_ROWS_KEPT)
        return Outcome.REFUSED

    result = run_case(run, Limits(memory=120 << 20))
    assert result.outcome == Outcome.REFUSED, result.detail


@pytest.mark.parametrize("value", ["-1", "007", " 5 ", "+5", "1.5", ".5", "2.", "1e3", "1E-3"])
def test_numbers_are_read_alike_beside_bad_rows(value):
    alone, _, bad = parse_block(block(replaced("I2", value)))
    assert not bad.kinds
    beside, _, bad = parse_block(block(replaced("I2", value), b"bad"))
    assert len(bad.first) == 1
    assert alone["I2"] == beside["I2"]
    assert alone["I2"][0].as_py() == pytest.approx(math.log(max(float(value), 0) + 1))


@pytest.mark.parametrize("transform", ["log", "log3"])
def test_numbers_are_scaled_as_those_of_a_table(transform):
    texts = ["", "-7", "-3", "-2", "0", "1", "1e300"]
    rows = [replaced("I2", text) for text in texts]
    batch, _, _ = parse_block(block(*rows), transform)
    numbers = np.array([float(text or "nan") for text in texts])
    assert batch["I2"].to_pylist() == Scaling(transform=transform).apply(numbers).tolist()
    top = math.log(np.finfo(np.float32).max)
    if transform == "log":
        expected = [0, 0, 0, 0, 0, math.log(2), top]
    else:
        expected = [math.log(3), 0, 0, 0, math.log(3), math.log(4), top]
    assert batch["I2"].to_pylist() == pytest.approx(expected, rel=1e-6)


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
    assert strings.to_pylist() == [
        "",
        "00000000",
        "00000001",
        "80000000",
        "ffffffff",
        "",
        "00abcdef",
    ]
    assert hex_keys(strings.cast(pa.binary())).tolist() == given.tolist()
