"""Raw rows of Criteo and prepared ones, read in the plainest way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from dlrm.data.prepare.criteo_rows import criteo_plan, open_log
from dlrm.data.prepare.infer import read_types
from dlrm.data.prepare.table_rows import TableRows
from dlrm.data.prepare.values import NUMBER_MISSING
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from tests.kit import read_values

Row = tuple[int, list[float], list[int | None]]
HEX = "0123456789abcdefABCDEF"


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
        keys = [int(value, 16) if value else None for value in read_values(directory, name)]
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
