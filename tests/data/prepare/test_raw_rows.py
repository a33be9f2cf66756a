"""Raw rows, with and without a label, become what the preparation made of them."""

import gzip
import shutil

import pyarrow as pa
import pytest

from dlrm.data.criteo import Options, prepare
from dlrm.data.prepare.transform import Transform, transform_files
from tests.kit import criteo_rows, read_splits, write_criteo

BLOCK = 20_000


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    """A directory with raw rows and the same rows prepared, and the lines."""
    directory, rows = tmp_path_factory.mktemp("criteo"), criteo_rows(500)
    write_criteo(directory / "raw", rows)
    lines = ["\t".join(row) + "\n" for row in rows]
    options = Options(split=("0.8", "0.1", "0.1"), min_count=2, cap=50, dense_transform="log3")
    prepare([directory / "raw"], directory / "out", options, progress=False)
    return directory, lines


def test_rows_of_criteo_with_and_without_labels(criteo, tmp_path):
    directory, lines = criteo
    for file in transform_files(directory / "out"):  # all that a run needs
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / "out" / file, tmp_path / "run" / file)
    transform = Transform.load(tmp_path / "run")
    prepared = pa.concat_tables(read_splits(directory / "out").values())
    found = [rows for rows, *_ in transform.read([directory / "raw"], block_bytes=BLOCK)]
    assert len(found) > 2
    assert pa.Table.from_batches(found).equals(prepared)
    bare = tmp_path / "bare.gz"
    bare.write_bytes(gzip.compress("".join(line[2:] for line in lines).encode()))
    found = [rows for rows, *_ in transform.read([bare], block_bytes=BLOCK)]
    assert pa.Table.from_batches(found).equals(prepared.drop_columns(["label"]))


def test_rows_of_criteo_that_do_not_fit(criteo, tmp_path):
    directory, lines = criteo
    transform = Transform.load(directory / "out")
    path = tmp_path / "rows"
    for at, fields in ((0, 40), (2, 39)):
        path.write_text("".join(line[at:] for line in lines[:10]) + "what\n")
        with pytest.raises(ValueError, match=f"rows, row 11: 1 fields, a row has {fields}"):
            list(transform.read([path]))
    with pytest.raises(ValueError, match="rows has no column 'key'"):
        list(transform.read([path], keep=["key"]))
    path.write_text("what\n")
    with pytest.raises(ValueError, match=r"rows, row 1: 1 fields, a row has 40"):
        list(transform.read([path]))
    path.write_text("")
    with pytest.raises(ValueError, match="rows: the file is empty"):
        list(transform.read([path]))
    with pytest.raises(FileNotFoundError, match="none: no such file"):
        list(transform.read([tmp_path / "none"]))


def test_values_without_an_id(criteo, tmp_path):
    directory, lines = criteo
    prepare([directory / "raw"], tmp_path / "all", Options(vocabulary="all"), progress=False)
    path = tmp_path / "rows"
    fields = lines[0].split("\t")
    fields[14] = "ffffffff"
    path.write_text("\t".join(fields))
    with pytest.raises(ValueError, match="C1: a value has no id, as the data was prepared with"):
        list(Transform.load(tmp_path / "all").read([path]))


def test_data_that_was_not_made_from_raw_rows(criteo, tmp_path):
    directory, _ = criteo
    meta = (directory / "out" / "meta.json").read_text()
    (tmp_path / "meta.json").write_text(meta.replace("dense_transform", "x"))
    with pytest.raises(ValueError, match="was not made from raw rows"):
        Transform.load(tmp_path)
    with pytest.raises(ValueError, match="was not made from raw rows"):
        transform_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        Transform.load(tmp_path / "none")
