"""The program as its user meets it: processes, files, event files."""

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm.data import synthetic
from dlrm.embeddings import available
from dlrm.training import checkpoint
from dlrm.training.run_directory import resume_hint

ROOT = Path(__file__).parent.parent
SMALL = ["--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]", "--batch_size", "256"]
SMALL += ["--optim.warmup_steps", "5"]
KIND_OPTIONS = {
    "tt": ["--tt.rank", "4", "--tt.cache_rows", "40", "--populate_every", "7"],
    "hash": ["--hash.rows", "64"],
    "drop": ["--drop.keep", "64"],
    "robe": ["--robe.rows", "64"],
    "cafe": ["--cafe.rows", "200", "--populate_every", "7"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "synthetic"
    cardinalities = [3000 if column % 5 == 0 else 20 + column for column in range(26)]
    synthetic.write(directory, rows=12_000, cardinalities=cardinalities, fractions=[0.8, 0.1, 0.1])
    return directory


def command(*arguments):
    return [sys.executable, *(str(argument) for argument in arguments)]


def run(*arguments, status=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


REAL = ROOT.parent / "shared" / "data" / "criteo_kaggle_137k.tsv.gz"


@pytest.mark.skipif(not REAL.exists(), reason="the real sample is not here")
def test_real_rows_from_raw_logs_to_a_trained_model(tmp_path):
    options = ["--split", "0.85", "0", "0.15", "--min-count", "2", "--limit", "60000"]
    run("scripts/prepare_criteo.py", REAL, "--output", tmp_path / "data", *options)
    config = ["--config", "configs/criteo_sample.yaml", "--device", "cpu"]
    for kind, floor in (("dense", 0.73), ("tt", 0.72)):
        given = [*config, "--data", tmp_path / "data", "--output", tmp_path, "--name", kind]
        run("train.py", *given, "--emb", kind)
        assert result(tmp_path / kind)["test/auc"] > floor


def train(data, output, name, *options, status=0):
    return run(
        "train.py",
        *("--data", data, "--output", output, "--name", name, "--device", "cpu"),
        *SMALL,
        *options,
        status=status,
    )


def result(directory):
    return json.loads((directory / "result.json").read_text())["metrics"]


@pytest.mark.parametrize("kind", sorted(available()))
def test_every_kind_trains_better_than_chance(kind, data, tmp_path):
    options = ["--emb", kind, "--optim.lr", "0.02", *KIND_OPTIONS.get(kind, [])]
    done = train(data, tmp_path, "run", *options, "--tables.threshold", "1000")
    values = result(tmp_path / "run")
    assert values["test/auc"] > 0.6
    assert values["test/normalized_entropy"] < 1
    assert values["test/auc"] < values["test/best_possible_auc"]
    assert "test/auc" in done.stdout
    if kind not in ("dense", "paged", "offload"):
        assert values["embeddings/compression"] > 1.2


def test_a_trained_model_is_compressed_and_trained_on(data, tmp_path):
    train(data, tmp_path, "dense")
    given = ["--emb", "auto", "--budget", "3x", "--init_from", tmp_path / "dense"]
    done = train(data, tmp_path, "auto", *given, "--max_steps", "5", "--optim.lr", "0.001")
    assert re.search(r"^ *C\d+ +[\d,]+ +block +dim \d, keep \d+$", done.stdout, re.MULTILINE)
    dense, values = result(tmp_path / "dense"), result(tmp_path / "auto")
    assert values["embeddings/compression"] > 3
    assert (
        abs(values["fitted/auc"] - dense["test/auc"])
        < 0.01
        > abs(values["test/auc"] - values["fitted/auc"])
    )
    run("train.py", "--resume", tmp_path / "auto", "--max_steps", "7")
    resumed = result(tmp_path / "auto")
    assert resumed["fitted/auc"] == values["fitted/auc"]
    assert resumed["test/auc"] != values["test/auc"]
    done = train(data, tmp_path, "none", "--init_from", tmp_path / "nowhere", status=2)
    assert "no checkpoint" in done.stderr


def test_everything_that_is_reported_is_there(data, tmp_path):
    logged_last = ["--log_every=10", "--epochs=2", "--max_steps=40"]
    done = train(data, tmp_path, "run", "--emb", "tt", *KIND_OPTIONS["tt"], *logged_last)
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
        *(f"{split}/{metric}" for split in ("val", "test") for metric in
          ("auc", "accuracy", "log_loss", "normalized_entropy", "calibration")),
    ):  # fmt: skip
        assert name in scalars, name
    assert "config/text_summary" in events.Tags()["tensors"]
    assert "_hparams_/session_start_info" in events.summary_metadata
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert {e.step: pytest.approx(e.value) for e in events.Scalars("train/loss")} == logged
    validated = [line["step"] for line in lines if "val/auc" in line]
    assert validated == [e.step for e in events.Scalars("val/auc")] == sorted({*validated})
    assert validated[-1] == lines[-1]["step"] == 40
    for name in scalars:  # one value at a step, the last of which is the result
        found = events.Scalars(name)
        assert len({e.step for e in found}) == len(found), name
        if (final := result(directory).get(name)) is not None:
            assert found[-1].value == pytest.approx(final), name
    assert (directory / "config.yaml").exists()


def losses(directory):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.parametrize("kind", ["hash", "robe", "cafe"])
def test_a_result_tells_the_rows_of_tables_of_kinds_with_such_an_option(kind, data, tmp_path):
    given = ["--emb", kind, *KIND_OPTIONS[kind], "--tables.threshold", "1000"]
    train(data, tmp_path, "run", "--max_steps", "1", *given)
    tables = json.loads((tmp_path / "run" / "result.json").read_text())["tables"]
    assert tables["C1"]["rows"] == 3000
    assert tables["C1"][f"{kind}.rows"] == int(KIND_OPTIONS[kind][1])
    assert tables["C2"] == {"rows": 21, "kind": "dense"}


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_killed_and_resumed_equals_uninterrupted(kind, data, tmp_path):
    options = ["--emb", kind, "--log_every", "1", "--eval_every", "10", "--epochs", "2"]
    options += KIND_OPTIONS.get(kind, [])
    train(data, tmp_path, "whole", *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = command(
        *("train.py", "--data", data, "--output", tmp_path, "--name", "killed"),
        *("--device", "cpu", *SMALL, *options),
    )
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    lines = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if lines.exists() and '"step": 43,' in lines.read_text():
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "result.json").exists(), "it was not killed in time"
    run("train.py", "--resume", tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    whole, resumed = result(tmp_path / "whole"), result(tmp_path / "killed")
    assert {k: v for k, v in whole.items() if k.startswith("test/")} == {
        k: v for k, v in resumed.items() if k.startswith("test/")
    }


def test_evaluate_predict_and_compare_work_on_a_run(data, tmp_path):
    train(data, tmp_path, "a", "--emb", "tt", *KIND_OPTIONS["tt"])
    train(data, tmp_path, "b", "--emb", "dense", "--seed", "1")
    train(data, tmp_path, "c", "--emb", "dense", "--seed", "2")
    again = json.loads(run("scripts/evaluate.py", tmp_path / "a", data, "--device", "cpu").stdout)
    for name, value in result(tmp_path / "a").items():
        if name.startswith("test/") and "best_possible" not in name:
            assert again[name.removeprefix("test/")] == value, name
    other = tmp_path / "other"
    synthetic.write(other, rows=500, cardinalities=[20] * 26, fractions=[0.5, 0, 0.5])
    done = run("scripts/evaluate.py", tmp_path / "a", other, "--device", "cpu")
    assert "note: 26 tables of the data differ in size from the model's (C1 20 and not 3,000, " in (
        done.stderr
    )
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps(meta | {"dense": meta["dense"][:12]}))
    done = run("scripts/evaluate.py", tmp_path / "a", other, status=2)
    assert f"error: {other} has 12 dense columns, the model 13" in done.stderr
    best = tmp_path / "a" / "checkpoints" / "best"
    assert "auc" in run("scripts/evaluate.py", best, data, "--split", "val").stdout

    scores = tmp_path / "scores.parquet"
    run("scripts/predict.py", tmp_path / "a", data, scores)
    table = pd.read_parquet(scores)
    labels = pd.read_parquet(sorted(data.glob("test*.parquet")))["label"]
    assert table["label"].tolist() == labels.tolist()
    assert table["probability"].between(0, 1).all()
    assert table["probability"].mean() == pytest.approx(labels.mean(), rel=0.25)

    runs = [tmp_path / name for name in "abc"]
    board = tmp_path / "comparison"
    plot = ("--plot", tmp_path / "plot.png", "--tensorboard", board)
    done = run("scripts/compare.py", *runs, board, *plot)  # as runs/* the second time
    assert f"left out: no result.json in {board}: " in done.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(board))
    events.Reload()
    assert events.Tags()["images"] == ["comparison/AUC"]
    dense = next(line for line in done.stdout.splitlines() if " dense " in line)
    assert "±" in dense
    assert re.search(r"\b2\b", dense)


def test_profile_writes_a_trace(data, tmp_path):
    train(data, tmp_path, "run", "--profile")
    assert json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]
    assert "aten::" in (tmp_path / "run" / "profile" / "operations.txt").read_text()


def test_a_diverging_run_says_so(data, tmp_path):
    done = train(
        data, tmp_path, "run", "--optim.dense", "sgd", "--optim.lr", "1e30", "--log_every", "1",
        status=2,
    )  # fmt: skip
    assert "lower --optim.lr" in done.stderr


def test_mistakes_are_one_line_and_leave_nothing(data, tmp_path, monkeypatch, capsys):
    done = run("train.py", "--data", tmp_path / "none", "--output", tmp_path / "out", status=2)
    assert done.stderr.count("error:") == 1
    monkeypatch.syspath_prepend(str(ROOT))
    main = importlib.import_module("train").main
    cases = [
        (["--data", tmp_path / "none"], "does not exist"),
        (["--tables.kinds", "{C99: tt}"], "names table 'C99'"),
        (["--budget", "heaps"], "no amount of memory"),
        (["--budget", "2x"], "--emb dense takes no budget"),
        (["--emb", "hash", "--budget", "1000000x"], "budget"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--resume", tmp_path / "nothing"], "is not a checkpoint"),
    ]
    if not torch.cuda.is_available():
        cases.append((["--device", "cuda"], "there is no CUDA GPU"))
    for options, text in cases:
        given = ["--data", data, "--output", tmp_path / "out", *options]
        try:
            status = main([str(argument) for argument in given])
        except SystemExit as stop:
            status = stop.code
        error = capsys.readouterr().err
        assert status == 2
        assert text in error
        assert error.count("error:") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_file_that_is_not_to_be_read_at_once_is_looked_at_all_the_same(data, tmp_path, split):
    damaged = shutil.copytree(data, tmp_path / "data")
    (path,) = damaged.glob(f"{split}-*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    done = train(damaged, tmp_path, "run", status=2)
    assert f"{path} is not a complete Parquet file" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("room", [8000, 20_000])
def test_no_room_for_what_a_run_reports_is_one_line(data, tmp_path, room):
    done = subprocess.run(
        command(
            *("train.py", "--data", data, "--output", tmp_path, "--name", "run", *SMALL),
            *("--log_every", "1", "--checkpoint", "false", "--device", "cpu"),
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert done.returncode == 2
    assert f"error: {tmp_path / 'run'} can't be written: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_resumed_run_keeps_its_model(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "2")
    before = (tmp_path / "run" / "config.yaml").read_text()
    for options in (["--emb", "tt"], ["--model.embedding_dim", "8"]):
        done = run("train.py", "--resume", tmp_path / "run", *options, status=2)
        assert "is of a model with another" in done.stderr
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_resumed_run_takes_no_options_that_it_would_not_follow(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "2")
    before = (tmp_path / "run" / "config.yaml").read_text()
    given = ["--name", "other", f"--init_from={tmp_path / 'run'}"]
    done = run("train.py", "--resume", tmp_path / "run", *given, status=2)
    assert "--resume takes --init_from, --name from the run: remove it here" in done.stderr
    done = run("train.py", "--resume", tmp_path / "run", "--init-from=x", status=2)
    assert "--resume takes --init_from from the run: remove it here" in done.stderr
    (tmp_path / "own.yaml").write_text(f"resume: {tmp_path / 'run'}")
    done = run("train.py", "--config", tmp_path / "own.yaml", status=2)
    assert "--resume takes --config from the run: remove it here" in done.stderr
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_options_of_a_resumed_run_are_to_fit_those_that_it_has(data, tmp_path):
    rules = ["--optim.dense", "adam", "--optim.embeddings", "adam"]
    train(data, tmp_path, "run", "--max_steps", "2", *rules)
    given = ["--max_steps", "4", "--optim.betas", "0.5", "0.6"]
    run("train.py", f"--resume={tmp_path / 'run'}", *given)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["optim"]["betas"] == [0.5, 0.6]
    assert resolved["optim"]["dense"] == "adam"


def test_of_two_runs_to_resume_the_last_goes_on_with_its_own_options(data, tmp_path):
    for name, rate in (("first", "0.01"), ("last", "0.02")):
        train(data, tmp_path, name, "--max_steps", "2", "--optim.lr", rate)
    both = [f"--resume={tmp_path / name}" for name in ("first", "last")]
    run("train.py", *both, "--max_steps", "4")
    resolved = yaml.safe_load((tmp_path / "last" / "config.yaml").read_text())
    assert resolved["optim"]["lr"] == 0.02


def test_a_run_without_a_checkpoint_is_started_anew(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "1", "--checkpoint", "false")
    done = train(data, tmp_path, "run", status=2)
    assert "run exists: choose another --name, or remove it" in done.stderr
    done = run("train.py", "--resume", tmp_path / "run", status=2)
    assert "run has no checkpoint yet: remove it and start again" in done.stderr


def test_a_model_that_memory_has_no_room_for(data, tmp_path):
    for dim in (10**11, 10**18, 10**20):  # beyond any memory, and twice beyond 64 bits
        done = train(data, tmp_path, "run", "--model.embedding_dim", str(dim), status=2)
        assert "error: out of memory: the largest table, C" in done.stderr
        assert "compress it with --emb and --budget" in done.stderr


def test_an_option_that_a_budget_sets_is_noted(data, tmp_path):
    given = ["--emb", "tt", "--budget", "4x", "--tt.rank", "999", "--tt.cache_decay", "0.5"]
    done = train(data, tmp_path, "run", "--max_steps", "1", *given)
    assert done.stderr.count("note: ") == 1
    assert "note: --tt.rank has no effect, --budget sets it" in done.stderr


def test_a_model_that_diverged_replaces_no_checkpoint(data, tmp_path):
    """Without rows to validate on, nothing else would see it before the next log."""
    unseen = tmp_path / "data"
    synthetic.write(unseen, rows=9000, cardinalities=[50] * 26, fractions=[0.9, 0, 0.1])
    given = ["--max_steps", "4", "--eval_every", "2", "--log_every", "1000"]
    train(unseen, tmp_path, "run", *given)
    diverging = ["--optim.dense", "sgd", "--optim.lr", "1e30", "--optim.warmup_steps", "0"]
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert (tmp_path / "run" / "result.json").exists()
    done = train(unseen, tmp_path, "other", *given, *diverging, status=2)
    assert "the loss is nan at step 2" in done.stderr
    assert not (tmp_path / "other" / "checkpoints").exists()
    done = run("train.py", "--resume", tmp_path / "run", "--max_steps", "8", "--optim.lr", "1e30",
               status=2)  # fmt: skip
    assert "the loss is nan" in done.stderr
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before
    assert not (tmp_path / "run" / "result.json").exists(), "it has not finished"


def test_a_finished_run_resumed_reports_no_speed_of_nothing(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "2")
    first = result(tmp_path / "run")
    run("train.py", "--resume", tmp_path / "run")
    again = result(tmp_path / "run")
    assert again["test/auc"] == first["test/auc"]
    assert "speed/samples_per_second" not in again


def test_an_epoch_of_one_batch_and_of_none(data, tmp_path):
    done = run("train.py", "--output", tmp_path, "--data", data, "--name", "x", *SMALL,
               "--batch_size", "9600", "--loader.drop_last", "--max_steps", "1")  # fmt: skip
    assert "100%" in done.stderr
    done = train(data, tmp_path, "y", "--batch_size", "9601", "--loader.drop_last", status=2)
    assert "leaves no batch at all" in done.stderr
    assert resume_hint(None) == "there was no checkpoint yet"
    assert resume_hint(tmp_path / "y") == f"there was no checkpoint yet in {tmp_path / 'y'}"
    assert resume_hint(tmp_path / "x") == f"resume with --resume {tmp_path / 'x'}"


def test_files_where_directories_are_wanted(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "1")
    file = tmp_path / "file"
    file.write_text("")
    train(data, file, "run", status=2)
    run("scripts/predict.py", tmp_path / "run", data, file / "scores.parquet", status=2)
    done = run("scripts/predict.py", tmp_path / "run", data, tmp_path, status=2)
    assert f"error: {tmp_path} is a directory; name the Parquet file" in done.stderr
    run("scripts/compare.py", tmp_path / "run", "--plot", file / "x.png", status=2)


def test_the_scores_of_a_diverged_model_are_refused_as_its_metrics_are(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "1")
    model, _ = checkpoint.load_model(tmp_path / "run")
    torch.nn.init.constant_(list(model.dense_parameters())[-1], float("nan"))
    diverged, scores = tmp_path / "diverged", tmp_path / "scores.parquet"
    (diverged / "checkpoints").mkdir(parents=True)
    path = diverged / "checkpoints" / "step_1"
    checkpoint.save(path, checkpoint.Parts(model), checkpoint.about(tmp_path / "run"))
    measured = run("scripts/evaluate.py", diverged, data, status=2)
    done = run("scripts/predict.py", diverged, data, scores, status=2)
    assert done.stderr == measured.stderr
    assert done.stderr.startswith("error: the model's outputs are not finite")
    assert not scores.exists()


def test_runs_that_are_started_in_one_second_have_names_of_their_own(data, tmp_path):
    options = ["--data", data, "--output", tmp_path, "--max_steps", "1", "--device", "cpu", *SMALL]
    started = [
        subprocess.Popen(
            command("train.py", *options, "--seed", seed), cwd=ROOT, stdout=subprocess.DEVNULL
        )
        for seed in range(2)
    ]
    assert [process.wait() for process in started] == [0, 0]
    found = [json.loads(path.read_text()) for path in tmp_path.glob("dense-*/result.json")]
    assert sorted(run["options"]["seed"] for run in found) == [0, 1]


def test_a_run_is_not_overwritten(data, tmp_path):
    train(data, tmp_path, "run", "--max_steps", "2")
    done = train(data, tmp_path, "run", "--max_steps", "2", status=2)
    assert "choose another --name" in done.stderr


def test_bad_checkpoints_are_refused(data, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "about.pt").write_bytes(b"no checkpoint")
    assert "can't be read as a checkpoint" in run("scripts/evaluate.py", bad, data, status=2).stderr
    torch.save({"other": 1}, bad / "about.pt")
    assert (
        "not of a checkpoint of this program"
        in run("scripts/evaluate.py", bad, data, status=2).stderr
    )
    assert "is not a checkpoint" in run("scripts/evaluate.py", tmp_path, data, status=2).stderr
    assert "no result.json in" in run("scripts/compare.py", tmp_path, status=2).stderr


def test_stopped_at_a_step_and_resumed_loses_no_batch(data, tmp_path):
    options = ["--log_every", "1", "--emb", "hash", "--hash.rows", "64", "--epochs", "2"]
    train(data, tmp_path, "whole", *options, "--max_steps", "20")
    train(data, tmp_path, "parts", *options, "--max_steps", "9")
    run("train.py", "--resume", tmp_path / "parts", "--max_steps", "20")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_offloaded_tables_train_as_dense_ones_to_the_last_digit(data, tmp_path):
    options = ["--tables.threshold", "0", "--log_every", "1", "--optim.embeddings", "adamw"]
    offload = [*options, "--emb", "offload", "--offload.cache_rows", "500"]
    train(data, tmp_path, "dense", *options, "--max_steps", "20")
    train(data, tmp_path, "offload", *offload, "--max_steps", "9")
    run("train.py", "--resume", tmp_path / "offload", "--max_steps", "20")
    assert losses(tmp_path / "offload") == losses(tmp_path / "dense")
    values = [json.loads(line) for line in (tmp_path / "offload" / "metrics.jsonl").open()]
    last = [line for line in values if "cache/hit_rate" in line][-1]
    assert 0 < last["cache/hit_rate"] < 1
    assert 0 < last["cache/MB_out_per_step"] <= last["cache/MB_in_per_step"]


def test_tables_in_bf16_take_half_and_train(data, tmp_path):
    train(data, tmp_path, "run", "--tables.dtype", "bf16", "--optim.lr", "0.02")
    values = result(tmp_path / "run")
    assert values["embeddings/compression"] == 2
    assert values["test/auc"] > 0.6
