"""Whole runs of train.py: what they reach, report and write."""

import json
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm.data import synthetic
from dlrm.data.schema import Meta
from dlrm.embeddings import available
from dlrm.training import checkpoint, run_directory
from dlrm.training.dashboards import tag
from dlrm.training.profiling import PARTS
from dlrm.utils.messages import format_bytes
from tests.kit import combinations, log_lines, losses, metrics_of, write_checkpoint

REAL = Path(__file__).parents[3] / "shared" / "data" / "criteo_kaggle_137k.tsv.gz"


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the real sample is not here")
def test_real_rows_from_raw_logs_to_a_trained_model(run, tmp_path):
    options = ["--split", "0.85", "0", "0.15", "--min-count", "2", "--limit", "60000"]
    run("prepare_criteo", REAL, "--output", tmp_path / "data", *options)
    config = ["--config", "configs/criteo_sample.yaml", "--device", "cpu"]
    for kind, floor in (("dense", 0.73), ("tt", 0.72)):
        given = [*config, "--data", tmp_path / "data", "--output", tmp_path, "--name", kind]
        run("train", *given, "--emb", kind)
        assert metrics_of(tmp_path / kind)["test/auc"] > floor


@pytest.mark.slow  # some train in int8 below, dense tables everywhere
@pytest.mark.parametrize("kind", sorted(available()))
def test_every_kind_trains_better_than_chance(kind, train, options, data, tmp_path):
    given = [*options(kind), "--optim.lr", "0.02", "--tables.threshold", "1000"]
    (tmp_path / "meta").mkdir()
    shutil.copy(data / "meta.json", tmp_path / "meta")
    planned = train("planned", *given, "--dry_run", data=tmp_path / "meta").stdout
    assert not (tmp_path / "planned").exists()
    done = train("run", *given)
    values = metrics_of(tmp_path / "run")
    assert values["test/auc"] > 0.6
    assert values["test/normalized_entropy"] < 1
    assert values["test/auc"] < values["test/best_possible_auc"]
    assert re.search(r"^ +test +val( +test, last step)? +best possible$", done.stdout, re.MULTILINE)
    assert re.search(
        rf"^AUC +{values['test/auc']:.4f} 0\.\d{{4}}( +0\.\d{{4}}){{1,2}}$", done.stdout, re.M
    )
    assert "val AUC=" in done.stderr
    sizes = [values[f"embeddings/{name}"] for name in ("bytes", "optimizer_bytes")]
    weights = int(re.search(r"([\d,]+) dense weights", done.stdout)[1].replace(",", ""))
    weights, state = (format_bytes(size + 4 * weights) for size in sizes)
    assert f"embeddings: {format_bytes(sizes[0])}, compression" in planned
    assert f": weights {weights}, optimizer state {state}, gradients " in planned
    assert "steps: 38 of 256 samples, 1 epochs of 9,600 rows, an evaluation every 9" in planned
    if kind not in ("dense", "paged", "offload"):
        assert values["embeddings/compression"] > 1.2
    if kind in ("hash", "robe", "cafe"):  # kinds with an option for the rows of a table
        tables = json.loads((tmp_path / "run" / "result.json").read_text())["tables"]
        assert tables["C1"]["rows"] == 3000
        assert tables["C1"][f"{kind}.rows"] == int(given[3])
        assert tables["C2"] == {"rows": 21, "kind": "dense"}


@combinations(
    slow=pytest.mark.slow,
    kind=["dense", "drop", "hash", "block", "robe", "cafe"],
    dtype=["bf16", "int8", "int4"],
)
def test_tables_in_fewer_bits_train(kind, dtype, train, options, tmp_path):
    rule = ["--optim.embeddings", "rowwise_adagrad", "--optim.lr", "0.02"]
    train("run", *options(kind), "--tables.dtype", dtype, *rule)
    values = metrics_of(tmp_path / "run")
    assert values["test/auc"] > 0.6
    assert values["embeddings/compression"] >= {"bf16": 2, "int8": 2.4, "int4": 3.5}[dtype]


def test_a_trained_model_is_compressed_and_trained_on(run, train, tmp_path):
    train("dense")
    given = ["--emb", "auto", "--budget", "3x", "--init_from", tmp_path / "dense"]
    done = train("auto", *given, "--max_steps", "5", "--optim.lr", "0.001")
    assert re.search(
        r"^ *C\d+ +[\d,]+ +(dense|drop|block) .*dtype int[48]", done.stdout, re.MULTILINE
    )
    dense, values = metrics_of(tmp_path / "dense"), metrics_of(tmp_path / "auto")
    assert values["embeddings/compression"] > 3
    assert (
        abs(values["fitted/auc"] - dense["test/auc"])
        < 0.01
        > abs(values["test/auc"] - values["fitted/auc"])
    )
    run("train", "--resume", tmp_path / "auto", "--max_steps", "7")
    resumed = metrics_of(tmp_path / "auto")
    assert resumed["fitted/auc"] == values["fitted/auc"]
    assert resumed.get("last/auc", resumed["test/auc"]) != values["test/auc"]
    done = train("none", "--init_from", tmp_path / "nowhere", status=2)
    assert "is not a checkpoint" in done.stderr


def test_everything_that_is_reported_is_there(train, options, tmp_path):
    logged_last = ["--log_every=10", "--seed=2", "--epochs=2", "--max_steps=40", "--group=C2"]
    done = train("run", *options("tt"), *logged_last)
    assert "100%" in done.stderr  # of 37 batches of 256, one of 128, and two more of 256
    directory = tmp_path / "run"
    events = EventAccumulator(str(directory))
    events.Reload()
    scalars = events.Tags()["scalars"]
    for name in (
        *("train/loss", "train/gradient_norm/dense", "train/gradient_norm/embeddings"),
        *("lr/dense", "lr/embeddings", "speed/samples_per_second", "speed/data_wait_share"),
        *("embeddings/weights_bytes", "embeddings/bytes", "embeddings/compression"),
        *("memory/process_peak", "cache/hit_rate"),
        *(f"seconds/{part}" for part in ("total", *PARTS)),
        *(f"{split}/{metric}" for split in ("val", "test") for metric in
          ("auc", "pr_auc", "group_auc", "accuracy", "log_loss", "calibration")),
    ):  # fmt: skip
        assert tag(name) in scalars, name
    assert events.Tags()["images"] == ["reliability/test", "scores/test"]
    assert re.search(r"^AUC by group +0\.\d{4} ", done.stdout, re.MULTILINE)
    assert re.search(r"^test +groups 2\d, groups of one class 0, rows ", done.stdout, re.MULTILINE)
    assert "config/text_summary" in events.Tags()["tensors"]
    assert "_hparams_/session_start_info" in events.summary_metadata
    logged = {x["step"]: x["train/loss"] for x in log_lines(directory) if "train/loss" in x}
    assert {e.step: pytest.approx(e.value) for e in events.Scalars(tag("train/loss"))} == logged
    validated = [line["step"] for line in log_lines(directory) if "val/auc" in line]
    assert validated == [e.step for e in events.Scalars(tag("val/auc"))] == sorted({*validated})
    assert validated[-1] == log_lines(directory)[-1]["step"] == 40
    for name in scalars:  # one value at a step
        found = events.Scalars(name)
        assert len({e.step for e in found}) == len(found), name
    for name, final in metrics_of(directory).items():  # the last value is the result
        assert events.Scalars(tag(name))[-1].value == pytest.approx(final), name
    assert all(line.keys() > {"step", "time"} for line in log_lines(directory))
    assert (directory / "config.yaml").exists()


def test_with_a_share_of_the_negatives_probabilities_are_those_of_all_rows(
    run, train, data, tmp_path
):
    given = ["--negatives", "0.2", "--optim.lr", "0.02", "--epochs", "3", "--patience", "0"]
    meta = json.loads((data / "meta.json").read_text())["splits"]["train"]
    planned = train("planned", "--negatives", "0.2", "--dry_run").stdout
    rows = meta["positives"] + round(0.2 * (meta["rows"] - meta["positives"]))
    assert f"epochs of {rows:,} rows" in planned
    done = train("run", *given)
    assert re.search(
        rf"--negatives: [\d,]+ training rows, all {meta['positives']:,} positives and 1,[\d,]+ of "
        rf"{meta['rows'] - meta['positives']:,} negatives, chosen by --seed", done.stdout
    )  # fmt: skip
    values = metrics_of(tmp_path / "run")
    assert values["val/calibration"] == pytest.approx(1, abs=0.15)  # without correction, 2.5
    assert values["test/auc"] > 0.55
    assert run("evaluate", tmp_path / "run", data).stdout.count(f"{values['test/log_loss']}") == 1


def test_the_logged_loss_is_the_mean_since_the_last_log(run, train, tmp_path):
    """A resumed run goes on with the sum of the run before."""
    train("each", "--log_every", "1", "--max_steps", "20")
    train("whole", "--log_every", "8", "--max_steps", "20")
    train("parts", "--log_every", "8", "--max_steps", "12")
    run("train", "--resume", tmp_path / "parts", "--max_steps", "20")
    each = losses(tmp_path / "each")
    means = {last: sum(each[last - back] for back in range(8)) / 8 for last in (8, 16)}
    assert losses(tmp_path / "whole") == pytest.approx(means, rel=1e-12)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_kind_that_compresses_nothing_is_noted(train):
    given = ["--max_steps", "1", "--emb"]
    note = "note: --emb {} compresses nothing here: {}"
    for kind, *rest, why in (
        ("hash", "its tables are no smaller than dense ones; try --budget 10x"),
        ("tt", "--tables.threshold", "4000", "no table is of that kind, as the largest has 3,000"),
        ("drop", "--tables.dtype", "bf16", "its tables are no smaller"),
        ("robe", "--budget", "1x", "dense tables fit into --budget; lower it"),
    ):
        assert note.format(kind, why) in train(kind, *given, kind, *rest).stderr
    for kind, *rest in (("dense",), ("hash", "--hash.rows", "64"), ("tt", "--tt.rank", "4")):
        assert "note:" not in train(f"{kind}_small", *given, kind, *rest).stderr


def test_a_dry_run_needs_neither_rows_nor_memory(train, data, tmp_path):
    """Dense tables of 12.8 TB."""
    meta = json.loads((data / "meta.json").read_text())
    meta["categorical"][0]["cardinality"] = 10**11
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    given = ["--dry_run", "--model.embedding_dim", "32", "--epochs", "3", "--max_steps", "57"]
    printed = train("run", *given, data=tmp_path).stdout
    assert re.search(r"^ +C1 100,000,000,000 +12.8 TB dense", printed, re.MULTILINE)
    assert "steps: 57 of 256 samples, 1.5 epochs of 9,600 rows" in printed
    assert "memory of host: about 25.6 TB: weights 12.8 TB, optimizer state 12.8 TB" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]
    assert "does not exist" in train("run", *given, data=tmp_path / "none", status=2).stderr


def test_the_parts_of_a_run_sum_to_the_time_of_its_process(start, command, tmp_path):
    start("train", "--help").wait()  # starts the launcher, too
    before = time.time()
    process = start("train", *command("run", "--epochs", "2"))
    after, done = time.time(), process.wait()  # it started between them
    ended = (tmp_path / "run" / "result.json").stat().st_mtime
    values = metrics_of(tmp_path / "run")
    parts = {name: values[f"seconds/{name}"] for name in PARTS}
    assert sum(parts.values()) == pytest.approx(values["seconds/total"])
    assert ended - after - 0.5 < values["seconds/total"] < ended - before + 0.5
    assert all(parts[name] > 0 for name in PARTS if name != "compile")
    assert parts["train"] + parts["data_wait"] == pytest.approx(values["speed/train_seconds"])
    assert re.search(r"^seconds +total \d+\.\d s, start .* s, end \d+\.\d s$", done.stdout, re.M)


def test_profile_writes_a_trace(train, tmp_path):
    train("run", "--profile")
    assert json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    assert "aten::" in (tmp_path / "run" / "profile" / "operations.txt").read_text()


def test_an_option_that_a_budget_sets_is_noted(train):
    given = ["--emb", "tt", "--budget", "4x", "--tt.rank", "999", "--tt.cache_decay", "0.5"]
    done = train("run", "--max_steps", "1", *given)
    assert done.stderr.count("note: ") == 1
    assert "note: --tt.rank has no effect, --budget sets it" in done.stderr


def test_runs_started_in_one_second_have_names_of_their_own(run, command, tmp_path, monkeypatch):
    class Clock:
        microseconds = iter([1, 2])

        @classmethod
        def now(cls):
            return datetime(2025, 1, 1, microsecond=next(cls.microseconds))

    monkeypatch.setattr(run_directory, "datetime", Clock)
    for seed in range(2):
        run("train", *command(None, "--max_steps", "1", "--seed", seed))
    found = [json.loads(path.read_text()) for path in tmp_path.glob("dense-*/result.json")]
    assert sorted(run["options"]["seed"] for run in found) == [0, 1]


def test_evaluate_predict_and_compare_work_on_a_run(run, train, options, data, tmp_path):
    train("a", *options("tt"))
    train("b", "--emb", "dense", "--seed", "1")
    train("c", "--emb", "dense", "--seed", "2")
    given = ["--device", "cpu", "--group", "C2"]
    again = json.loads(run("evaluate", tmp_path / "a", data, *given).stdout)
    assert again["groups"] == 21
    lowest = [own["auc"] for own in again["worst"]]
    assert (lowest == sorted(lowest), len(lowest)) == (True, 5)
    plot = tmp_path / "importance.png"
    done = run("evaluate", tmp_path / "a", data, "--importance", "500", "--plot", plot)
    weighed = json.loads(done.stdout)["importance"]
    assert weighed.keys() == {*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))}
    assert [line.split()[0] for line in done.stderr.splitlines()[-39:]] == list(weighed)
    assert plot.stat().st_size > 1000
    done = run("evaluate", tmp_path / "a", data, "--plot", plot, status=2)
    assert "--plot draws what --importance finds: give it too" in done.stderr
    done = run("evaluate", tmp_path / "a", data, "--group", "C99", status=2)
    assert "has no column 'C99' to group by, did you mean 'C9'? valid: C1" in done.stderr
    for name, value in metrics_of(tmp_path / "a").items():
        if name.startswith("test/") and "best_possible" not in name:
            assert again[name.removeprefix("test/")] == value, name
    other = tmp_path / "other"
    synthetic.write(other, rows=500, cardinalities=[20] * 26, fractions=[0.5, 0, 0.5])
    done = run("evaluate", tmp_path / "a", other, "--device", "cpu")
    note = "note: 26 tables of the data differ in size from the model's (C1 20 and not 3,000, "
    assert note in done.stderr
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"dense": meta["dense"][:12]}))
    done = run("evaluate", tmp_path / "a", other, status=2)
    assert f"error: {other} has 12 dense columns, the model 13" in done.stderr
    best = tmp_path / "a" / "checkpoints" / "best"
    assert "auc" in run("evaluate", best, data, "--split", "val").stdout

    scores = tmp_path / "scores.parquet"
    run("predict", tmp_path / "a", data, scores)
    table = pd.read_parquet(scores)
    labels = pd.read_parquet(sorted(data.glob("test*.parquet")))["label"]
    assert table["label"].tolist() == labels.tolist()
    assert table["probability"].between(0, 1).all()
    assert table["probability"].mean() == pytest.approx(labels.mean(), rel=0.25)

    runs = [tmp_path / name for name in "abc"]
    board = tmp_path / "comparison"
    plot = ("--plot", tmp_path / "plot.png", "--metric", "log loss", "--tensorboard", board)
    done = run("compare", *runs, board, *plot)  # as runs/* the second time
    assert f"left out: no result.json in {board}: " in done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(board))
    events.Reload()
    assert events.Tags()["images"] == ["comparison/log loss"]
    dense = next(line for line in done.stdout.splitlines() if " dense " in line)
    assert "±" in dense
    assert re.search(r"\b2\b", dense)


def test_the_scores_of_a_diverged_model_are_refused_as_its_metrics_are(
    run, two_steps, data, tmp_path
):
    model, state = checkpoint.load_model(two_steps)
    torch.nn.init.constant_(list(model.dense_parameters())[-1], float("nan"))
    diverged, scores = tmp_path / "diverged", tmp_path / "scores.parquet"
    write_checkpoint(diverged, checkpoint.Parts(model), state)
    measured = run("evaluate", diverged, data, status=2)
    done = run("predict", diverged, data, scores, status=2)
    assert done.stderr == measured.stderr
    assert done.stderr.startswith("error: the model's outputs are not finite")
    assert not scores.exists()


def test_hashed_ids_need_no_vocabulary(run, train, tmp_path):
    """Values that came later are hashed alike, and score as they were trained."""
    random = np.random.default_rng(0)
    users, tags = random.integers(300, size=2000), random.integers(20, size=(2000, 2))
    rows = [
        f"{int(u % 3 == 0)},{u}th,{'|'.join(map(str, own))},{u / 7:.2f}"
        for u, own in zip(users, tags, strict=True)
    ]
    raw = tmp_path / "raw.csv"
    raw.write_text("\n".join(["label,user,tags,age", *rows]) + "\n")
    data = tmp_path / "hashed"
    done = run("prepare_table", raw, "--output", data, "--ids", "hash")
    assert "0 in 0 columns, hashed in 2" in done.stdout
    sizes = [column.values for column in Meta.read(data).categorical]
    assert sizes == [len({*users[:1600]}), len({*tags[:1600].flat})]

    done = train("run", "--emb", "dynamic", "--dynamic.rows", "400", "--epochs", "4", data=data)
    assert "compresses nothing" not in done.stderr
    values = metrics_of(tmp_path / "run")
    assert values["test/auc"] > 0.8
    assert values["ids/inserted"] > 200
    assert values["ids/evicted"] == 0
    assert values["embeddings/compression"] == 1

    run("predict", tmp_path / "run", data, tmp_path / "prepared.csv", "--split", "train")
    run("predict", tmp_path / "run", raw, tmp_path / "raw_scores.csv")
    prepared, scores = (
        pd.read_csv(tmp_path / name)["probability"] for name in ("prepared.csv", "raw_scores.csv")
    )
    assert np.allclose(prepared, scores[: len(prepared)], atol=1e-6)

    refused = train("other", "--emb", "dense", data=data, status=2)
    assert "the ids of user are hashes, for which --emb dense has no table" in refused.stderr
    refused = train("other", "--emb", "dynamic", data=data, status=2)
    assert "set --dynamic.rows to the ids of a table" in refused.stderr
    refused = train("other", "--emb", "dynamic", "--budget", "10x", data=data, status=2)
    assert "a budget of 10x is relative to dense tables, but ids are hashes" in refused.stderr
    (tmp_path / "capped.yaml").write_text("cap: 5\nids: hash\n")
    refused = run(
        "prepare_table", raw, "--output", tmp_path / "no", "--config", tmp_path / "capped.yaml",
        status=2,
    )  # fmt: skip
    assert "ids are hashes, so there is no vocabulary with cap" in refused.stderr


def test_a_run_on_a_cpu_imports_no_compiler(command, tmp_path):
    """Nor pandas: that takes 1.5 s and 80 MB. The optimizers and the reader would bring them."""
    code = "import sys; from dlrm.commands import run; assert run('train') == 0; "
    code += "assert not {'torch._dynamo', 'pandas'} & sys.modules.keys()"
    given = map(str, command("run", "--max_steps", "2"))
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists()
