from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm.data import synthetic
from dlrm.data.frequencies import count_ids, read_frequencies
from dlrm.data.schema import DESCRIBED, HASHED, Categorical, Meta
from tests.kit import write_split


def write(directory, ids, bags, *, groups=1):
    """Training rows of a one-hot column behind a multi-hot one; returns their description."""
    columns = {"label": [True] * len(ids), "bags": bags, "ids": ids}
    tables = [
        Categorical(name="bags", cardinality=3, multi_hot=True),
        Categorical(name="ids", cardinality=5),
    ]
    return write_split(directory, columns, tables, group=len(ids) // groups)


def write_vocabularies(directory, meta, table=None, **form):
    """Write a vocabulary, or an empty file, for each column; returns the path of the last."""
    for column in meta.categorical:
        path = directory / meta.vocabulary_file(column.name)
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pa.table(table), path, **form) if table else path.touch()
    return path


def vocabulary(directory, table, cardinality=4, **form):
    """Write the vocabulary of one column, or an empty file; returns its path and ``Meta``."""
    meta = Meta(dense=(), categorical=(Categorical(name="C1", cardinality=cardinality),), splits={})
    return write_vocabularies(directory, meta, table, **form), meta


def test_counts_are_those_of_the_vocabularies(tmp_path):
    table = {"value": ["b", "a", None], "id": [0, 1, 3], "count": [9, 5, 2]}
    meta = vocabulary(tmp_path, table)[1]
    assert [c.tolist() for c in read_frequencies(tmp_path, meta)] == [[9, 5, 0, 2]]


def test_vocabularies_beside_described_data_are_of_other_ids(tmp_path):
    meta = write(tmp_path, [4, 0, 0], [[0], [], [2, 2]])
    write_vocabularies(tmp_path, meta, {"value": ["b"], "id": [0], "count": [9]})
    assert [c.tolist() for c in read_frequencies(tmp_path, meta)] == [[9, 0, 0], [9, 0, 0, 0, 0]]
    described = replace(meta, options={"made_by": DESCRIBED})
    assert [c.tolist() for c in read_frequencies(tmp_path, described)] == [
        [1, 0, 2],
        [2, 0, 0, 0, 1],
    ]


def test_without_vocabularies_the_training_rows_are_counted(tmp_path):
    meta = write(tmp_path, [4, 0, 0, 2, 0, 4], [[0], [], [2, 2], None, [1, 0], [0]], groups=3)
    assert [c.tolist() for c in read_frequencies(tmp_path, meta)] == [[3, 1, 2], [3, 0, 1, 0, 2]]


def test_of_hashed_ids_those_that_occur_are_counted(tmp_path):
    big = 2**62
    tables = [
        Categorical(name="bags", cardinality=HASHED, multi_hot=True),
        Categorical(name="ids", cardinality=HASHED),
        Categorical(name="few", cardinality=3),
    ]
    columns = {
        "label": [True] * 4,
        "bags": [[big], [], [big, 5], None],
        "ids": [7, big, 7, 7],
        "few": [2, 0, 2, 2],
    }
    meta = write_split(tmp_path, columns, tables, group=2)
    write_vocabularies(tmp_path, meta)  # which a preparation writes without values
    found = [sorted(count.tolist()) for count in read_frequencies(tmp_path, meta)]
    assert found == [[1, 2], [1, 3], [0, 1, 3]]


def test_of_many_rows_evenly_spaced_groups_are_counted(tmp_path):
    meta = write(tmp_path, [0, 0, 1, 1, 2, 2, 3, 3], [[0]] * 8, groups=4)
    counts = count_ids(tmp_path, meta, most_rows=4)
    assert [c.tolist() for c in counts] == [[8, 0, 0], [4, 0, 4, 0, 0]]


def test_the_ids_of_a_training_split_are_counted_whole(tmp_path):
    synthetic.write(tmp_path / "data", rows=5000, cardinalities=[300] * 26, seed=1)
    meta = Meta.read(tmp_path / "data")
    files = [tmp_path / "data" / name for name in meta.splits["train"].files]
    column = np.concatenate([parquet.read_table(file)["C7"].to_numpy() for file in files])
    counts = read_frequencies(tmp_path / "data", meta)
    assert counts[6].tolist() == np.bincount(column, minlength=300).tolist()
    assert {int(count.sum()) for count in counts} == {meta.splits["train"].rows}


def test_more_ids_than_fit_in_memory_are_refused(tmp_path):
    meta = write(tmp_path, [4, 0, 0], [[0], [], [2, 2]])
    huge = replace(meta.categorical[1], cardinality=2**60)
    meta = replace(meta, categorical=(meta.categorical[0], huge))
    with pytest.raises(ValueError, match=r"do not fit in memory, most of them of 'ids'; renumber"):
        count_ids(tmp_path, meta)


def test_an_id_outside_its_table_is_named(tmp_path):
    meta = write(tmp_path, [0, 5], [[0], [0]])
    with pytest.raises(ValueError, match=r"column 'ids': value 1 is id 5, outside the table"):
        read_frequencies(tmp_path, meta)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"id": [0, 4], "count": [9, 5]}, r"lists ids 0 .. 4, but meta.json has a table of 4 rows"),
        (
            {"id": [0, -1], "count": [9, 5]},
            r"lists ids -1 .. 0, but meta.json has a table of 4 rows",
        ),
        ({"id": [0, 1]}, r"can't be read as a vocabulary"),
        ({"id": [0, 1], "count": ["many", "few"]}, r"can't be read as a vocabulary"),
        ({"id": [0, 1], "count": [9, None]}, r"can't be read as a vocabulary"),
        (None, r"can't be read as a vocabulary"),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path, table, message):
    meta = vocabulary(tmp_path, table)[1]
    with pytest.raises(ValueError, match=rf"C1.parquet {message}"):
        read_frequencies(tmp_path, meta)


def flip_a_bit(content, _):
    content[content.index((1050).to_bytes(8, "little"))] ^= 1


def retype_the_pages(content, first):
    for column in (0, 1):
        content[first.column(column).data_page_offset + 1] = 32  # of data it is 0


@pytest.mark.parametrize(
    ("change", "message"), [(flip_a_bit, "as a vocabulary"), (retype_the_pages, ".*0 of 100 rows")]
)
def test_a_changed_byte_of_a_vocabulary_is_found(change, message, tmp_path):
    table = {"id": range(100), "count": range(1000, 1100)}
    form = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    path, meta = vocabulary(tmp_path, table, 100, **form)
    content = bytearray(path.read_bytes())
    change(content, parquet.read_metadata(path).row_group(0))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"C1.parquet can't be read {message}"):
        read_frequencies(tmp_path, meta)
