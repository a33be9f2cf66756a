import json

import pytest

from dlrm.data.schema import Categorical, Meta, Split


def described():
    """The description of a small data set."""
    return Meta(
        dense=("I1",),
        categorical=(Categorical(name="C1", cardinality=4, oov_id=3),),
        splits={"train": Split(files=("train.parquet",), rows=9, positives=2)},
        options={"split": "days"},
        planted={"train": {"auc": 0.8}, "val": {}},
    )


def test_what_is_written_is_read(tmp_path):
    described().write(tmp_path)
    assert Meta.read(tmp_path) == described()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["dense"], "I1", r"dense is 'I1', it must be a list"),
        (["categorical"], [], r"there is no categorical column"),
        (["categorical", 0, "cardinality"], "4", r"column 'C1' has cardinality '4'"),
        (["categorical", 0, "cardinality"], 2**63, r"column 'C1' has cardinality 9223"),
        (["categorical", 0, "oov_id"], 4, r"column 'C1' has oov_id 4"),
        (["categorical", 0, "oov_id"], "3", r"column 'C1' has oov_id '3'"),
        (["categorical", 0, "multi_hot"], None, r"column 'C1' has multi_hot None"),
        (["splits", "train", "rows"], 9.0, r"split 'train' has rows 9.0"),
        (["splits", "train", "files"], "train.parquet", r"split 'train' has files 'train.parquet'"),
        (["splits", "train", "files"], [1], r"split 'train' has files \(1,\)"),
        (["options"], None, r"options is None"),
        (["planted"], [], r"planted is \[\]"),
        (["planted", "val"], 0.8, r"split 'val' has planted 0.8"),
        (["planted", "train"], {"auc": None}, r"split 'train' has planted \{'auc': None\}"),
    ],
)
def test_what_a_hand_may_have_written_is_told(tmp_path, place, value, message):
    path = described().write(tmp_path)
    content = json.loads(path.read_text())
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"meta.json is not a meta file: {message}"):
        Meta.read(tmp_path)
