"""Rows of any text are parsed as a plain reader of Python does, wherever blocks end."""

import gzip

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm.data.criteo import Options, prepare
from dlrm.data.prepare.keys import MISSING
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from dlrm.utils.documents import read_json
from tests.data.prepare.plain_criteo import log_of, plain_rows, prepared_rows, same
from tests.kit import first

LETTERS = st.characters(codec="utf-8", exclude_characters="\n")
FIELDS = (
    *(b"", b"0", b"1", b"2", b"-1", b" 7 ", b"1e3", b"1e999", b"-0", b"nan", b"inf", b"1_0"),
    *(b"9" * 30, b"0" * 5000, b".", b"+.5", b"0x1", b"1,5", b'"1"', b"\xff", b"\xc3\xa9", b"\0"),
    *("\u0661".encode(), b"ffffffff", b"fffffffff", b"\r", b"a\rb", b" ", b"NULL", b"\\N"),
)
ANY = st.text(LETTERS, max_size=12).map(str.encode) | st.binary(max_size=6)
ANY |= st.sampled_from(FIELDS)
NUMBERS = st.one_of(
    st.just(""),
    st.integers(-(10**25), 10**25).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r" ?[+-]?[0-9]{1,4}(\.[0-9]{0,3})?([eE][+-]?[0-9]{1,3})? ?", fullmatch=True),
)
KEYS = st.just("") | st.from_regex(r"[0-9a-fA-F]{1,9}", fullmatch=True)
ROW = st.tuples(
    st.sampled_from("01"),
    st.lists(NUMBERS, min_size=13, max_size=13),
    st.lists(KEYS, min_size=26, max_size=26),
).map(lambda row: "\t".join([row[0], *row[1], *row[2]]).encode())


@st.composite
def files(draw):
    """The text of a file: good rows, some with a field changed, and other lines."""
    changed = st.tuples(ROW, st.integers(0, 39), ANY).map(
        lambda row: b"\t".join(
            row[2] if index == row[1] else field for index, field in enumerate(row[0].split(b"\t"))
        )
    )
    lines = draw(st.lists(ROW | changed | ANY, max_size=5))
    end = draw(st.sampled_from((b"\n", b"\r\n")))
    start = draw(st.sampled_from((b"", b"", b"\xef\xbb\xbf")))
    return start + b"".join(line + end for line in lines) + draw(st.just(b"") | ROW)


WHOLE = 1 << 24  # bytes of a block that all files fit into


def parsed(path, block_bytes):
    """The rows of a file, and the number of bad ones."""
    rows, bad = [], 0
    source = log_of(path)
    for part in source.parts(block_bytes):
        converted = source.convert(part, skip_bad=True)
        batch, bad = converted.result[0], bad + converted.bad.count
        names = CRITEO_CATEGORICAL
        keys = [batch[name].dictionary_decode().to_pylist() for name in names]
        keys = [[None if key == MISSING else key for key in column] for column in keys]
        dense = [batch[name].to_pylist() for name in CRITEO_DENSE]
        columns = batch["label"].to_pylist(), zip(*dense, strict=True), zip(*keys, strict=True)
        rows += [(label, [*d], [*k]) for label, d, k in zip(*columns, strict=True)]
    return rows, bad


def agree(found, data):
    expected = plain_rows(data)
    assert found[1] == expected[1]
    assert len(found[0]) == len(expected[0])
    assert not found[0] or same(found[0], expected[0])


@settings(max_examples=25, deadline=None)
@given(data=files(), bad_rows=st.sampled_from(("stop", "skip-all")))
def test_a_file_is_prepared_as_by_a_plain_reader(tmp_path_factory, data, bad_rows):
    """Its good rows, if none is bad or those are skipped, with a count of them."""
    path = tmp_path_factory.mktemp("raw") / "raw.gz"
    path.write_bytes(gzip.compress(data))
    rows, bad = plain_rows(data)
    options = Options(split=("1", "0", "0"), vocabulary="all", bad_rows=bad_rows)
    if not rows or (bad and bad_rows == "stop"):
        with pytest.raises(ValueError, match=r"raw\.gz") as refused:
            prepare([path], path.with_name("out"), options, progress=False)
        assert "\n" not in str(refused.value)
        return
    prepare([path], path.with_name("out"), options, progress=False)
    assert same(prepared_rows(path.with_name("out")), rows)
    assert read_json(path.with_name("out") / "bad_rows.json")["skipped"] == bad


@first("compression", ["gzip", "zstd", None], slow=pytest.mark.slow)
@settings(max_examples=40, deadline=None)
@given(data=files(), size=st.integers(600, 2000) | st.just(WHOLE), cut=st.floats(0, 1))
@example(data=b"0" + b"\t" * 39 + b"\r", size=WHOLE, cut=1)
@example(data=b"0" + b"\t " * 13 + b"\t" * 26 + b"\n", size=WHOLE, cut=1)
@example(data=b"0\t" + b"9" * 5000 + b"\t" * 38 + b"\n\n\n", size=WHOLE, cut=1)
def test_blocks_that_end_anywhere_are_parsed_as_by_a_plain_reader(
    tmp_path_factory, compression, data, size, cut
):
    members = data[: int(len(data) * cut)], data[int(len(data) * cut) :]
    if compression:
        pack = gzip.compress if compression == "gzip" else _zstd
        packed = b"".join(map(pack, members))
    else:
        packed = data
    path = tmp_path_factory.getbasetemp() / f"raw {compression}"
    path.write_bytes(packed)
    if max(map(len, data.split(b"\n"))) + 1 < size:
        agree(parsed(path, size) if data else ([], 0), data)


def _zstd(data):
    return pa.compress(data, "zstd", asbytes=True)
