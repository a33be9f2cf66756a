"""The best state of a run is its result: early stopping, fine-tuning, checkpoints in between."""

import json
import math
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from dlrm.config import pace
from dlrm.config.schema import RunConfig
from dlrm.data.schema import Categorical, Meta, Split
from dlrm.distributed.world import World
from dlrm.model import DLRM
from dlrm.training.best_model import Validations
from dlrm.training.checkpoint import Checkpoint
from dlrm.training.checkpoint import timer as checkpoint_timer
from dlrm.training.checkpoint.manifest import Progress
from dlrm.training.checkpoint.timer import CheckpointTimer
from dlrm.training.fine_tuning import auc_lost, rates_after_fit
from tests.kit import best_name, log_lines, metrics_of

OVERFIT = ["--optim.lr", "0.1", "--epochs", "6", "--eval_every", "10"]
"""A run that is at its best in the first epochs."""


def validations(lines):
    return {line["step"]: line["val/auc"] for line in lines if "val/auc" in line}


def test_a_run_stops_early_and_its_best_state_is_the_result(run, train, data, tmp_path):
    done = train("run", *OVERFIT)
    found = validations(log_lines(tmp_path / "run"))
    best, last = max(found, key=found.get), max(found)
    assert last - best == 30, "an epoch has 37 steps, so 3 evaluations"
    assert f"stopped at step {last}: validation AUC has not risen since step {best};" in done.stdout
    assert f"best validation    at step {best}, the result" in done.stdout
    values = metrics_of(tmp_path / "run")
    assert values["best_step"] == best
    assert values["val/auc"] == found[best]
    assert values["last/auc"] != values["test/auc"]
    for options, group in (([], "test"), (["--last"], "last")):
        again = json.loads(run("evaluate", tmp_path / "run", data, *options).stdout)
        assert again["auc"] == values[f"{group}/auc"]
        assert again["log_loss"] == values[f"{group}/log_loss"]
    run("train", "--resume", tmp_path / "run")
    assert metrics_of(tmp_path / "run") == values


def test_a_lost_best_state_is_told_and_not_claimed(run, train, data, tmp_path):
    """``best_step`` is that of the metrics that are reported, or is not reported."""
    whole = tmp_path / "run"
    train("run", *OVERFIT, "--max_steps", "60", "--patience", "0")
    best = whole / "checkpoints" / best_name(whole)
    other = tmp_path / "other"
    train("other", *OVERFIT, "--max_steps", "20", "--seed", "7", "--eval_every", "10")
    theirs = next((other / "checkpoints").glob("step_*"))
    values = metrics_of(whole)
    assert values["best_step"] < 60
    for way, why in (("removed", "No such file"), ("another run's", "of another run")):
        copy = shutil.copytree(whole, tmp_path / way)
        lost = copy / "checkpoints" / best.name
        shutil.rmtree(lost)
        if way == "another run's":
            shutil.copytree(theirs, lost)
        done = run("evaluate", copy, data, "--device", "cpu")
        assert re.search(f"warning: {lost} is damaged: .*{why}", done.stderr)
        assert json.loads(done.stdout)["auc"] == values["last/auc"]
        (copy / "result.json").unlink()
        done = run("train", "--resume", copy)
        assert re.search(f"warning: the best checkpoint, {lost}, is lost: .*{why}", done.stderr)
        again = metrics_of(copy)
        assert "best_step" not in again
        assert again["test/auc"] == values["last/auc"]


def test_a_best_state_that_is_lost_during_the_run_is_not_the_result(
    script, train, monkeypatch, tmp_path
):
    program = script("train")
    load_best = program.RunCheckpoints.load_best

    def remove_first(self, model, step):
        self.writer.wait()
        shutil.rmtree(self.directory / "checkpoints" / f"step_{step}")
        return load_best(self, model, step)

    monkeypatch.setattr(program.RunCheckpoints, "load_best", remove_first)
    done = train("run", *OVERFIT, "--max_steps", "60", "--patience", "0")
    assert "warning: the best state is lost, the last one is the result: " in done.stderr
    values = metrics_of(tmp_path / "run")
    assert not {"best_step", "last/auc"} & values.keys()
    assert 0 < values["test/auc"] < 1


@pytest.mark.slow
def test_a_run_that_is_killed_after_its_last_evaluation_stops_early_too(
    start, run, command, tmp_path
):
    run("train", *command("whole", *OVERFIT))
    whole = metrics_of(tmp_path / "whole")
    step = whole["best_step"] + 30
    process = start("train", *command("run", *OVERFIT))
    saved = tmp_path / "run" / "checkpoints" / f"step_{step:.0f}"
    while not saved.exists() and process.poll() is None:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run("train", "--resume", tmp_path / "run")
    found = metrics_of(tmp_path / "run")
    exact = [name for name in whole if name.startswith(("test/", "val/", "last/", "best_step"))]
    assert [found[name] for name in exact] == [whole[name] for name in exact]


def test_without_patience_or_checkpoints_the_last_state_is_the_result(train, tmp_path):
    done = train("run", *OVERFIT, "--patience", "0", "--checkpoint", "false")
    values = metrics_of(tmp_path / "run")
    assert max(validations(log_lines(tmp_path / "run"))) == 6 * 38
    assert "not kept without --checkpoint" in done.stdout
    assert "last/auc" not in values


def meta_of(rows, val=1, positives=0.25, ids=10**6):
    splits = {
        name: Split(files=(), rows=n, positives=int(positives * n))
        for name, n in (("train", rows), ("val", val))
    }
    categorical = (Categorical(name="a", cardinality=ids),)
    return Meta(label="label", dense=(), categorical=categorical, splits=splits)


def test_patience_is_an_epoch_where_there_are_several():
    def validations(**options):
        return pace.validations(RunConfig(**options), meta_of(40, val=500), 40)

    assert validations(epochs=1) == (10, 0, 40, False)
    assert validations(epochs=2) == (10, 4, 80, False)
    assert validations(epochs=2, eval_every=70) == (70, 2, 80, False), (
        "evaluations are rarer than epochs"
    )
    assert validations(epochs=2, patience=7) == (10, 7, 80, False)
    assert validations(epochs=2, patience=0, max_steps=50) == (10, 0, 50, False)


def test_a_small_table_has_small_batches_and_several_epochs():
    auto, large, small = RunConfig(), meta_of(50_000), meta_of(49_999)
    sizes = [32, 32, 32, 64, 256, 256, 512, 512]
    for rows, size in zip((0, 1, 480, 5_092, 17_817, 32_767, 32_768, 10**9), sizes, strict=True):
        assert pace.batch_size(auto, meta_of(rows)) == size
    for rows, size in ((50_000, 128), (110_000, 256), (131_071, 256), (131_072, 512)):
        assert pace.batch_size(auto, meta_of(rows)) == size, "the only epoch has 256 steps"
    assert pace.batch_size(RunConfig(follow="days"), meta_of(50_000)) == 512, "days follow"
    assert pace.batch_size(RunConfig(batch_size=7), small) == 7
    assert pace.batch_size(RunConfig(batch_size=7), small, processes=2, resumed=8) == 7
    assert pace.batch_size(auto, small, processes=4, resumed=32) == 32
    with pytest.raises(ValueError, match=r"evenly: resume it with one .*: 1, 2, 4, 8, 16, 32$"):
        pace.batch_size(auto, small, processes=3, resumed=32)
    for processes, size in ((2, 512), (3, 510), (7, 511), (600, 600)):
        assert pace.batch_size(auto, small, processes=processes) == size, "they share it"

    assert [pace.epochs(auto, meta) for meta in (large, small, meta_of(9, val=0))] == [1, 20, 5]
    for rows, ids, val, several in (
        (100_000, 10_000, 500, 10),
        (100_000, 10_001, 500, 1),
        (100_000, 10_000, 0, 1),
        (300_000, 9, 500, 3),
        (600_000, 9, 500, 1),
        (50_000, 9, 500, 20),
    ):
        familiar = meta_of(rows, val=val, ids=ids)
        assert pace.epochs(auto, familiar) == several
        assert ("few ids" in pace.planned(auto, familiar, 390, 256)[1]) == (several > 1)
        assert pace.epochs(RunConfig(init_from="runs/day_7"), familiar) == 1
    assert pace.epochs(RunConfig(epochs=2), small) == 2
    assert pace.epochs(RunConfig(init_from="runs/day_7"), small) == 1
    assert pace.validations(auto, large, 40) == (10, 0, 40, True)
    few, enough = meta_of(4_000, val=499), meta_of(4_000, val=500)
    assert not pace.validations(auto, meta_of(9, val=0), 40)[3]
    assert pace.validations(auto, few, 7) == (10, 3, 140, True)
    assert pace.validations(auto, few, 40) == (40, 3, 800, True)
    assert pace.validations(auto, enough, 40) == (100, 3, 800, False)
    for rare, by_loss in ((0.019, True), (0.02, False), (0.98, False), (0.99, True)):
        imbalanced = meta_of(4_000, val=5_000, positives=rare)
        assert pace.validations(auto, imbalanced, 100) == (100, 3, 2000, by_loss)
    assert pace.validations(auto, enough, 140) == (140, 3, 2800, False)
    assert pace.validations(RunConfig(max_steps=9, patience=1), enough, 40) == (100, 1, 9, False)

    note = "note: a small table, so at most 20 epochs of 40 steps with 512 rows each (--epochs, "
    assert pace.planned(auto, small, 40, 512) == (800, f"{note}--batch_size)")
    given = RunConfig(epochs=2, batch_size=9)
    shared = "1 epoch of 40 steps with 126 rows each, which the processes can share"
    followed = RunConfig(follow="days", batch_size=1024)
    for config, meta, size, text in (
        (auto, large, 128, "1 epoch of 40 steps with 128 rows each"),
        (auto, large, 126, shared),
        (given, small, 9, "2 epochs of 40 steps with 9 rows each"),
        (replace(given, max_steps=80), small, 9, "2 epochs of 40 steps with 9 rows each"),
        (replace(given, max_steps=3), small, 9, "3 steps, as given, of 2 epochs of 40 steps with "),
        (followed, small, 1024, "1,024 rows each step"),
    ):
        assert text in pace.planned(config, meta, 40, size)[1]


def test_the_best_model_is_the_first_of_equal_ones():
    validations, progress = Validations(10, 2, 100), Progress(steps=50)
    assert not validations.stop_early(progress)
    assert validations.last_step == 100, "nothing was evaluated"
    for step, values, best in ((10, {"auc": 0.7}, 10), (20, {"auc": 0.7}, 10), (20, {}, 10)):
        progress.steps = step
        validations.note(progress, values)
        assert (progress.best_step, progress.best) == (best, 0.7)
        assert progress.validated == (step, values)
        assert not validations.stop_early(progress)
    assert validations.last_step == 100
    progress.steps = 30
    validations.note(progress, {"auc": 0.6})
    assert "stopped at step 30" in validations.stop_early(progress)
    assert validations.last_step == 30

    progress, few = Progress(steps=10), Validations(10, 1, 100, by_loss=True)
    for progress.steps, auc, loss in ((10, 0.7, 0.5), (20, 0.8, 0.6)):
        few.note(progress, {"auc": auc, "log_loss": 0.0}, loss)
    stopped = few.stop_early(progress)
    assert "step 20: validation log loss has not fallen since step 10" in stopped
    assert (progress.best_step, few.last_step) == (10, 20)
    forever = Validations(10, 0, 2**31)
    progress.validated = 10**9, {}
    assert not forever.stop_early(progress)
    assert forever.last_step == 2**31


def test_shortly_before_the_end_there_is_no_validation():
    validations = Validations(3124, 0, 12_497)
    assert [step for step in range(12_498) if validations.due(step)] == [3124, 6248, 9372]
    assert not Validations(781, 0, 3_125).due(3_124)
    assert Validations(9, 0, 10).due(9), "the end is a tenth of the interval away"
    assert Validations(9, 0, 9).due(9)


@pytest.fixture
def dense(train, tmp_path):
    """A trained model."""
    train("dense", "--optim.lr", "0.02")
    return tmp_path / "dense"


def test_a_model_that_is_compressed_alone_is_saved(run, dense, train, data, tmp_path):
    given = ["--init_from", dense, "--emb", "tt", "--tt.rank", "4", "--max_steps", "0"]
    train("tt", *given)
    values = metrics_of(tmp_path / "tt")
    assert values["test/auc"] == values["fitted/auc"]
    assert values["embeddings/compression"] > 1.2
    again = json.loads(run("evaluate", tmp_path / "tt", data).stdout)
    assert again["auc"] == values["fitted/auc"]
    done = train("none", "--max_steps", "0", status=2)
    assert "max_steps is 0, it must be at least 1 without init_from" in done.stderr


def test_fine_tuning_that_only_destroys_leaves_the_fitted_model(dense, train, tmp_path):
    given = ["--init_from", dense, "--optim.fine_tune", "5", "--optim.warmup_steps", "0"]
    done = train("worse", *given, "--epochs", "2")
    values = metrics_of(tmp_path / "worse")
    assert values["best_step"] == 0
    assert values["test/auc"] == values["fitted/auc"]
    assert values["last/auc"] < values["fitted/auc"]
    assert "which costs 0.0000 of validation AUC: learning rates x5 for embeddings" in done.stdout


def test_rates_of_fine_tuning_follow_what_was_lost(dense, run, train, tmp_path):
    given = ["--init_from", dense, "--optim.lr", "0.02", "--log_every", "1"]
    train("same", *given, "--max_steps", "12")
    rates = [line for line in log_lines(tmp_path / "same") if "lr/dense" in line]
    assert rates[-1]["lr/embeddings"] == pytest.approx(0.02 * 0.1)
    assert rates[-1]["lr/dense"] == pytest.approx(0.02 * 0.1**4)
    run("train", "--resume", tmp_path / "same", "--max_steps", "14")
    rates = [line for line in log_lines(tmp_path / "same") if "lr/dense" in line]
    assert rates[-1]["lr/embeddings"] == pytest.approx(0.02 * 0.1)
    lossy = [*given, "--emb", "hash", "--hash.rows", "4", "--tables.threshold", "0"]
    train("lossy", *lossy, "--max_steps", "12")
    rates = [line for line in log_lines(tmp_path / "lossy") if "lr/dense" in line]
    assert rates[-1]["lr/embeddings"] == pytest.approx(0.02 * 0.3)
    assert rates[-1]["lr/dense"] == pytest.approx(0.02 * 0.3**4)


def test_tables_that_learn_more_from_the_beginning_begin_anew(dense, train, tmp_path):
    """qr, for an epoch of the same rows; of fewer rows it goes on from the fit."""
    given = ["--init_from", dense, "--emb", "qr", "--tables.threshold", "0"]
    done = train("epoch", *given)
    told = "an epoch of new tables learns more, so they start from scratch: learning rates x1"
    assert told in done.stdout
    steps = [json.loads(line) for line in (tmp_path / "epoch" / "metrics.jsonl").open()]
    started = next(line["val/auc"] for line in steps if line["step"] == 0 and "val/auc" in line)
    fitted = next(line["fitted/auc"] for line in steps if "fitted/auc" in line)
    assert started < fitted - 0.01
    assert "from scratch" not in train("few", *given, "--max_steps", "3").stdout


@pytest.mark.parametrize("kind", ["qr", "hash", "robe", "cafe", "short", "block", "drop"])
def test_tables_of_which_kinds_begin_anew(kind):
    plan = [(kind, {}), (kind, {}), ("dense", {})]
    model = DLRM(2, [60, 50, 3], 4, plan, bottom_mlp=[4], top_mlp=[4])
    before = {name: value.clone() for name, value in model.named_parameters()}
    anew = kind not in ("block", "drop")
    assert rates_after_fit(model, "a", "b", 0.01, 1) == (1.0, False), "other rows"
    assert rates_after_fit(model, "a", "a", 0.01, 0.9) == (0.3, False), "too few of them"
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert rates_after_fit(model, "a", "a", 0.01, 1) == ((1.0, True) if anew else (0.3, False))
    for name, value in model.named_parameters():
        drawn = anew and name.startswith("sparse_arch")
        assert torch.equal(value, before[name]) != drawn


def test_the_factor_on_rates():
    model = DLRM(2, [60], 4, [("dense", {})], bottom_mlp=[4], top_mlp=[4])

    def factor(lost, before="a", now="a"):
        return rates_after_fit(model, before, now, lost, 9)[0]

    for lost in (0, -0.1, math.nan):
        assert factor(lost, "data/a", "data/../data/a") == 0.1
    assert factor(0.004) == pytest.approx(0.24)
    assert factor(0.005) == factor(0.3) == 0.3
    assert factor(0, "a", "b") == factor(0, "None", "b") == factor(0, None) == 1, "new rows"
    assert auc_lost({"auc": 0.8}, {"auc": 0.75}) == pytest.approx(0.05)
    assert math.isnan(auc_lost({}, {}))


def test_checkpoints_come_every_so_many_steps(train, tmp_path):
    given = ["--checkpoint_every", "4", "--max_steps", "10", "--keep_checkpoints", "9"]
    train("run", *given)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == ["step_10", "step_4", "step_8", "step_9"], "9 is a quarter of the epoch"
    with Checkpoint.open(tmp_path / "run" / "checkpoints" / "step_8") as found:
        assert found.state.steps == 8


@pytest.mark.parametrize("every", ["0", "m", "10d", "-5", "1.5h", "10 m", ""])
def test_another_period_is_refused(every):
    with pytest.raises(ValueError, match=r"checkpoint_every\n  It should be steps, such as 1000"):
        RunConfig(checkpoint_every=every)


def test_checkpoints_come_after_so_much_time(monkeypatch):
    now, questions = [0.0], []
    monkeypatch.setattr(checkpoint_timer.time, "monotonic", lambda: now[0])
    world = World()
    monkeypatch.setattr(world, "from_first", lambda make: questions.append(1) or make())
    timer, due = CheckpointTimer("10m", world, step=100), []
    for step in range(101, 100_101):  # 20 steps a second
        now[0] += 0.05
        if timer.due(step):
            due.append(now[0])
    assert len(due) == 8
    assert all(600 <= later - before < 603 for before, later in zip([0, *due], due, strict=False))
    assert len(questions) < 200, "the processes rarely agree"
    assert not any(CheckpointTimer(None, world).due(step) for step in range(100))
