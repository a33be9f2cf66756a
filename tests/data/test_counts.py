import pyarrow as pa
from pyarrow import parquet

from dlrm.data.counts import read_counts
from dlrm.data.schema import Categorical, Meta


def test_counts_by_id_and_none_without_vocabulary(tmp_path):
    column = Categorical(name="C1", cardinality=4)
    meta = Meta(dense=(), categorical=(column,), splits={})
    assert read_counts(tmp_path, meta) is None
    path = tmp_path / meta.vocabulary_file("C1")
    path.parent.mkdir()
    table = {"value": ["b", "a", None], "id": [0, 1, 3], "count": [9, 5, 2]}
    parquet.write_table(pa.table(table), path)
    counts = read_counts(tmp_path, meta)
    assert [c.tolist() for c in counts] == [[9, 5, 0, 2]]
