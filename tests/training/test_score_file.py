"""Scores are written by a thread, in order and completely."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dlrm.training import score_file
from dlrm.training.score_file import write_batches


def batch(start, rows, name="row"):
    scores = np.random.default_rng(start).random(rows, np.float32)
    return pa.RecordBatch.from_pydict({name: np.arange(start, start + rows), "probability": scores})


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_batches_are_written_in_order_by_another_thread(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(score_file, "GROUP_ROWS", 100)
    threads, path = [], tmp_path / f"scores{suffix}"
    given = [batch(70 * turn, 70) for turn in range(15)] + [batch(1050, 3)]

    def batches():
        for own in given:
            threads.append({t.name for t in threading.enumerate()})
            yield own

    assert write_batches(batches(), path, suffix, path) == 1053
    found = pq.read_table(path) if suffix == ".parquet" else pa.csv.read_csv(path)
    assert found["row"].to_pylist() == list(range(1053))
    expected = pa.Table.from_batches(given)["probability"].to_pylist()
    assert np.array_equal(np.float32(found["probability"].to_pylist()), np.float32(expected))
    assert any("map-in-order" in name for name in threads[-1])
    if suffix == ".parquet":
        groups = pq.ParquetFile(path).metadata
        assert groups.num_row_groups > 5
        column = groups.row_group(0).column(1)
        assert not any("DICTIONARY" in encoding for encoding in column.encodings)


@pytest.mark.parametrize("parts", [1, 100])
def test_an_error_of_the_thread_is_that_of_the_program(parts, tmp_path, monkeypatch):
    """It comes at the end, or before the other parts."""
    monkeypatch.setattr(score_file, "GROUP_ROWS", 1)
    lists = pa.RecordBatch.from_pydict({"tags": [[1, 2]]})  # which CSV can't have
    done = []
    given = (done.append(1) or lists for _ in range(parts))
    with pytest.raises(ValueError, match=r"named\.csv can't be written: "):
        write_batches(given, tmp_path / "scores.csv", ".csv", tmp_path / "named.csv")
    assert len(done) < 10


def test_an_error_of_the_rows_ends_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(score_file, "GROUP_ROWS", 1)

    def batches():
        yield batch(0, 3)
        raise KeyError

    with pytest.raises(KeyError):
        write_batches(batches(), tmp_path / "scores.parquet", ".parquet", tmp_path)
    assert not [own for own in threading.enumerate() if own.name.startswith("map-in-order")]
