"""Fuzzes the preparation of raw logs: python tests/fuzz/tsv.py --seed 1 --count 1000

Raw files of random rows are changed byte by byte, field by field, and in compressed form. What is
prepared from them must be what a plain reader of Python finds, with as many bad rows; a compressed
file that Python can't unpack must be refused.
"""

from __future__ import annotations

import gzip
import math
import random
import re
import sys
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from harness import Case, Outcome, main, mutate, refusal

import numpy as np  # isort: skip
import pyarrow.parquet as pq  # isort: skip

from dlrm.commands import prepare_criteo
from dlrm.data.prepare.criteo_rows import criteo_plan, open_log
from dlrm.data.prepare.infer import read_types
from dlrm.data.prepare.table_rows import TableRows
from dlrm.data.prepare.values import NUMBER_MISSING
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, Meta
from dlrm.utils.documents import read_json

Row = tuple[int, list[float], list[int | None]]
HEX = "0123456789abcdefABCDEF"
FIELDS = (
    *(b"", b"0", b"1", b"2", b"-1", b" 7 ", b"1e3", b"1e999", b"-0", b"nan", b"inf", b"1_0"),
    *(b"9" * 30, b"0" * 5000, b".", b"+.5", b"0x1", b"1,5", b'"1"', b"\xff", b"\xc3\xa9", b"\0"),
    *("\u0661".encode(), b"ffffffff", b"fffffffff", b"\r", b"a\rb", b" ", b"NULL", b"\\N"),
)


def plain_rows(data: bytes) -> tuple[list[Row], int]:
    """The good rows of a raw file, and the number of its bad ones, read in the plainest way."""
    lines = re.split(rb"[\r\n]+", data.removeprefix(b"\xef\xbb\xbf"))
    lines = [line for line in lines if line]
    rows = [row for line in lines if (row := plain_row(line))]
    return rows, len(lines) - len(rows)


def plain_row(line: bytes) -> Row | None:
    try:
        label, *fields = line.decode().split("\t")
        label = re.sub(r"\.0*$", "", label.strip()).lower()
        label = {"false": "0", "true": "1"}.get(label, label)
        if label not in ("0", "1") or len(fields) != 39:
            return None
        numbers = [plain_number(field) for field in fields[:13]]
        assert all(set(field) <= set(HEX) and len(field) <= 8 for field in fields[13:])
        return int(label), numbers, [int(field, 16) if field else None for field in fields[13:]]
    except (ValueError, AssertionError):
        return None


def plain_number(field: str) -> float:
    field = field.strip()
    if field in NUMBER_MISSING:
        return 0.0
    assert set(field) <= set("0123456789+-.eE ")
    value = float(field)
    assert math.isfinite(value)
    return math.log(min(max(value, 0.0), float(np.finfo(np.float32).max)) + 1)


def log_of(path: Path) -> TableRows:
    """The rows of a log, to be converted."""
    plan = criteo_plan({"dense_transform": "log1p"})
    file = open_log(path)
    return TableRows(files=[file], plan=plan, types=read_types(plan, [file]))


def prepared_rows(directory: Path) -> list[Row]:
    """The rows of a prepared directory, ids as the values of the vocabularies."""
    table = pq.read_table(directory / "train.parquet")
    columns: list[Sequence[object]] = []
    for name in CRITEO_CATEGORICAL:
        values = pq.read_table(directory / Meta.vocabulary_file(name))["value"].to_pylist()
        keys = [int(value, 16) if value else None for value in values]
        columns.append([keys[index] for index in table[name].to_pylist()])
    dense = zip(*(table[name].to_pylist() for name in CRITEO_DENSE), strict=True)
    ids = zip(*columns, strict=True)
    labels = table["label"].to_pylist()
    return [(*row[:1], [*row[1]], [*row[2]]) for row in zip(labels, dense, ids, strict=True)]


def same(found: Sequence[Row], expected: Sequence[Row]) -> bool:
    """Whether rows are equal; numbers to the precision of float32."""
    if [(label, ids) for label, _, ids in found] != [(label, ids) for label, _, ids in expected]:
        return False
    numbers = [np.array([row[1] for row in rows]) for rows in (found, expected)]
    return np.allclose(*numbers, rtol=1e-6, atol=1e-7)


def judge(path: Path, plain: bytes | None, bad_rows: str) -> Outcome:
    """Prepare a file, of which ``plain`` is the text, or None if it can't be unpacked."""
    output = path.with_name("out")
    expected, bad = ([], 0) if plain is None else plain_rows(plain)
    good = bool(expected) and not (bad and bad_rows == "stop")
    given = "--split", "1", "0", "0", "--vocabulary", "all", "--bad-rows", bad_rows
    refused = refusal(prepare_criteo.main, path, "--output", output, *given)
    assert refused is None or not good, f"good rows are refused: {refused}"
    if refused is not None:
        return Outcome.REFUSED
    skipped = read_json(output / "bad_rows.json")["skipped"]
    if not good or skipped != bad or not same(prepared_rows(output), expected):
        print(f"{skipped} rows skipped, should be {bad}")
        return Outcome.SILENT
    return Outcome.SKIPPED if bad else Outcome.EQUAL


def raw_file(rng: random.Random) -> bytes:
    """A raw file of a few random rows."""
    end = rng.choice((b"\n", b"\n", b"\n", b"\r\n"))
    lines = []
    for _ in range(rng.choice((1, 3, 30, 100))):
        numbers = [rng.choice(("", str(rng.randrange(-3, 10**6)))) for _ in CRITEO_DENSE]
        keys = [
            rng.choice(("", f"{rng.randrange(20):x}", f"{rng.getrandbits(32):08x}"))
            for _ in CRITEO_CATEGORICAL
        ]
        lines.append("\t".join([rng.choice("01"), *numbers, *keys]).encode())
    return end.join(lines) + rng.choice((end, end, b""))


def changed_fields(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A few fields or lines changed."""
    lines = [line.split(b"\t") for line in data.split(b"\n")]
    for _ in range(rng.choice((1, 1, 5))):
        line = rng.choice(lines)
        line[rng.randrange(len(line))] = rng.choice(FIELDS)
        if rng.random() < 0.2:
            line.insert(rng.randrange(len(line)), b"1")
        if rng.random() < 0.2:
            lines.insert(rng.randrange(len(lines)), [rng.choice((b"", b"\r", b"1", b"\t" * 38))])
    start = rng.choice((b"", b"", b"", b"\xef\xbb\xbf", b"\n"))
    return "fields", start + b"\n".join(b"\t".join(line) for line in lines)


def changed_text(rng: random.Random) -> tuple[str, bytes]:
    data = raw_file(rng)
    change = rng.choice((changed_fields, changed_fields, mutate))
    return ("none", data) if rng.random() < 0.05 else change(rng, data)


def compress(rng: random.Random, data: bytes) -> bytes:
    """``data`` as one to three gzip members."""
    cuts = [0, *sorted(rng.choices(range(len(data) + 1), k=rng.choice((0, 0, 2)))), len(data)]
    parts = [data[one:other] for one, other in pairwise(cuts)]
    return b"".join(gzip.compress(part, rng.choice((0, 1, 9)), mtime=0) for part in parts)


def unpacked(data: bytes) -> bytes | None:
    """The text of a file as Python's gzip reads it, None if it is damaged."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error):
        return None


def case(rng: random.Random, directory: Path, what: str, data: bytes) -> Case:
    path, bad_rows, plain = directory / "raw", rng.choice(("stop", "skip-all")), unpacked(data)
    path.write_bytes(data)
    run = partial(judge, path, plain, bad_rows)
    return Case(what=f"{what}, {bad_rows}", size=len(data), run=run)


def text(rng: random.Random, directory: Path) -> Case:
    """Text with changes."""
    return case(rng, directory, *changed_text(rng))


def gzipped(rng: random.Random, directory: Path) -> Case:
    """Text with changes, compressed; or compressed text with changes."""
    if rng.random() < 0.3:
        what, data = changed_text(rng)
        return case(rng, directory, f"text {what}", compress(rng, data))
    return case(rng, directory, *mutate(rng, compress(rng, raw_file(rng))))


def bomb(rng: random.Random, directory: Path) -> Case:
    """A little file that unpacks to 16 MB or more of bad rows."""
    line = rng.choice((b"\n", b"1\n", b"\t" * 39 + b"\n", b"0" + b"\t" * 39 + b"x\n", b"\t", b"\r"))
    data = zlib.compress(line * ((16 << 20) // len(line)), 9, wbits=31)
    path, bad_rows = directory / "raw", rng.choice(("stop", "skip-all"))
    path.write_bytes(data)
    run = partial(judge, path, None, bad_rows)
    return Case(what=f"{line[:1]!r} {len(line)}, {bad_rows}", size=len(data), run=run)


KINDS = {"text": text, "gzip": gzipped, "bomb": bomb}

if __name__ == "__main__":
    sys.exit(main(KINDS))
