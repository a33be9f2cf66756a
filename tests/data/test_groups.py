import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm.data.groups import read_groups
from dlrm.data.schema import Categorical, Meta, Split


@pytest.fixture
def meta(tmp_path):
    """Rows of two files, and a vocabulary in which id 1 stands for all unseen values."""
    columns = {"user": [2, 1, 2, 0], "name": ["b", None, "a", "b"], "age": [1.5, 2, 1.5, None]}
    table = pa.table(columns | {"tags": [[1], [], [2], [1]], "label": [0, 0, 1, 0]})
    for part in range(2):
        parquet.write_table(table.slice(2 * part, 2), tmp_path / f"{part}.parquet")
    user = Categorical(name="user", cardinality=3, oov_id=1)
    split = Split(files=("0.parquet", "1.parquet"), rows=4, positives=1)
    meta = Meta(dense=(), categorical=(user,), splits={"test": split})
    path = tmp_path / meta.vocabulary_file("user")
    path.parent.mkdir()
    listed = {"value": ["u7", None, "u3"], "id": [0, 1, 2], "count": [5, 4, 3]}
    parquet.write_table(pa.table(listed), path)
    return meta


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("user", ["u3", None, "u3", "u7"]),
        ("name", ["b", None, "a", "b"]),
        ("age", [1.5, 2.0, 1.5, None]),
    ],
)
def test_groups_are_the_values_of_a_column(meta, tmp_path, column, values):
    groups = read_groups(tmp_path, meta, ["test"], column)["test"]
    of_rows = groups.of_rows.tolist()
    assert [None if own < 0 else groups.names([own])[0] for own in of_rows] == values
    assert read_groups(tmp_path, meta, ["test"], None) == {}


def test_columns_without_groups_are_refused(meta, tmp_path):
    with pytest.raises(ValueError, match=r"0\.parquet: column 'tags' holds lists: group by"):
        read_groups(tmp_path, meta, ["test"], "tags")
    with pytest.raises(ValueError, match=r"no column 'users' to group by, did you mean 'user'"):
        read_groups(tmp_path, meta, ["test"], "users")
    (tmp_path / "1.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"1\.parquet is not a complete Parquet file"):
        read_groups(tmp_path, meta, ["test"], "age")
