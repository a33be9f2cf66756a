"""Runs of train.py that stop and go on."""

import os
import shutil
import signal
import time

import pytest
import yaml

from dlrm.data import synthetic
from dlrm.training.run_directory import resume_hint


@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.slow), "tt"])
def test_killed_and_resumed_equals_uninterrupted(
    kind, run, start, train, command, options, losses, result, tmp_path
):
    given = [*options(kind), "--log_every", "1", "--eval_every", "10", "--epochs", "2"]
    train("whole", *given)
    process = start("train", *command("killed", *given))
    lines = tmp_path / "killed" / "metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        if lines.exists() and '"step": 43,' in lines.read_text():
            break
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists(), "it was not killed in time"
    run("train", "--resume", tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    whole, resumed = result(tmp_path / "whole"), result(tmp_path / "killed")
    assert {k: v for k, v in whole.items() if k.startswith("test/")} == {
        k: v for k, v in resumed.items() if k.startswith("test/")
    }


def test_stopped_at_a_step_and_resumed_loses_no_batch(run, train, options, losses, tmp_path):
    given = ["--log_every", "1", *options("hash"), "--epochs", "2"]
    train("whole", *given, "--max_steps", "20")
    train("parts", *given, "--max_steps", "9")
    run("train", "--resume", tmp_path / "parts", "--max_steps", "20")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_resumed_run_continues_the_random_numbers(run, train, losses, tmp_path):
    """On a CPU, tables in bf16 are rounded with the global generator."""
    given = ["--log_every", "1", "--tables.dtype", "bf16"]
    train("whole", *given, "--max_steps", "6")
    train("parts", *given, "--max_steps", "3")
    run("train", "--resume", tmp_path / "parts", "--max_steps", "6")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_offloaded_tables_train_as_dense_ones_to_the_last_digit(
    run, train, lines, losses, tmp_path
):
    given = ["--tables.threshold", "0", "--log_every", "1", "--optim.embeddings", "adamw"]
    train("dense", *given, "--max_steps", "20")
    offload = [*given, "--emb", "offload", "--offload.cache_rows", "500"]
    train("offload", *offload, "--max_steps", "9")
    run("train", "--resume", tmp_path / "offload", "--max_steps", "20")
    assert losses(tmp_path / "offload") == losses(tmp_path / "dense")
    last = [line for line in lines(tmp_path / "offload") if "cache/hit_rate" in line][-1]
    assert 0 < last["cache/hit_rate"] < 1
    assert 0 < last["cache/MB_out_per_step"] <= last["cache/MB_in_per_step"]


def test_options_of_a_resumed_run_are_to_fit_those_that_it_has(run, train, tmp_path):
    rules = ["--optim.dense", "adam", "--optim.embeddings", "adam"]
    train("run", "--max_steps", "2", *rules)
    given = ["--max_steps", "4", "--optim.betas", "0.5", "0.6"]
    run("train", f"--resume={tmp_path / 'run'}", *given)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["optim"]["betas"] == [0.5, 0.6]
    assert resolved["optim"]["dense"] == "adam"


def test_of_two_runs_to_resume_the_last_goes_on_with_its_own_options(
    run, train, two_steps, tmp_path
):
    train("last", "--max_steps", "2", "--optim.lr", "0.02")
    both = [f"--resume={path}" for path in (two_steps, tmp_path / "last")]
    run("train", *both, "--max_steps", "4")
    resolved = yaml.safe_load((tmp_path / "last" / "config.yaml").read_text())
    assert resolved["optim"]["lr"] == 0.02


def test_a_finished_run_is_not_evaluated_again(run, two_steps, tmp_path, monkeypatch):
    again = shutil.copytree(two_steps, tmp_path / "again", symlinks=True)
    before = {path.name: path.read_bytes() for path in again.iterdir() if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr("dlrm.training.metrics.predict", lambda *_, **__: 1 / 0)
        done = run("train", "--resume", again)
    assert "samples per second" in done.stdout
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.is_file()} == before


def test_a_run_that_ended_before_its_result_keeps_its_speed(
    run, two_steps, lines, result, tmp_path
):
    again = shutil.copytree(two_steps, tmp_path / "again", symlinks=True)
    (again / "result.json").unlink()
    run("train", "--resume", again)
    assert result(again)["test/auc"] == result(two_steps)["test/auc"]
    for name in ("samples_per_second", "train_seconds"):
        speed = result(again)[f"speed/{name}"]
        assert speed == pytest.approx(result(two_steps)[f"speed/{name}"], rel=0.01), name
    assert len([line for line in lines(again) if "val/auc" in line]) == 1


def test_a_resumed_run_keeps_its_model(run, two_steps):
    before = (two_steps / "config.yaml").read_text()
    for options in (["--emb", "tt"], ["--model.embedding_dim", "8"]):
        done = run("train", "--resume", two_steps, *options, status=2)
        assert "is of a model with a different" in done.stderr
    assert (two_steps / "config.yaml").read_text() == before


def test_a_resumed_run_takes_no_options_that_it_would_not_follow(run, two_steps, tmp_path):
    before = (two_steps / "config.yaml").read_text()
    given = ["--name", "other", f"--init_from={two_steps}"]
    done = run("train", "--resume", two_steps, *given, status=2)
    assert "--resume takes --init_from, --name from the run: remove it here" in done.stderr
    done = run("train", "--resume", two_steps, "--init-from=x", status=2)
    assert "--resume takes --init_from from the run: remove it here" in done.stderr
    (tmp_path / "own.yaml").write_text(f"resume: {two_steps}")
    done = run("train", "--config", tmp_path / "own.yaml", status=2)
    assert "--resume takes --config from the run: remove it here" in done.stderr
    assert (two_steps / "config.yaml").read_text() == before


def test_a_run_without_a_checkpoint_is_started_anew(run, train, tmp_path):
    train("run", "--max_steps", "1", "--checkpoint", "false")
    done = train("run", status=2)
    assert "run exists: choose another --name, or remove it" in done.stderr
    done = run("train", "--resume", tmp_path / "run", status=2)
    assert "run has no checkpoint yet: remove it and start again" in done.stderr


def test_a_model_that_diverged_replaces_no_checkpoint(run, train, tmp_path):
    """Without rows to validate on, nothing else would see it before the next log."""
    unseen = tmp_path / "data"
    synthetic.write(unseen, rows=9000, cardinalities=[50] * 26, fractions=[0.9, 0, 0.1])
    given = ["--max_steps", "4", "--eval_every", "2", "--log_every", "1000"]
    train("run", *given, data=unseen)
    diverging = ["--optim.dense", "sgd", "--optim.lr", "1e30", "--optim.warmup_steps", "0"]
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert (tmp_path / "run" / "result.json").exists()
    done = train("other", *given, *diverging, data=unseen, status=2)
    assert "the loss is nan at step 2" in done.stderr
    assert not (tmp_path / "other" / "checkpoints").exists()
    given = ["--max_steps", "8", "--optim.lr", "1e30"]
    done = run("train", "--resume", tmp_path / "run", *given, status=2)
    assert "the loss is nan" in done.stderr
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before
    assert not (tmp_path / "run" / "result.json").exists(), "it has not finished"


def test_how_to_go_on_is_said(two_steps, tmp_path):
    assert resume_hint(None) == "there was no checkpoint yet"
    assert resume_hint(tmp_path) == f"there was no checkpoint yet in {tmp_path}"
    assert resume_hint(two_steps) == f"resume with --resume {two_steps}"
