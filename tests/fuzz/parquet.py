"""Fuzzes the reading of Parquet: python tests/fuzz/parquet.py --seed 1 --count 1000

Bytes are changed in the files of prepared data, and in files of another program before they are
described. What the loader yields must be as from the unchanged files, or the file must be refused.
Only damage to files without checksums may be accepted, as a note says that they have none.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from harness import Case, Limits, Outcome, flip_bits, main, mutate, refusal, run_case, scratch

import numpy as np  # isort: skip
import pandas as pd  # isort: skip
import pyarrow as pa  # isort: skip
import pyarrow.parquet as pq  # isort: skip
import torch  # isort: skip

from dlrm.data.criteo import Options, prepare
from dlrm.data.frequencies import read_frequencies
from dlrm.data.loader import BatchLoader
from dlrm.data.schema import SPLITS, Meta
from scripts import describe_parquet

DESCRIBE = ["--train", "train.parquet", "--test", "test.parquet", "--label", "clicked"]


def loaded(directory: Path) -> list[torch.Tensor]:
    """All rows that the loader yields."""
    meta, tensors = Meta.read(directory), []
    for split in SPLITS:
        if meta.has_rows(split):
            for batch in BatchLoader(directory, split, batch_size=64):
                offsets = [] if batch.offsets is None else [batch.offsets]
                tensors += [batch.dense, batch.ids, batch.labels, *offsets]
    return tensors


def frequencies(directory: Path) -> list[torch.Tensor]:
    """How often each id occurs."""
    return read_frequencies(directory, Meta.read(directory))


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@cache
def prepared() -> tuple[Path, list[torch.Tensor], list[torch.Tensor]]:
    """Prepared data, its rows and frequencies."""
    place = scratch()
    rng, raw = random.Random(5), place / "raw"
    with raw.open("w") as file:
        for _ in range(600):
            numbers = [rng.choice(("", str(rng.randrange(-3, 10**6)))) for _ in range(13)]
            keys = [rng.choice(("", f"{int(rng.paretovariate(1)):x}")) for _ in range(26)]
            print(rng.choice("01"), *numbers, *keys, sep="\t", file=file)
    prepare([raw], place / "data", Options(split=("0.6", "0.2", "0.2")), progress=False)
    return place, loaded(place / "data"), frequencies(place / "data")


def damaged(rng: random.Random, path: Path) -> str:
    """Change a file; a change of its end, where the metadata is, is as likely as of the rest."""
    data = path.read_bytes()
    if rng.random() < 0.4:
        footer = int.from_bytes(data[-8:-4], "little") + 8
        what, changed = "footer", data[:-footer] + flip_bits(rng, data[-footer:], 2)
    else:
        what, changed = mutate(rng, data)
    path.unlink()  # it may be linked to the original
    path.write_bytes(changed)
    return what


def prepared_case(rng: random.Random, directory: Path) -> Case:
    """Prepared data with a changed file, read by the loader."""
    original, rows, counts = prepared()
    data = directory / "data"
    shutil.copytree(original / "data", data, copy_function=os.link)
    names = ("train", "train", "val", "test", "vocabulary/C1", "vocabulary/C9")
    path = data / f"{rng.choice(names)}.parquet"
    kind = "rows" if path.parent == data else "vocabulary"
    what = damaged(rng, path)

    def run() -> Outcome:
        same = equal(loaded(data), rows) and equal(frequencies(data), counts)
        return Outcome.EQUAL if same else Outcome.SILENT

    return Case(what=f"{kind} {what}", run=run, size=path.stat().st_size)


@cache
def foreign(variant: int) -> tuple[Path, list[torch.Tensor]]:
    """Files as other programs write them, which differ by variant, and their rows."""
    place, rng = scratch(), np.random.default_rng(variant)
    for name, rows in (("train", 400), ("test", 100)):
        table = pa.Table.from_pandas(
            pd.DataFrame(
                {
                    "clicked": np.arange(rows) % 4 == 0,
                    "price": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows)),
                    "age": pd.array(rng.integers(0, 90, rows), "Int16"),
                    "item": rng.integers(0, 40, rows),
                    "shop": pd.array(
                        [None if i % 50 == 7 else i % 9 for i in range(rows)], "Int32"
                    ),
                    "tags": [[i % 12] * (i % 3) for i in range(rows)],
                    "title": "words",
                }
            ),
            preserve_index=False,
        )
        if variant & 8:
            table = table.drop_columns("tags")
        pq.write_table(
            table,
            place / f"{name}.parquet",
            row_group_size=150,
            write_page_checksum=bool(variant & 1),
            use_dictionary=bool(variant & 2),
            data_page_version="2.0" if variant & 4 else "1.0",
            compression=("snappy", "zstd", "none", "gzip")[variant // 2 % 4],
        )

    def run() -> Outcome:
        assert (refused := refusal(describe_parquet.main, place, *DESCRIBE)) is None, refused
        return Outcome.EQUAL

    result = run_case(run, Limits(seconds=200))
    assert result.outcome == Outcome.EQUAL, result.detail
    return place, loaded(place)


def foreign_case(rng: random.Random, directory: Path) -> Case:
    """A file of another program that was changed before it is described and read."""
    variant = rng.randrange(16)
    original, expected = foreign(variant)
    data = directory / "data"
    shutil.copytree(original, data, ignore=shutil.ignore_patterns("meta.json"))
    path = data / rng.choice(("train.parquet", "test.parquet"))
    what, checked = damaged(rng, path), bool(variant & 1)

    def run() -> Outcome:
        if refusal(describe_parquet.main, data, *DESCRIBE):
            return Outcome.REFUSED
        if equal(loaded(data), expected):
            return Outcome.EQUAL
        return Outcome.SILENT if checked else Outcome.NOTED

    kind = "checksums" if checked else "no checksums"
    return Case(what=f"{kind}, {what}", run=run, size=path.stat().st_size)


KINDS = {"prepared": prepared_case, "foreign": foreign_case}

if __name__ == "__main__":
    sys.exit(main(KINDS))
