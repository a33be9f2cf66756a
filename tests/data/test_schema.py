import json
from dataclasses import replace

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


def test_a_raw_file_in_place_of_a_prepared_directory(tmp_path):
    (tmp_path / "new.csv").write_text("C1,label\n1,0\n")
    with pytest.raises(ValueError, match=r"new.csv is a file: .* with --ids-of RUN\)"):
        Meta.read(tmp_path / "new.csv")


OUTSIDE = {
    "an absolute path": "{outside}/train.parquet",
    "the parent directory": "../outside/train.parquet",
    "the parent of a directory that does not exist": "none/../../outside/train.parquet",
    "a link to a file": "file.parquet",
    "a link to a directory": "folder/train.parquet",
    "the directory itself": ".",
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_files_outside_of_the_directory_are_read_only_on_request(tmp_path, kind):
    data, outside = tmp_path / "data", tmp_path / "outside"
    data.mkdir()
    outside.mkdir()
    (data / "file.parquet").symlink_to(outside / "train.parquet")
    (data / "folder").symlink_to(outside)
    name = OUTSIDE[kind].format(outside=outside)
    split = Split(files=("train.parquet", name), rows=9, positives=2)
    meta = replace(described(), splits={"train": split})
    meta.write(data)
    text = rf"meta.json lists {name!r}, which is not in .*data: .* --loader.allow_outside"
    with pytest.raises(ValueError, match=text):
        Meta.read(data)
    assert Meta.read(data, allow_outside=True) == meta


def test_files_in_a_directory_behind_a_link_are_inside(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    described().write(tmp_path / "data")
    assert Meta.read(tmp_path / "data") == described()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 500 + "]" * 500, "nested more than 32 deep"), ('{"\\ud800": 1}', "not valid Unicode")],
)
def test_a_meta_file_beyond_the_limits_is_refused(tmp_path, text, reason):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"meta\.json can't be read: .*{reason}; prepare the data"
    ):
        Meta.read(tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["dense"], "I1", r"dense is 'I1', it must be a list"),
        (["categorical"], [], r"there is no categorical column"),
        (["categorical", 0, "cardinality"], "4", r"0\.cardinality is '4', it must be a whole"),
        (["categorical", 0, "bag_size"], 2, r"0: column 'C1' has bag_size 2, and is not"),
        (["categorical", 0, "unseen"], "rwo", r"0\.unseen is 'rwo', did you mean 'row'"),
        (["categorical", 0, "cardinality"], 2**63, r"0\.cardinality is 9223\d+, it must be less"),
        (["categorical", 0, "oov_id"], 4, r"0: column 'C1' has oov_id 4 and cardinality 4"),
        (["categorical", 0, "oov_id"], "3", r"0\.oov_id is '3', it must be a whole"),
        (["categorical", 0, "multi_hot"], None, r"0\.multi_hot is None, it must be true"),
        (["splits", "train", "rows"], 9.0, r"splits\.train\.rows is 9\.0, it must be a whole"),
        (["splits", "train", "positives"], 10, r"splits\.train: it has 10 positives in 9 rows"),
        (["label"], ["label"], r"label is \['label'\], it must be text"),
        (["dense"], [1], r"dense\.0 is 1, it must be text"),
        (
            ["splits", "train", "files"],
            "train.parquet",
            r"train\.files is 'train.parquet', it must be a list",
        ),
        (["splits", "train", "files"], [1], r"train\.files\.0 is 1, it must be text"),
        (
            ["splits", "train", "files"],
            ["x" * 1001],
            r"train\.files\.0 is 'xxx.*xxx\.\.\., it must",
        ),
        (["label"], "x" * 1001, r"label is 'xxx.*xxx\.\.\., it must have at most 1000"),
        (["options"], None, r"options is None"),
        (["planted"], [], r"planted is \[\]"),
        (["planted", "val"], 0.8, r"planted\.val is 0\.8, it must hold names and values"),
        (["planted", "train"], {"auc": None}, r"planted\.train\.auc is None, it must be a number"),
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
    with pytest.raises(ValueError, match=rf"meta.json is not a meta file: .*{message}"):
        Meta.read(tmp_path)


def test_data_is_known_by_how_it_was_prepared_wherever_it_lies(tmp_path):
    meta = described()
    moved = Split(files=("a.parquet", "b.parquet"), rows=9, positives=2)
    assert replace(meta, splits={"train": moved}).preparation == meta.preparation
    meta.write(tmp_path)
    assert Meta.read(tmp_path).preparation == meta.preparation
    for change in (
        {"label": "clicked"},
        {"dense": ("I2",)},
        {"categorical": (Categorical(name="C1", cardinality=5, oov_id=3),)},
        {"splits": {"train": replace(moved, positives=3)}},
        {"options": {"split": "hours"}},
        {"inputs": ({"name": "log", "sha256": "0"},)},
    ):
        assert replace(meta, **change).preparation != meta.preparation, change
