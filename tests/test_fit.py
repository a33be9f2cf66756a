"""``dlrm.fit``: what a user of pandas types, and what comes of it."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dlrm

ROOT = Path(__file__).parents[1]
SMALL = {"model": {"bottom_mlp": [8], "top_mlp": [8]}, "batch_size": 64, "device": "cpu"}
SMALL |= {"progress": False}


def make_frame(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 20, rows)
    days = pd.to_timedelta(rng.integers(0, 30, rows), unit="D")
    return pd.DataFrame(
        {
            "user": [f"u{user}" for user in users],
            "price": rng.gamma(2.0, 10.0, rows),
            "when": pd.Timestamp("2024-01-01") + days,
            "colour": pd.Categorical(rng.choice(list("abc"), rows)),
            "tags": [list("xyz"[: user % 3]) for user in users],
            "clicked": rng.random(rows) < np.where(users < 10, 0.2, 0.7),
        }
    )


@pytest.fixture(scope="module")
def frame():
    return make_frame()


@pytest.fixture(scope="module")
def model(frame):
    return dlrm.fit(frame, "clicked", **SMALL)


def test_a_model_scores_rows_in_any_form(model, frame, tmp_path):
    scores = model.predict(frame)
    assert scores.shape == (400,)
    assert scores.dtype == np.float32
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "rows.parquet")
    for rows in (
        frame.drop(columns="clicked").assign(other=1),
        frame.to_dict("list"),
        frame.to_dict("records"),
        pa.Table.from_pandas(frame),
        tmp_path / "rows.parquet",
    ):
        assert (model.predict(rows) == scores).all()
    assert model.predict(frame.head(0)).shape == (0,)
    one = [{"user": "new"}, {"price": None, "user": None}]
    with pytest.raises(ValueError, match="the rows have no column 'when'"):
        model.predict(one)
    for kind in ("user", "tags"):
        with pytest.raises(ValueError, match=f"column '{kind}': it holds list.* not single values"):
            model.predict(frame.assign(**{kind: [[["a"]]] * 400}))


def test_bools_are_the_same_in_any_file(frame, tmp_path):
    frame = frame[["user", "clicked"]].assign(paid=frame["price"] > 20)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    model = dlrm.fit(tmp_path / "rows.csv", "clicked", **SMALL)
    assert (model.predict(frame) == model.predict(tmp_path / "rows.csv")).all()


def test_a_model_is_evaluated_saved_and_loaded(model, frame, tmp_path):
    found = model.evaluate(frame)
    assert 0 < found["auc"] < 1
    model.save(tmp_path / "model")
    again = dlrm.load(tmp_path / "model")
    assert again.evaluate(frame) == found
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "rows.parquet")
    assert again.evaluate(tmp_path / "rows.parquet") == pytest.approx(found)

    with pytest.raises(ValueError, match="model exists: choose another path, or pass overwrite"):
        again.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True)
    again.save(tmp_path / "model", overwrite=True)  # onto itself
    assert (dlrm.load(tmp_path / "model").predict(frame) == model.predict(frame)).all()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="mine exists: choose another path, or remove it"):
        model.save(tmp_path / "mine", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model", "rows.parquet"]

    with pytest.raises(ValueError, match="the rows have no column 'clicked'"):
        model.evaluate(frame.drop(columns="clicked"))
    with pytest.raises(ValueError, match="not all rows have a 'clicked'"):
        model.evaluate(
            frame.assign(clicked=frame["clicked"].astype("boolean").mask(frame.index == 3))
        )


def test_it_can_be_looked_at(model, frame):
    assert repr(model).startswith("<dlrm model of 2 numbers and 4 categories or lists (36 ids, ")
    assert len(repr(model)) < 200
    assert len(model.report().axes) == 2
    assert len(model.report(frame).axes) == 4
    assert model.report()._repr_png_().startswith(b"\x89PNG")


def test_settings_of_the_process_stay_as_they_were(frame):
    before = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
    dlrm.fit(frame, "clicked", **SMALL, deterministic=True, precision="tf32", max_steps=1)
    after = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
    assert before == after


def test_hash_is_a_kind_with_options_and_an_option_of_columns(frame):
    given = SMALL | {"max_steps": 1, "columns": {"tags": "drop"}}
    kind = {"emb": "hash", "hash": {"rows": 3}, "tables": {"threshold": 0}}
    by_kind, by_column = (dlrm.fit(frame, "clicked", **given | own) for own in (kind, {"hash": 4}))
    by_kind, by_column = by_kind.model.sparse_arch, by_column.model.sparse_arch
    assert by_column.num_embeddings[0] == 4 + 1 < by_kind.num_embeddings[0]
    ((group, slots),) = by_kind.embeddings()
    assert len(group.weight) == 3 * len(slots)


def test_it_is_the_run_of_the_commands(frame, tmp_path, run):
    frame.to_parquet(tmp_path / "rows.parquet")
    given = ["--label", "clicked", "--split", "0.9", "0.1", "0"]
    run("prepare_table", tmp_path / "rows.parquet", "--output", tmp_path / "data", *given)
    options = ["--model.bottom_mlp", "8", "--model.top_mlp", "8", "--batch_size", "64"]
    options += ["--device", "cpu", "--emb", "qr", "--tables.threshold", "0", "--epochs", "2"]
    run("train", "--data", tmp_path / "data", "--output", tmp_path, "--name", "run", *options)
    by_command = dlrm.load(tmp_path / "run").predict(frame)

    keywords = SMALL | {"emb": "qr", "tables": {"threshold": 0}, "epochs": 2}
    assert (dlrm.fit(frame, "clicked", **keywords).predict(frame) == by_command).all()
    kept = dlrm.fit(str(tmp_path / "data"), **keywords, output=tmp_path, name="kept")
    assert (kept.predict(frame) == by_command).all()
    metrics = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "kept")
    ]
    assert metrics[0]["metrics"]["val/auc"] == metrics[1]["metrics"]["val/auc"]
    with pytest.raises(ValueError, match="kept exists: choose another --name"):
        dlrm.fit(frame, "clicked", **keywords, output=tmp_path, name="kept")


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([0, 1], {}),
        ([0.0, 1.0], {}),
        (["no", "yes"], {"positive": "yes"}),
        ([-1, 1], {"positive": "1"}),
    ],
    ids=str,
)
def test_labels_may_be_any_two_values(frame, values, options):
    labels = np.where(frame["clicked"], values[1], values[0])
    model = dlrm.fit(frame.assign(clicked=labels), "clicked", **options, **SMALL, max_steps=1)
    assert 0 < model.evaluate(frame.assign(clicked=labels))["log_loss"] < 5


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.head(1),
        lambda frame: frame[["user", "clicked"]],
        lambda frame: frame.rename(columns={"user": 7}),
        lambda frame: frame.assign(none=None),
        lambda frame: frame[["price", "clicked"]],
        lambda frame: frame.assign(user=frame["user"].astype("string").mask(frame.index % 3 == 0)),
    ],
    ids=["a row", "a column", "number as name", "no value", "numbers alone", "gaps"],
)
def test_a_table_may_have_an_odd_shape(frame, change):
    table = change(frame)
    share = 0 if len(table) == 1 else 0.1
    scores = dlrm.fit(table, "clicked", **SMALL, max_steps=1, validation=share).predict(table)
    assert len(scores) == len(table)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (None, {"label": "click"}, "the data has no label 'click', did you mean 'clicked'"),
        (lambda frame: frame.head(0), {}, "the data has no rows"),
        (lambda frame: frame.head(1), {}, "the split leaves none for training"),
        (lambda frame: frame[["clicked"]], {}, "no column"),
        (lambda frame: frame.assign(clicked="x"), {}, "clicked"),
        (lambda frame: frame.assign(clicked=range(len(frame))), {}, "clicked"),
        (lambda frame: frame.assign(user=[10**30] * 400), {}, "no table: .* too large"),
        (lambda frame: frame.assign(user=[1, "a"] * 200), {}, "no table: .*user.*of one type"),
        (lambda frame: frame[["user", "user"]], {}, "no table: .*user.*give columns names of"),
        (lambda frame: frame["user"], {}, "the rows are no table: .*; give a DataFrame"),
        (None, {"columns": {"tags": "category"}}, "'tags'.* it holds list.*another kind"),
        (lambda frame: "nowhere.csv", {}, "nowhere.csv: no such file"),
        (None, {"epoch": 1}, "unknown option epoch, did you mean --epochs?"),
        (None, {"colums": {"user": "category"}}, "unknown option colums, did you mean columns?"),
        (None, {"validaton": 0.2}, "unknown option validaton, did you mean validation?"),
        (None, {"optim": {"lr": "fast"}}, "optim.lr is 'fast', it must be a number"),
        (None, {"emb": "auto"}, "--emb auto needs a budget"),
        (None, {"columns": {"usr": "category"}}, "usr"),
        (None, {"validation": 1.5}, "validation is 1.5, it must be at least 0 and below 1"),
        (None, {"data": "x"}, "data is no option of fit: give the rows"),
        (None, {"checkpoint": False}, "checkpoint is no option of fit: the best one is the model"),
        (
            None,
            {"label": pd.Series([0, 1])},
            r"label is 0    0 1    1 dtype: .* must be text",
        ),
    ],
)
def test_mistakes_are_told_as_the_commands_tell_them(frame, change, options, text):
    rows = change(frame) if change else frame
    with pytest.raises((ValueError, FileNotFoundError), match=text) as error:
        dlrm.fit(rows, **{"label": "clicked"} | SMALL | options)
    assert "rows.parquet" not in str(error.value)


def test_columns_are_described_and_an_index_is_not_lost_silently(frame, capsys, tmp_path):
    table = frame.assign(day=1).set_index(["user", "day"])
    options = SMALL | {"progress": True}
    dlrm.fit(table, "clicked", **options, columns={"price": "drop"}, max_steps=1)
    printed = capsys.readouterr()
    assert "note: the index 'user', 'day' is left out; reset_index() makes" in printed.err
    assert "price" in printed.out
    assert "AUC" in printed.out
    assert "dlrm-" not in printed.out, "the temporary directory says nothing to a user"


def test_a_prepared_directory_has_its_label(frame, tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="is prepared already: leave out label"):
        dlrm.fit(tmp_path, "clicked", **SMALL)


def test_the_code_of_the_documentation_runs(frame, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    frame[["user", "price", "clicked"]].to_csv("clicks.csv", index=False)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    loop = blocks[1].partition("RowOptimizer\n")[2]
    assert len([line for line in loop.splitlines() if line]) <= 15
