"""Runs of train.py that stop and go on."""

import io
import json
import os
import shutil
import signal
import zipfile

import numpy as np
import pytest
import yaml
from pyarrow import parquet

from dlrm.data import synthetic
from dlrm.training.run_directory import RunLock, resume_hint
from tests.kit import (
    best_name,
    contents,
    corrupt,
    first,
    latest_step,
    log_lines,
    losses,
    metrics_of,
    wait_for,
)

TENSORS = "rank_00000.safetensors"


@pytest.mark.parametrize("kind", ["tt", "dynamic"])
def test_killed_and_resumed_equals_uninterrupted(
    kind, run, start, train, command, options, tmp_path
):
    given = [*options(kind), "--log_every", "1", "--eval_every", "10", "--epochs", "2"]
    train("whole", *given)
    process = start("train", *command("killed", *given))
    wait_for(tmp_path / "killed" / "metrics.jsonl", '"step": 43,', process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists(), "it was not killed in time"
    run("train", "--resume", tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    whole, resumed = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "killed")
    assert {k: v for k, v in whole.items() if k.startswith("test/")} == {
        k: v for k, v in resumed.items() if k.startswith("test/")
    }


ROUNDED = "--optim.embeddings rowwise_adagrad --tables.dtype"  # by random numbers, which continue


@pytest.mark.parametrize(
    "more",
    [
        "--emb hash --hash.rows 64",
        "--emb hash --hash.rows 64 --negatives 0.2",
        "--emb hash --hash.rows 64 --model.dropout 0.3",
        *(f"{ROUNDED} {dtype}" for dtype in ("bf16", "int8", "int4")),
    ],
)
def test_stopped_at_a_step_and_resumed_equals_uninterrupted(more, run, train, tmp_path):
    """No batch is lost, and the last bit is the same."""
    given, steps = ["--log_every", "1", "--epochs", "2", *more.split()], 20 if "hash" in more else 8
    train("whole", *given, "--max_steps", steps)
    train("parts", *given, "--max_steps", steps // 2)
    run("train", "--resume", tmp_path / "parts", "--max_steps", steps)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert metrics_of(tmp_path / "parts")["test/auc"] == metrics_of(tmp_path / "whole")["test/auc"]
    if "--model.dropout" in more:
        train("without", *given[:-2], "--max_steps", "3")
        without, dropped = losses(tmp_path / "without"), losses(tmp_path / "whole")
        assert all(loss != dropped[step] for step, loss in without.items())


@pytest.mark.parametrize(
    ("plain", "host", "resumed"),
    [
        ("--emb dense", "--emb offload --offload.cache_rows 500", "--offload.cache_rows 300"),
        ("--emb dynamic --dynamic.rows 400", "--dynamic.cache_share 0.2", ""),
        ("--emb dynamic --dynamic.rows 400", "", "--dynamic.cache_share 0.2"),
    ],
)
def test_tables_in_host_memory_train_as_others_to_the_last_digit(
    plain, host, resumed, run, train, tmp_path
):
    given = ["--tables.threshold", "0", "--log_every", "1", "--optim.embeddings", "adamw"]
    given += plain.split()
    train("plain", *given, "--max_steps", "20")
    train("host", *given, *host.split(), "--max_steps", "9")
    run("train", "--resume", tmp_path / "host", "--max_steps", "20", *resumed.split())
    assert losses(tmp_path / "host") == losses(tmp_path / "plain")
    last = [line for line in log_lines(tmp_path / "host") if "cache/hit_rate" in line][-1]
    assert 0 < last["cache/hit_rate"] < 1
    cold = [line for line in log_lines(tmp_path / "host") if line["step"] in (1, 10)]
    assert not any("cache/hit_rate" in line for line in cold), "the cache was empty before"
    assert 0 < last["cache/MB_out_per_step"] <= last["cache/MB_in_per_step"]


def test_the_last_of_two_runs_to_resume_continues_with_its_own_options_and_more(
    run, train, two_steps, tmp_path
):
    rules = ["--optim.dense", "adam", "--optim.embeddings", "adam"]
    train("run", "--max_steps", "2", *rules)
    given = ["--max_steps", "4", "--optim.betas", "0.5", "0.6"]
    run("train", f"--resume={two_steps}", f"--resume={tmp_path / 'run'}", *given)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["optim"]["betas"] == [0.5, 0.6]
    assert resolved["optim"]["dense"] == "adam"


NAMES = [".lock", ".lock.json", ".lock.json.tmp", "config.yaml", "config.yaml.tmp", "metrics.jsonl"]
NAMES += ["metrics.jsonl.tmp", "result.json", "result.json.tmp", "events.out.tfevents.1"]
NAMES += ["preparation", "preparation.tmp", "preparation.lock", "profile", "profile/trace.json"]
NAMES += ["profile/operations.txt.tmp", "checkpoints", "checkpoints/job.json", "checkpoints/best"]
NAMES += ["checkpoints/job.json.tmp", "checkpoints/step_2", "checkpoints/step_3.tmp"]
NAMES += ["checkpoints/step_2/manifest.json", "checkpoints/step_2/rank_00000.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_run_is_written_or_read_through_a_link_out_of_it(
    name, run, two_steps, data, tmp_path
):
    """A run may come from a stranger, and the file that the link leads to is the user's."""
    stranger, victim = shutil.copytree(two_steps, tmp_path / "run"), tmp_path / "victim"
    place, own = stranger / name, two_steps / name
    if own.exists():
        shutil.copytree(own, victim) if own.is_dir() else shutil.copy(own, victim)
        shutil.rmtree(place) if own.is_dir() else place.unlink()
    else:
        victim.write_text("mine")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(victim)
    before = contents(victim)
    for program, *given in (
        ("train", "--resume", stranger, "--max_steps", "4"),
        ("evaluate", stranger, data, "--device", "cpu"),
        ("compare", stranger),
    ):
        error = run(program, *given, status=2).stderr
        assert f"{place} is a link out of {stranger}: put what it leads to" in error
        assert contents(victim) == before


def test_a_new_run_does_not_write_through_links(train, tmp_path):
    """Where only the files of a lock are left, a run may begin."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".lock.json").symlink_to(tmp_path / "victim")
    assert "is a link out of" in train("run", "--max_steps", "1", status=2).stderr
    assert (tmp_path / "victim").read_text() == "mine"


def test_other_training_rows_than_before_are_pointed_out(run, two_steps, data, tmp_path):
    """As many rows, and as many positives: ``meta.json`` still fits."""
    changed, again = tmp_path / "changed", tmp_path / "again"
    shutil.copytree(data, changed)
    shutil.copytree(two_steps, again, symlinks=True)
    given = ["--resume", again, "--data", changed]
    done = run("train", *given, "--max_steps", "3")
    assert "warning" not in done.stderr, "the copy of a directory is the same data"
    moved = run("train", *given[:3], tmp_path / "moved", "--max_steps", "4", status=2)
    assert "if it was moved, name its new place" in moved.stderr
    (path,) = changed.glob("train*.parquet")
    rows = parquet.read_table(path)
    parquet.write_table(rows.take(np.random.default_rng(0).permutation(len(rows))), path)
    done = run("train", *given, "--max_steps", "4")
    assert f"warning: the files of the training rows in {changed} are not those" in done.stderr


def test_a_run_is_resumed_from_within(script, two_steps, monkeypatch, tmp_path):
    again, train = tmp_path / "again", script("train")
    shutil.copytree(two_steps, again, symlinks=True)
    monkeypatch.chdir(again)
    assert train.main(["--resume", ".", "--max_steps", "3"]) == 0
    assert json.loads((again / "result.json").read_text())["run"] == "again"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "result.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name, run, two_steps, tmp_path):
    again = shutil.copytree(two_steps, tmp_path / "again", symlinks=True)
    (again / name).unlink(missing_ok=True)
    os.mkfifo(again / name)
    done = run("train", "--resume", again, status=2)
    assert f"error: {again / name} is a pipe or a device, it must be a file" in done.stderr


def test_a_finished_run_is_not_evaluated_again(run, two_steps, tmp_path, monkeypatch):
    again = shutil.copytree(two_steps, tmp_path / "again", symlinks=True)
    before = {path.name: path.read_bytes() for path in again.iterdir() if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr("dlrm.training.metrics.predict", lambda *_, **__: 1 / 0)
        done = run("train", "--resume", again)
    assert "samples per second" in done.stdout
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.is_file()} == before


def test_a_run_that_ended_before_its_result_keeps_its_speed(run, two_steps, tmp_path):
    again = shutil.copytree(two_steps, tmp_path / "again", symlinks=True)
    (again / "result.json").unlink()
    run("train", "--resume", again)
    assert metrics_of(again)["test/auc"] == metrics_of(two_steps)["test/auc"]
    for name in ("samples_per_second", "train_seconds"):
        speed = metrics_of(again)[f"speed/{name}"]
        assert speed == pytest.approx(metrics_of(two_steps)[f"speed/{name}"], rel=0.01), name
    assert len([line for line in log_lines(again) if "val/auc" in line]) == 1


def test_a_resumed_run_keeps_its_model(run, two_steps):
    before = (two_steps / "config.yaml").read_text()
    for options in (["--emb", "tt"], ["--model.embedding_dim", "8"]):
        done = run("train", "--resume", two_steps, *options, status=2)
        assert "is of a model with a different" in done.stderr
        assert "of that run (--emb, --budget, --tables.*, --model.*), or start" in done.stderr
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
    assert "run has no checkpoint, as it was trained with --checkpoint false" in done.stderr
    assert "remove" not in done.stderr, "its metrics are worth something"
    (tmp_path / "run" / "config.yaml").write_text("none")  # damaged
    done = run("predict", tmp_path / "run", "rows.csv", tmp_path / "scores.csv", status=2)
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


@pytest.fixture
def ten_steps(train, tmp_path):
    """A run of ten steps with a checkpoint after every second one, all of them kept."""
    given = ["--max_steps", "10", "--eval_every", "2", "--log_every", "1"]
    train("run", *given, "--keep_checkpoints", "9")
    return tmp_path / "run"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(
    run, train, ten_steps, tmp_path
):
    expected, checkpoints = losses(ten_steps), ten_steps / "checkpoints"
    for step in (10, 8):
        corrupt(checkpoints / f"step_{step}" / TENSORS)
    done = run("train", "--resume", ten_steps)
    assert f"warning: {checkpoints / 'step_10'} is damaged: tensor " in done.stderr
    assert f"warning: {checkpoints / 'step_6'} is read instead" in done.stderr
    assert "step_10 is set aside as step_10.aside" in done.stderr
    assert losses(ten_steps) == expected
    assert [line["step"] for line in log_lines(ten_steps) if "val/auc" in line] == [2, 4, 6, 8, 10]
    assert (checkpoints / "step_10.aside" / "manifest.json").exists()
    assert latest_step(ten_steps) == 10
    assert run("train", "--resume", ten_steps).stderr.count("warning") == 0


def test_a_run_goes_on_from_the_checkpoint_that_is_named(run, ten_steps):
    expected, before = losses(ten_steps), metrics_of(ten_steps)
    checkpoints = ten_steps / "checkpoints"
    done = run("train", "--resume", checkpoints / "step_4", "--max_steps", "6")
    assert done.stderr.count("is set aside as") == 3
    assert losses(ten_steps) == {step: expected[step] for step in range(1, 7)}
    names = {path.name for path in checkpoints.iterdir()}
    aside = {f"step_{n}.aside" for n in (6, 8, 10)}
    assert names == {"step_2", "step_4", "step_6", *aside}
    assert latest_step(ten_steps) == 6
    assert best_name(ten_steps) in names - aside
    run("train", "--resume", ten_steps, "--max_steps", "10")
    assert losses(ten_steps) == expected
    assert metrics_of(ten_steps)["test/auc"] == before["test/auc"]


def test_without_an_intact_checkpoint_nothing_is_changed(run, train, ten_steps):
    for path in (ten_steps / "checkpoints").glob("step_*"):
        corrupt(path / TENSORS)

    def files():
        kept = (path for path in ten_steps.rglob("*") if ".lock" not in path.name)
        return {path: path.stat().st_mtime_ns for path in kept}

    before = files()
    done = run("train", "--resume", ten_steps, status=2)
    assert f"error: {ten_steps} has no intact checkpoint: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert "remove" not in done.stderr
    done = train("run", status=2)
    assert "run exists: choose another --name, or --resume" in done.stderr
    assert files() == before


def test_two_processes_never_write_one_run(run, start, train, command, tmp_path):
    """A second one fails at once, whether the first is new or resumed; a dead one holds nothing."""
    train("run", "--max_steps", "2")
    for given in (["--resume", tmp_path / "run"], command("new")):
        name = "new" if "--data" in given else "run"
        process = start("train", *given, "--epochs", "900", "--max_steps", "99999")
        wait_for(tmp_path / name / ".lock.json", "", process)
        done = run("train", "--resume", tmp_path / name, status=2)
        if name == "run":
            assert f"run is being written by process {process.pid} on " in done.stderr
            assert done.stderr.count("\n") == 1
        done = train(name, status=2)
        assert f"{name} exists: " in done.stderr or "is being written by" in done.stderr
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        RunLock(tmp_path / name).release()


PLANT = b"cposix\nsystem\n(S'touch %s'\ntR."


@first(
    "name",
    ["all", "manifest.json", "rank_00000.safetensors", ".metadata", "about.pt", "__0_0.distcp"],
    slow=pytest.mark.slow,
)
def test_a_checkpoint_runs_no_code(name, run, train, command, two_steps, data, tmp_path):
    """Pickles that call a program, wherever a checkpoint may have a file."""
    pickled, proof = tmp_path / "pickled", tmp_path / "proof"
    shutil.copytree(two_steps, pickled, symlinks=True)
    step = pickled / "checkpoints" / "step_2"
    planted = PLANT % str(proof).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:  # as torch.load takes it
        file.writestr("archive/data.pkl", planted)
        file.writestr("archive/version", "3\n")
    names = ["manifest.json", "rank_00000.safetensors", ".metadata", "about.pt"]
    for content in (planted, archive.getvalue()):
        for target in names if name == "all" else [name]:
            (step / target).write_bytes(content)
        if name in ("about.pt", ".metadata", "__0_0.distcp"):
            (step / "manifest.json").unlink(missing_ok=True)
        for path in (pickled, step):
            for program, *given in (
                ("train", "--resume", path),
                ("train", *command("other", "--init_from", path)),
                ("evaluate", path, data, "--device", "cpu"),
                ("predict", path, data, tmp_path / "scores.parquet", "--device", "cpu"),
            ):
                done = run(program, *given, status=2)
                assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not proof.exists()
