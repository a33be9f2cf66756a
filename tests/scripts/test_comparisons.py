"""The scripts that compare kinds, from data to table, plot and JSON."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from dlrm.config.cli import parse
from dlrm.data import synthetic
from dlrm.data.schema import Meta
from dlrm.embeddings import available
from tests.kit import wait_for, write_synthetic

ROOT = Path(__file__).parents[2]
SMALL = ["batch_size=256", "model.bottom_mlp=[8]", "model.top_mlp=[8]", "device=cpu"]
SMALL += ["max_steps=4", "optim.warmup_steps=0", "loader.readers=1"]


def finished(directory: Path, **result) -> None:
    """A run that has finished with this ``result.json``."""
    directory.mkdir(exist_ok=True)
    result = {"options": {"emb": "dense"}, "metrics": {"test/auc": 0.7}} | result
    (directory / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "synthetic", rows=3000)


@pytest.fixture
def in_this_process(script, monkeypatch):
    """Runs are trained here, one after another, not in processes that import everything anew, and
    their steps are timed on few batches.
    """
    runner, here = script("runner"), contextlib.nullcontext(SimpleNamespace(map=map))
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *_, **__: here)
    for name in ("reproduce_tt_rec", "frontier"):
        few = partial(runner.step_speed, batches=4)
        monkeypatch.setattr(script(name), "step_speed", few)


@pytest.fixture
def compare_kinds(script, data, tmp_path):
    """Compares kinds on the data, or in other ways, in small runs; returns the report."""

    def compare_kinds(program, *options, status=0):
        given = ["--data", data, "--runs", tmp_path / "runs", "--plot", tmp_path / "plot.png"]
        given += ["--json", tmp_path / "result.json", *options]
        given += [] if "--options" in options else ["--options", *SMALL]
        assert script(program).main([str(one) for one in given]) == status
        return json.loads((tmp_path / "result.json").read_text())

    return compare_kinds


def test_the_ratios_of_the_paper_at_once(run):
    printed = run("reproduce_tt_rec", "--ratios-only").stdout
    for line in (
        "3 largest tables    4.1x    4.1x    4.1x    3.9x",
        "5 largest tables   58.3x   55.8x   48.3x   31.7x",
        "7 largest tables  221.9x  187.0x  117.4x   48.0x",
        "Criteo Terabyte, ids modulo 10 M, dim 64, 7 largest, rank 8: 112.6x",
    ):
        assert line in printed


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_tt_rec_from_data_to_table_plot_and_json(
    compare_kinds, data, tmp_path, capsys, monkeypatch
):
    given = ["--config", "configs/demo.yaml", "--tables", "3", "--ranks", "4", "--seeds", "1"]
    given += ["--caches", "0.01", "--cache-at", "3", "4", "--fine-tune", "2"]
    tt_rec = partial(compare_kinds, "reproduce_tt_rec", *given)
    report = tt_rec()
    rows = {row["cell"]: row for row in report["results"]}
    assert list(rows) == ["dense", "tt3-r4", "tt3-r4-c0.01", "fitted-tt3-r4"]
    assert rows["dense"]["loss, %"] == 0
    assert rows["tt3-r4"]["ratio"] > rows["tt3-r4-c0.01"]["ratio"] > rows["dense"]["ratio"] == 1
    assert all((row["step, ms"] or 0) > 0 for cell, row in rows.items() if "fitted" not in cell)
    assert rows["fitted-tt3-r4"]["fitted AUC"] != rows["fitted-tt3-r4"]["AUC"]
    assert report["best_possible"]["auc"] > 0.7
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    # What has finished is not repeated.
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert len(marks) == 4
    tt_rec("--no-timing")
    assert marks == {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    # Nor is it taken for a run of other options.
    capsys.readouterr()
    tt_rec("--no-timing", "--tt-lr", "0.7", status=2)
    assert "tt3-r4-0 has finished with another optim.embeddings_lr: " in capsys.readouterr().err
    # Nor for one of data that were made anew in the same place.
    rows = json.loads((tmp_path / "runs" / "dense-0" / "result.json").read_text())["rows"]
    assert rows == {n: [s.rows, s.positives] for n, s in Meta.read(data).splits.items()}
    with monkeypatch.context() as changed:
        changed.setattr(Meta, "counts", {**rows, "test": [1, 0]})
        tt_rec("--no-timing", status=2)
    assert f"dense-0 has finished on other rows than {data} has now" in capsys.readouterr().err
    # Without training, the first dense model is compressed to other kinds.
    dense = tmp_path / "runs" / "dense-0"
    trained = json.loads((dense / "result.json").read_text())["metrics"]["test/auc"]
    own = ["--config", "configs/demo.yaml", "--runs", tmp_path / "fitted", "--seeds", "1"]
    own += ["--kinds", "hash", "block", "--ratios", "9", "--no-timing"]
    own += ["--options", *SMALL, f"init_from={dense}", "max_steps=0"]
    fitted = compare_kinds("frontier", *own)["results"]
    auc = {row["emb"]: row["AUC"] for row in fitted}
    assert auc["dense"] == pytest.approx(trained)
    assert len({round(each, 6) for each in auc.values()}) == 3
    (dense / "checkpoints").rename(tmp_path / "elsewhere")
    tt_rec("--no-timing", status=2)
    assert "dense-0 has no checkpoint, which --fine-tune starts from" in capsys.readouterr().err


def test_a_grid_that_is_killed_leaves_the_figures_of_what_has_finished(
    script, compare_kinds, monkeypatch
):
    def train_two_and_die(_, tasks):
        for number, (directory, *_) in enumerate(tasks):
            if number == 2:
                raise BrokenProcessPool
            names = ("accuracy", "auc", "log_loss", "normalized_entropy")
            metrics = dict.fromkeys((f"test/{name}" for name in names), 0.5 - number / 100)
            metrics |= {"embeddings/bytes": 1.0, "embeddings/compression": 1.0 + number}
            finished(directory, metrics=metrics)
            yield None

    workers = contextlib.nullcontext(SimpleNamespace(map=train_two_and_die))
    monkeypatch.setattr(script("runner"), "ProcessPoolExecutor", lambda *_, **__: workers)
    given = ["--tables", "3", "--ranks", "4", "8", "--caches", "--seeds", "2"]
    rows = compare_kinds("reproduce_tt_rec", *given, status=2)["results"]
    assert [(row["cell"], row["seeds"]) for row in rows] == [("dense", 1), ("tt3-r4", 1)]
    assert rows[1]["loss, %"] == pytest.approx(1)


def test_a_run_is_compared_with_the_dense_one_of_its_seed(script, tmp_path):
    runs = {"dense-0": 0.7, "dense-1": 0.8, "tt3-r8-1": 0.78, "tt3-r8-2": 0.1, "fitted-tt3-r8": 0.6}
    names = ("test/auc", "test/log_loss", "test/normalized_entropy")
    same = dict.fromkeys((*names, "embeddings/bytes", "embeddings/compression"), 0.5)
    for name, accuracy in runs.items():
        finished(tmp_path / name, metrics=same | {"test/accuracy": accuracy})
    names = {"dense": ["dense-0", "dense-1"], "tt3-r8": ["tt3-r8-1", "tt3-r8-2"]}
    names |= {"fitted-tt3-r8": ["fitted-tt3-r8"]}
    runner = script("runner").Runner(tmp_path, 1, [])
    summary = script("reproduce_tt_rec").summarize(names, runner).set_index("cell")
    assert summary["loss, %"].to_dict() == pytest.approx(
        {"dense": 0.0, "tt3-r8": 2.0, "fitted-tt3-r8": 10.0}
    )


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_frontier_with_known_rates(compare_kinds, data, tmp_path):
    given = ["--kinds", "block", "auto", "tt+cache", "--ratios", "4", "100", "--seeds", "1"]
    given += ["--lr", "auto=0.03", "tt+cache=0.02", "dense=0.01"]
    report = compare_kinds("frontier", *given)
    assert report["embeddings_lr"] == {"auto": 0.03, "tt+cache": 0.02, "dense": 0.01}
    (impossible,) = report["impossible"]
    assert impossible.startswith("block-100x-0: error: a budget of")
    found = {(row["emb"], row["budget"]) for row in report["results"]}
    both = {(kind, budget) for kind in ("auto", "tt+cache") for budget in ("4x", "100x")}
    assert found == {("dense", ""), ("block", "4x"), *both}
    result = json.loads((tmp_path / "runs" / "tt+cache-4x-0" / "result.json").read_text())
    meta = Meta.read(data)
    assert result["options"]["tt"]["cache_rows"] == round(sum(meta.cardinalities) / 4 / 10)
    assert result["options"]["checkpoint"]  # so that the best state is the result
    assert not [*tmp_path.glob("runs/*/checkpoints")]
    tables = result["tables"]  # as the budget made them
    assert {name: table["rows"] for name, table in tables.items()} == dict(
        zip(meta.tables, meta.cardinalities, strict=True)
    )
    assert {table["rank"] for table in tables.values() if table["kind"] == "tt"}
    for row in report["results"]:
        assert row["samples/s"] > 0
        assert len(row["log loss by seed"]) == row["seeds"]
        assert np.mean(row["AUC by seed"]) == pytest.approx(row["AUC"])
    plots = ("", "_log_loss", "_speed")
    assert {path.name for path in tmp_path.glob("*.png")} == {f"plot{name}.png" for name in plots}


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_no_run_is_made_twice(compare_kinds, capsys):
    given = ["--kinds", "block", "dense", "block", "--ratios", "4", "4.0", "--seeds", "1"]
    report = compare_kinds("frontier", *given, "--jobs", "2", "--no-timing")
    assert "repeats the seed" not in capsys.readouterr().err
    assert sorted(row["run"] for row in report["results"]) == ["block-4x-0", "dense-0"]


def test_a_kind_of_another_type_has_the_rate_of_the_kind(script):
    frontier = script("frontier")
    rates = {"hash": 0.03, "hash:int4": 0.06}
    assert [frontier.rate_of(f"hash{each}", rates) for each in ("", ":int8", ":int4")] == [
        *(0.03, 0.03, 0.06)
    ]
    assert frontier.rate_of("drop:int8", rates) is None
    run = frontier.point("tt+cache:int8", 10, 2, 0.03, 1000)
    assert run.name == "tt+cache-int8-10x-2"
    assert run.options == [
        *("--emb=tt", "--seed=2", "--tables.dtype=int8", "--tt.cache_rows=10"),
        *("--optim.embeddings_lr=0.03", "--budget=10x"),
    ]
    assert frontier.point("dense:int8", 10, 2, None, 1000).name == "dense-int8-2"


@pytest.mark.usefixtures("in_this_process")
def test_a_bench_of_two_logs_with_trees(script, compare_kinds, data, tmp_path, capsys):
    logs = tmp_path / "logs"
    for name in ("first", "second"):
        shutil.copytree(data, logs / name)
    json_file = logs / "tables" / "first.trees.json"
    trees = ["--data", str(logs / "first"), "--json", str(json_file)]
    pytest.importorskip("lightgbm")
    assert script("baseline_trees").main([*trees, "--seeds", "1"]) == 0
    given = ["--kinds", "auto", "hash:int8", "--ratios", "10", "--seeds", "2", "--no-timing"]
    report = compare_kinds("frontier", *given, "--data", logs)
    points = {(row["log"], row["emb"], row["budget"]): row for row in report["results"]}
    kinds = [("dense", ""), ("auto", "10x"), ("hash int8", "10x")]
    assert set(points) == {(log, *kind) for log in ("first", "second") for kind in kinds}
    assert all(row["seeds"] == 2 and row["AUC std"] >= 0 for row in report["results"])
    assert points["first", *kinds[0]]["MB"] > points["first", *kinds[1]]["MB"] > 0
    assert 0.3 < report["trees"]["first"]["auc"] < 1
    for plot in ("plot.png", "plot_log_loss.png"):
        assert (tmp_path / plot).stat().st_size > 10_000
    shutil.copytree(data, tmp_path / "first")
    compare_kinds("frontier", *given, "--data", logs, tmp_path / "first", status=2)
    assert "have one name: rename one of them" in capsys.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_kinds_over_days(script, tmp_path, capsys):
    """All kinds see the same rows in the same order, and finished runs are not repeated."""
    out = tmp_path / "out.json"
    given = ["--only", "drift", "--rows", 1500, "--days", 3, "--seeds", 1, "--json", out]
    given += ["--work", tmp_path, "--runs", tmp_path / "runs", "--plot", tmp_path / "plot.png"]
    given += ["--ratios", 2, "--options", *SMALL[:4]]
    given = [*map(str, given), "--kinds"]
    kinds = ["first", "hash", "dynamic:int8@all,dynamic.admit=2", "dynamic"]
    for known in (kinds[:2], kinds):
        assert script("days").main([*given, *known]) == 0

    summary = json.loads(out.read_text())["summary"]
    assert [row["kind"] for row in summary] == ["dense", *kinds]
    assert all(len(row["days"]) == 2 and row["spread"] is None for row in summary)
    assert [row["bytes"] < summary[0]["bytes"] for row in summary] == [False] + 4 * [True]
    assert "drift        1x" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size

    files = [
        sorted(tmp_path.glob(f"drift/{ids}/*/*.parquet")) for ids in ("all", "first", "hashes")
    ]
    days = [pq.ParquetDataset(own).read() for own in files]
    for column in ("item", "hour"):
        whole, first, hashes = (rows[column].to_numpy() for rows in days)
        assert len(set(whole)) == len(set(hashes)) >= len(set(first))
        assert len(set(zip(whole, hashes, strict=True))) == len(set(whole))
        assert set(first[500:]) <= {*first[:500], first[:500].max() + 1}


def test_trees_see_the_labels_of_earlier_rows_alone(script):
    ids, labels = np.array([2, 0, 2, 2, 0, 1]), np.array([1.0, 0, 0, 1, 1, 1])
    train, later = script("baseline_trees").encode(ids, labels, 4, [np.array([2, 3])])
    before = [(labels[:i][ids[:i] == ids[i]]) for i in range(6)]
    prior, base = script("baseline_trees").PRIOR, labels.mean()
    wanted = [[len(own), (own.sum() + prior * base) / (len(own) + prior)] for own in before]
    np.testing.assert_allclose(train, wanted)
    np.testing.assert_allclose(later, [[3, (2 + prior * base) / (3 + prior)], [0, base]])


def test_logs_of_the_bench_are_in_order_of_time(script, tmp_path):
    rng, count = np.random.default_rng(0), 60
    stars = {"user_id:token": rng.integers(0, 9, count), "item_id:token": rng.integers(0, 9, count)}
    stars |= {"rating:float": rng.integers(1, 6, count), "timestamp:float": rng.permutation(count)}
    users = {"user_id:token": range(9), "age:token": range(20, 29), "gender:token": ["F"] * 9}
    users |= {"occupation:token": ["o"] * 9, "zip_code:token": ["z"] * 9}
    items = {
        "item_id:token": range(9),
        "release_year:token": [1990] * 9,
        "class:token_seq": ["c"] * 9,
    }
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        for kind, table in (("inter", stars), ("user", users), ("item", items)):
            text = pd.DataFrame(table).to_csv(sep="\t", index=False)
            wheel.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{kind}", text)
    program = script("bench_logs")
    log = program.movies(tmp_path / "wheel.whl")
    (tmp_path / "bench" / "tables").mkdir(parents=True)
    program.write("movies", log, tmp_path / "bench" / "tables")
    made = program.prepare_logs(tmp_path / "bench")
    assert [path.name for path in made] == ["movies-liked", "movies-loved"]
    order = np.argsort(stars["timestamp:float"])
    for path, best in zip(made, (3, 4), strict=True):
        labels = [pd.read_parquet(path / f"{s}.parquet")["label"] for s in ("train", "val", "test")]
        wanted = stars["rating:float"][order] > best
        assert list(pd.concat(labels)) == list(wanted.astype(int))
    pairs = log.rows.groupby("user_genres")[["user", "genres"]].nunique()
    assert (pairs == 1).all(axis=None)


def test_mistakes_are_named(run, data, tmp_path):
    synthetic.write(tmp_path / "no_test", rows=50, cardinalities=[5] * 26, fractions=[1, 0, 0])
    bare = str(tmp_path / "no_test")
    synthetic.write(tmp_path / "lists", rows=50, cardinalities=[5] * 26, fractions=[0.5, 0, 0.5])
    described = json.loads((tmp_path / "lists" / "meta.json").read_text())
    described["categorical"][0]["multi_hot"] = True
    (tmp_path / "lists" / "meta.json").write_text(json.dumps(described))
    synthetic.write(tmp_path / "ones", rows=50, cardinalities=[5] * 26, fractions=[0.5, 0, 0.5])
    for path in (tmp_path / "ones").glob("train*.parquet"):
        pd.read_parquet(path).assign(label=1).to_parquet(path)
    tt_rec, frontier, trees = "reproduce_tt_rec", "frontier", "baseline_trees"
    for name, given, message in (
        (tt_rec, [], "error: --data is needed, or --ratios-only"),
        (tt_rec, ["--data", "nowhere"], "nowhere/meta.json does not exist"),
        (frontier, ["--data", bare], "no_test has no test rows, which the comparison needs"),
        (tt_rec, ["--data", bare], "no_test has no test rows, which the comparison needs"),
        (trees, ["--data", bare], "no_test has no test rows, which the comparison needs"),
        (trees, ["--data", str(tmp_path / "lists")], "lists has lists of ids; trees take one id"),
        (
            trees,
            ["--data", tmp_path / "ones"],
            "labels of the train rows must be 0 and 1, and both",
        ),
        (frontier, ["--data", str(data), "--kinds", "ttt"], "kind 'ttt', did you mean 'tt'"),
        (frontier, ["--data", str(data), "--lr", "robr=0.1"], "kind 'robr', did you mean 'robe'"),
        (frontier, ["--data", str(data), "--kinds", "robe:int9"], "type 'int9', did you mean"),
    ):
        assert message in run(name, *given, status=2).stderr


@pytest.mark.parametrize(
    "name", ["compare", "frontier", "reproduce_tt_rec", "baseline_trees", "bench_logs"]
)
def test_every_option_is_explained(script, name):
    for action in script(name).arguments()._actions:
        text = (action.help or "").partition("(default")[0]
        assert text.strip(), f"{action.dest} is not explained"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("reproduce_tt_rec", ["--ratios-only", "--tables", "0"], "--tables: is '0', it must be a"),
        ("reproduce_tt_rec", ["--ratios-only", "--ranks", "-3"], "--ranks: is '-3', it must be"),
        ("reproduce_tt_rec", ["--caches", "inf"], "--caches: is 'inf', it must be a number above"),
        ("reproduce_tt_rec", ["--caches", "7"], "--caches: is '7', it must be a share, at most 1"),
        ("reproduce_tt_rec", ["--tt-lr", "0"], "--tt-lr: is '0', it must be a number above 0"),
        ("reproduce_tt_rec", ["--fine-tune", "-3"], "--fine-tune: is '-3', it must be a whole"),
        ("frontier", ["--data", "d", "--jobs", "0"], "--jobs: is '0', it must be a whole number"),
        ("frontier", ["--data", "d", "--seeds", "two"], "1 or more"),
        ("frontier", ["--data", "d", "--lr", "tt"], "is 'tt', it must be a kind and a rate"),
        ("frontier", ["--data", "d", "--lr", "tt=nan"], "is 'tt=nan', it must be a kind and a"),
        ("frontier", ["--data", "d", "--ratios", "-1"], "--ratios: is '-1', it must be a number"),
        ("evaluate", ["run", "data", "--batch-size", "0"], "--batch-size: is '0', it must be"),
        ("frontier", ["--data", "d", "--plot", "a.jpg"], "its name must end in .png, .svg or .pdf"),
    ],
)
def test_numbers_that_cannot_be_are_refused(run, name, given, message):
    assert message in run(name, *given, status=2).stderr


@pytest.mark.parametrize(("metric", "best"), [("AUC", 0.8), ("log loss", 0.4)])
def test_the_line_is_that_of_the_best_dense_model(script, tmp_path, metric, best):
    values = {metric: [0.4, 0.8], f"{metric} std": [0.0, 0.0]}
    summary = pd.DataFrame({"data": "d", "emb": "dense", "MB": [1.0, 2.0], **values})
    figure = script("compare").draw(summary, metric, tmp_path / "plot.png")
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in lines] == [best]


def test_no_two_kinds_are_drawn_alike(script, tmp_path):
    kinds = ["dense", "auto", "tt+cache", *sorted(set(available()) - {"dense"})]
    assert len(kinds) > 11
    summary = pd.DataFrame({"data": "d", "emb": kinds, "MB": 1.0, "AUC": 0.7, "AUC std": None})
    figure = script("compare").draw(summary, "AUC", tmp_path / "plot.png")
    lines = [container[0] for container in figure.axes[0].containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(kinds)


def test_what_makes_two_runs_different(script, tmp_path, capsys):
    """A seed counts once, what makes no difference is no group, what does is shown."""

    def finish(name, auc, **options):
        given = {"emb": "dense", "seed": 0, "data": "d", "log_every": 9}
        given |= {"tables": {"dtype": "fp32"}}
        finished(tmp_path / name, options=given | options, metrics={"test/auc": auc})

    finish("a", 0.7)
    finish("a_again", 0.9)
    finish("b", 0.8, seed=1, log_every=10, device="cuda", data="./d/", tt={"rank": 7})
    finish("bf16", 0.6, tables={"dtype": "bf16"}, tt={"rank": 5})
    finish("tt", 0.5, emb="tt", tt={"rank": 5})
    finish("more", 0.4, emb="tt", tt={"rank": 6})
    finish("default", 0.4, emb="tt", optim={"betas": None}, of_an_older_version=3)
    for rank in (2, 3):
        kinds = {"kinds": {"C3": "tt", "C4": "dense"}}
        finish(f"mixed{rank}", 0.3, emb="qr", tables=kinds, tt={"rank": rank})
    for largest, optimizer in ((None, "sgd"), (7, "adam")):
        tables = {"largest": largest}
        finish(f"largest{largest}", 0.2, emb="robe", tables=tables, optim={"dense": optimizer})
    finish("alone", 0.1, emb="hash", hash={"rows": 5})
    finish("brief", 0.05, emb="cafe", max_steps=9)
    compare = script("compare")
    table = compare.read(sorted(tmp_path.iterdir()))
    assert set(table["data"]) == {"d"}
    assert compare.read([tmp_path]).equals(table)  # the directory of them all
    summary = compare.summarize(table).set_index("run")
    message = f"left out: {tmp_path / 'a_again'} repeats the seed of an earlier run"
    assert message in capsys.readouterr().err
    assert summary["seeds"].to_dict() == dict.fromkeys(summary.index, 1) | {"a": 2}
    assert summary["AUC"]["a"] == pytest.approx(0.75)
    assert summary["emb"][["a", "bf16", "tt"]].tolist() == ["dense", "dense bf16", "tt"]
    assert summary["options"].to_dict() == {
        "a": "",  # the defaults
        "bf16": "",  # a kind of its own
        "tt": "rank=5",
        "more": "rank=6",
        "default": "",
        "mixed2": "rank=2",
        "mixed3": "rank=3",
        "largestNone": "optim.dense=sgd",
        "largest7": "optim.dense=adam largest=7",
        "alone": "",
        "brief": "max_steps=9",  # though no other run is of its kind
    }


def test_runs_that_have_not_finished_are_reported(script, tmp_path, capsys):
    for name in ("done", "begun"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    finished(tmp_path / "done")
    assert list(script("compare").read([tmp_path])["run"]) == ["done"]
    assert f"left out: no result.json in {tmp_path / 'begun'}" in capsys.readouterr().err


def test_each_data_set_has_a_table_and_a_plot_of_its_own(script, tmp_path):
    """It is known by its name, rows and preparation, wherever it lies."""

    def finish(name, data, seed=0, **known):
        options = {"emb": "dense", "seed": seed, "data": data}
        metrics = {"test/auc": 0.7, "embeddings/bytes": 100}
        finished(tmp_path / name, options=options, metrics=metrics, **known)

    rows = {"train": [8000, 1], "val": [0, 0], "test": [1000, 1]}
    finish("here", "here/kaggle", rows=rows, preparation="1")
    finish("there", "there/kaggle/", 1, rows=rows, preparation="1")
    finish("prepared_anew", "here/kaggle", rows=rows, preparation="2")
    finish("grown", "here/kaggle", rows=rows | {"train": [9000, 1]}, preparation="1")
    finish("old", "kaggle")
    finish("old_elsewhere", "other/kaggle")
    compare = script("compare")
    summary = compare.summarize(compare.read(sorted(tmp_path.iterdir())))
    runs = summary.groupby("data")["run"].apply(list).to_dict()
    assert runs == {
        "kaggle #1": ["old"],
        "kaggle #2": ["old_elsewhere"],
        "kaggle #1 (8,000 train, 1,000 test rows)": ["here"],
        "kaggle #2 (8,000 train, 1,000 test rows)": ["prepared_anew"],
        "kaggle (9,000 train, 1,000 test rows)": ["grown"],
    }
    assert summary.set_index("run")["seeds"]["here"] == 2
    tables = compare.render(summary).split("\n\n")
    assert [table.splitlines()[0] for table in tables] == sorted(runs)
    figure = compare.draw(summary, "AUC", tmp_path / "plot.png")
    assert [axes.get_title() for axes in figure.axes] == sorted(runs)
    lines = {axes.get_subplotspec().rowspan.start for axes in figure.axes}
    assert lines == {0, 1}, "five panels, three in a line"


def test_the_order_of_the_rows_makes_two_runs_different_and_threads_do_not(
    script, tmp_path, monkeypatch
):
    def finish(name, seed, **loader):
        options = {"emb": "dense", "seed": seed, "loader": loader}
        finished(tmp_path / name, options=options)
        return options

    finish("a", 0, shuffle=True, readers=1, prefetch=4)
    finish("b", 1, shuffle=True, readers=8, prefetch=2)
    ordered = finish("ordered", 0, shuffle=False, readers=1, prefetch=4)
    compare, runner = script("compare"), script("runner")
    summary = compare.summarize(compare.read(sorted(tmp_path.iterdir()))).set_index("run")
    assert summary["seeds"].to_dict() == {"a": 2, "ordered": 1}
    assert summary["options"]["ordered"] == "shuffle=False"
    monkeypatch.setattr(runner, "parse", lambda *_: (None, json.dumps(ordered)))
    with pytest.raises(ValueError, match=r"with another loader\.shuffle: choose another"):
        runner.Runner(tmp_path, 1, []).train([("a", [])], "data")


@pytest.mark.parametrize(
    ("ending", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_plot_has_the_format_of_its_name(run, script, tmp_path, ending, begin):
    finished(tmp_path, metrics={"test/auc": 0.7, "embeddings/bytes": 100})
    plot = tmp_path / f"plot.{ending}"
    run("compare", tmp_path, "--plot", plot)
    assert plot.read_bytes().startswith(begin)
    summary = pd.DataFrame({"cell": ["dense"], "ratio": [1.0], "loss, %": [0.0]})
    script("reproduce_tt_rec").draw(summary, plot)
    assert plot.read_bytes().startswith(begin)


def start(name, data, runs):
    """A comparison in a process of its own, whose first run trains already."""
    (program,) = (ROOT / "scripts").rglob(f"{name}.py")
    command = [sys.executable, str(program), "--data", str(data), "--runs", str(runs)]
    command += ["--options", "epochs=1000", "device=cpu", "batch_size=64"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(runs / "dense-0" / "config.yaml", "", process)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_killed_or_interrupted_ends_with_its_runs(sent, data, tmp_path):
    process = start("frontier", data, tmp_path)
    if sent == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, sent)  # as Ctrl-C does, to all of its processes
    try:  # until the workers, which share its stderr, have ended
        error = process.communicate(timeout=30)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; run the same command again to resume" in error
        assert "Traceback" not in error
        assert {path.name for path in tmp_path.iterdir()} == {"dense-0", "dense-0.log"}


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_no_run_at_all_is_an_error(run, data, tmp_path):
    given = ["--data", str(data), "--seeds", "1", "--runs", str(tmp_path), "--options", "epoch=1"]
    for name, choice, message in (
        ("frontier", ["--kinds", "tt", "--ratios", "2"], "none of the runs is possible"),
        ("reproduce_tt_rec", ["--tables", "3", "--ranks", "4"], "the dense model could not"),
    ):
        printed = run(name, *given, *choice, status=2)
        assert "unknown option --epoch, did you mean --epochs?" in printed.stdout
        assert message in printed.stderr


@pytest.mark.parametrize(
    "content",
    [
        *('{"x":', "{}", "[]", '{"options": [], "metrics": {}}', '{"options": {}, "metrics": {}}'),
        '{"options": {"emb": "tt", "data": []}, "metrics": {}}',
        '{"options": {"emb": "tt", "seed": {}}, "metrics": {}}',
        '{"options": {"emb": "tt", "tt": []}, "metrics": {}}',
        '{"options": {"emb": "tt"}, "metrics": {"test/auc": "high"}}',
        "[" * 500 + "]" * 500,
    ],
)
def test_what_is_no_result_is_named(run, script, tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    error = run("compare", tmp_path, "--plot", tmp_path / "plot.png", status=2).stderr
    assert f"{tmp_path / 'result.json'} is not a result of dlrm train" in error
    runner = script("runner").Runner(tmp_path.parent, 1, [])
    with pytest.raises(ValueError, match=r"is not a result of dlrm train: .*; remove it"):
        runner.train([(tmp_path.name, [])], "data")


@pytest.mark.slow
def test_a_process_that_is_killed_is_told_in_one_line(script, data, tmp_path, capfd):
    def kill():
        until = time.monotonic() + 60
        while not (tmp_path / "dense-0.log").exists() and time.monotonic() < until:
            time.sleep(0.1)
        for worker in multiprocessing.active_children():
            worker.kill()

    threading.Thread(target=kill).start()
    given = ["--data", str(data), "--runs", str(tmp_path), "--kinds", "drop", "--ratios", "4"]
    assert script("frontier").main([*given, "--options", "epochs=1000", "device=cpu"]) == 2
    error = capfd.readouterr().err
    assert "error: a training process was killed" in error
    assert "Traceback" not in error


def test_options_that_cannot_be_and_crashes_are_no_results(script, tmp_path, monkeypatch, capsys):
    """They are reported next to a run that has finished, too."""
    runner = script("runner")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text('{"options": {}}')
    with pytest.raises(SystemExit):
        runner.Runner(tmp_path, 1, ["--epoch=2"]).train([("a", [])], "data")
    assert "unknown option --epoch, did you mean --epochs?" in capsys.readouterr().err
    monkeypatch.setattr(script("train"), "main", lambda arguments: 1 / 0)
    with pytest.raises(ChildProcessError, match=r"run b failed; see .*b\.log"):
        runner.train_one((tmp_path / "b", [], False))
    assert "ZeroDivisionError" in (tmp_path / "b.log").read_text()


def test_a_ratio_of_a_million_is_a_budget_that_train_reads(script):
    name, options = script("frontier").point("robe", 1e6, 0, None, 10**7)
    assert name == "robe-1000000x-0"
    assert parse(options, available())[0].budget == "1000000x"
