"""Runs that follow days: --follow."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from dlrm.training import loaders
from dlrm.training.checkpoint import Checkpoint
from dlrm.training.checkpoint.manifest_json import read_manifest
from dlrm.training.run_directory import checkpoints
from tests.kit import latest_step, log_lines, losses, metrics_of, wait_for

ROOT = Path(__file__).parents[2]
DYNAMIC = ["--emb", "dynamic", "--dynamic.rows", "200", "--log_every", "1", "--batch_size", "64"]


def write_day(path, day, rows=500):
    """Rows of a day: some users leave, others come, and what they like drifts."""
    random = np.random.default_rng(day)
    users, items = random.integers(120, size=rows) + 40 * day, random.integers(50, size=rows)
    chance = 1 / (1 + np.exp(2 - 3 * ((users % 3 == 0) ^ (items % 5 == 0))))
    clicks = random.random(rows) < chance
    lines = [
        f"{int(c)},u{u},i{i},{u / 7:.2f}" for c, u, i in zip(clicks, users, items, strict=True)
    ]
    path.write_text("\n".join(["label,user,item,age", *lines]) + "\n")
    return path


@pytest.fixture(scope="session")
def five_days(tmp_path_factory):
    """Directories of prepared days with hashed ids, the last one with validation rows."""
    from dlrm.commands.prepare_table import main

    directory = tmp_path_factory.mktemp("days")
    for day in range(5):
        raw = write_day(directory / f"{day}.csv", day)
        first = ["--ids-of", str(directory / "day_0")] if day else ["--ids", "hash"]
        split = ["0.8", "0.1", "0.1"] if day == 4 else ["1", "0", "0"]
        output = str(directory / f"day_{day}")
        assert main([str(raw), "--output", output, *first, "--split", *split]) == 0
    return directory


@pytest.fixture
def bring(five_days, tmp_path):
    """Brings days into the directory that is followed, and returns it."""

    def bring(*days, where="arrived"):
        directory = tmp_path / where
        for day in days:
            shutil.copytree(five_days / f"day_{day}", directory / ".new")
            (directory / ".new").rename(directory / f"day_{day}")
        return directory

    return bring


@pytest.fixture
def follow(run, command):
    """Follows a directory in a small run, without waiting unless the options say so."""

    def follow(name, directory, *options, status=0):
        given = command(name, "--follow", directory, "--follow_wait", "0", *DYNAMIC, *options)
        return run("train", *given[2:], status=status)  # without --data

    return follow


@pytest.fixture
def days_of():
    """The logged metrics of each day, without their times."""
    return lambda run: [{**x, "time": 0} for x in log_lines(run) if "day" in x]


def states(run):
    """The bytes of all tensors of the latest checkpoint."""
    manifest = read_manifest(next(iter(checkpoints(run))))
    return {name: [s.sha256 for s in t.shards] for name, t in manifest.tensors.items()}


def test_each_day_is_evaluated_before_it_is_trained_on(
    follow, train, run, bring, days_of, five_days, tmp_path
):
    done = follow("run", bring(0, 1, 2))
    assert "day day_0: 500 rows\nday day_1: 500 rows, AUC 0." in done.stdout
    assert "no day after day_2: the run ends; --resume" in done.stdout
    days = days_of(tmp_path / "run")
    assert [(x["day"], x["step"]) for x in days] == [("day_1", 9), ("day_2", 17)]

    train("alone", *DYNAMIC, data=five_days / "day_0")
    found = run("evaluate", tmp_path / "alone", five_days / "day_1", "--split", "train")
    auc = json.loads(found.stdout)["auc"]  # of logits that are not shifted, which may break a tie
    assert days[0]["day/auc"] == pytest.approx(auc, abs=1e-6)

    values = metrics_of(tmp_path / "run")
    assert values["days/auc"] == pytest.approx((days[0]["day/auc"] + days[1]["day/auc"]) / 2)
    content = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [x["day"] for x in content["days"]] == ["day_1", "day_2"]
    assert values["ids/inserted"] > 200


def test_days_that_come_later_are_as_if_they_had_been_there(follow, run, bring, days_of, tmp_path):
    """With all kinds of interruptions: at the end of the days, and within one."""
    whole = ["--max_steps", "36"]
    follow("whole", bring(0, 1, 2, 3, 4, where="all"), *whole)
    directory = bring(0)
    follow("parts", directory)
    (directory / "day_1").mkdir()  # half written
    waits = run("train", "--resume", tmp_path / "parts").stdout
    assert "day_1 has no meta.json yet (prepare it, or remove it): the run ends" in waits
    (directory / "day_1").rmdir()
    bring(1, 2, 4)
    run("train", "--resume", tmp_path / "parts", "--max_steps", "19")
    bring(3)
    done = run("train", "--resume", tmp_path / "parts", "--max_steps", "36")
    assert "no rows" not in done.stdout
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert days_of(tmp_path / "parts") == days_of(tmp_path / "whole")
    assert states(tmp_path / "parts") == states(tmp_path / "whole")

    shutil.rmtree(directory / "day_4")
    refused = run("train", "--resume", tmp_path / "parts", "--max_steps", "40", status=2)
    assert "the run stopped in day 'day_4', which is not in" in refused.stderr


def test_it_waits_for_days_and_is_killed_in_one(
    start, run, follow, command, bring, days_of, tmp_path
):
    follow("whole", bring(0, 1, 2, where="all"))
    given = command("killed", "--follow", bring(0), "--follow_wait", "1", *DYNAMIC)
    process = start("train", *given[2:], "--checkpoint_every", "3")
    wait_for(process.out, "no day after day_0: looking again every 1 s", process)
    (tmp_path / "arrived" / "a_day").mkdir()  # whose turn is over
    bring(1)
    wait_for(tmp_path / "killed" / "metrics.jsonl", '"step": 13,', process)
    os.kill(process.pid, signal.SIGKILL)
    assert "day a_day: left out, as it was not complete when day_" in process.wait().stdout
    bring(2)
    run("train", "--resume", tmp_path / "killed", "--follow_wait", "0")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert days_of(tmp_path / "killed") == days_of(tmp_path / "whole")
    assert states(tmp_path / "killed") == states(tmp_path / "whole")


def test_processes_with_a_part_of_the_rows_each_follow_as_one_does(
    follow, start, command, bring, days_of, tmp_path
):
    options = ["--dynamic.rows", "{item: 1, default: 64}", "--optim.embeddings", "adam"]
    whole, parts, directory = tmp_path / "whole", tmp_path / "parts", bring(0, 1)
    follow("whole", directory, *options)
    given = command("parts", "--follow", directory, "--follow_wait", "0", *DYNAMIC, *options)
    done = start("train", *given[2:], "--sharding.threshold", "40", processes=2).wait()
    assert done.returncode == 0, done.stderr
    assert "rank 1: 0.0 MB, 50% of the look-ups: user rows 33-66" in done.stdout

    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    (one,), (two,) = days_of(whole), days_of(parts)
    assert two["day/auc"] == pytest.approx(one["day/auc"], abs=1e-3)
    index = {name: own for name, own in states(parts).items() if ".groups.0._" in name}
    assert len(index) == 6
    assert index.items() <= states(whole).items(), "the same ids in the same slots"


def test_validation_rows_of_a_day_calibrate_and_the_latest_state_is_the_result(
    follow, bring, tmp_path, monkeypatch
):
    follow("without", bring(0, 1, where="others"))
    values = [x["day/calibration"] for x in log_lines(tmp_path / "without") if "day" in x]
    with Checkpoint.open(tmp_path / "without") as checkpoint:
        scale, shift = checkpoint.build_model().calibration.tolist()
    assert scale == 1, "without validation rows, only the average is known"
    assert shift != 0
    assert values[0] == pytest.approx(1, abs=0.2)

    directory = bring(4)
    shutil.copytree(directory / "day_4", directory / "day_5")
    opened, loader = [], loaders.BatchLoader

    def watch(day, split, **options):
        opened.append((Path(day).name, split))
        return loader(day, split, **options)

    monkeypatch.setattr(loaders, "BatchLoader", watch)
    follow("run", directory)
    assert [day for day, split in opened if split == "val"] == ["day_4", "day_5"]
    logged = log_lines(tmp_path / "run")
    assert [x["step"] for x in logged if "val/auc" in x] == [7, 14]
    values = metrics_of(tmp_path / "run")
    assert "best_step" not in values
    assert 0.4 < values["test/auc"] < 1
    with Checkpoint.open(tmp_path / "run", best=True) as checkpoint:
        assert checkpoint.state.steps == 14
        assert checkpoint.build_model().calibration.tolist() != [1, 0]


def test_days_that_do_not_fit_are_refused(follow, run, bring, train, five_days, tmp_path):
    def refused(*options, directory=tmp_path / "arrived"):
        return follow("refused", directory, *options, status=2).stderr

    assert "has no directory at all: prepare a day there first" in refused()
    directory = bring(1)
    assert "trains on each day once: remove epochs and patience" in refused("--epochs", "2")
    elsewhere = refused("--data", five_days / "day_1")
    assert f"data is {five_days / 'day_1'}, but --follow reads the days" in elsewhere
    assert "day_1, a single prepared directory" in refused(directory=directory / "day_1")
    dry = follow("dry", directory, "--dry_run")
    assert f"steps: 8 of 64 samples on the first day, {directory / 'day_1'}" in dry.stdout

    # One without any rows, one with those of other splits alone, and one with other columns.
    follow("run", directory)
    meta = json.loads((directory / "day_1" / "meta.json").read_text())
    empty = meta | {"splits": {}}
    (directory / "day_2").mkdir()
    (directory / "day_2" / "meta.json").write_text(json.dumps(empty))
    assert "day day_2: no rows, it is left out" in run("train", "--resume", tmp_path / "run").stdout

    raw = write_day(tmp_path / "raw.csv", 3)
    given = ["--ids-of", directory / "day_1"]
    run("prepare_table", raw, "--output", directory / "day_3", *given)
    only_test = run("train", "--resume", tmp_path / "run", status=2).stderr
    assert "day_3 has no training rows, only those of other splits" in only_test
    again = ["--output", directory / "day_3", "--split", "1", "0", "0", "--overwrite"]
    run("prepare_table", raw, *again)
    other = run("train", "--resume", tmp_path / "run", status=2).stderr
    assert "day_3 does not continue the days before it: its dense is" in other


def test_days_without_rows_or_that_failed_and_days_that_are_numbered(
    follow, run, bring, days_of, tmp_path
):
    directory, first = bring(0), ["--ids-of", tmp_path / "arrived" / "day_0"]

    def prepare(day, rows, status=0):
        raw = write_day(tmp_path / "raw.csv", 3, rows)
        if status:
            raw.write_text(raw.read_text() + "maybe,u1,i1,0\n")
        split = ["--split", "1", "0", "0"]
        return run("prepare_table", raw, "--output", directory / day, *first, *split, status=status)

    for day, rows in (("a_day", 0), ("day_9", 0), ("day_10", 1), ("day_2", 40)):
        done = prepare(day, rows)
        assert ("raw.csv has no rows, and so has the result" in done.stderr) == (rows == 0)
    prepare("day_3", 40, status=2)
    with FileLock(directory / "day_3" / ".prepare" / "lock"):  # as if it were still prepared
        assert "day_3 has no meta.json yet" in follow("run", directory).stdout

    done = run("train", "--resume", tmp_path / "run")
    assert "day day_9: no rows, it is left out" in done.stdout
    late = "day {}: left out, as it was not complete when {} was read, and days are read in order"
    assert late.format("day_3", "day_9") in done.stdout
    assert [x["day"] for x in days_of(tmp_path / "run")] == ["day_2", "day_10"]

    # What came while the run was stopped is told, and nothing else.
    prepare("day_1", 40)
    again = run("train", "--resume", tmp_path / "run").stdout.splitlines()
    told = [line for line in again if "left out" in line]
    assert told == [late.format(day, "day_10") for day in ("day_1", "day_3")]


def test_a_damaged_day_keeps_what_was_learned_of_those_before(follow, bring, monkeypatch, tmp_path):
    directory = bring(0, 1, 2)
    (directory / "day_2" / "train.parquet").write_bytes(b"PAR1 cut off")
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.3), fsync(file)))  # a slow disk
    assert "day_2/train.parquet is not a complete" in follow("run", directory, status=2).stderr
    assert latest_step(tmp_path / "run") == 16


def test_tables_with_one_vocabulary_follow_too(run, command, tmp_path):
    directory, first = tmp_path / "arrived", []
    for day in range(2):
        raw, output = write_day(tmp_path / "raw.csv", day), directory / str(day)
        run("prepare_table", raw, "--output", output, "--split", "1", "0", "0", *first)
        first = ["--ids-of", directory / "0"]
    given = command("run", "--follow", directory, "--follow_wait", "0", "--emb", "hash")
    run("train", *given[2:], "--hash.rows", "64", "--tables.threshold", "0")
    assert [x["day"] for x in log_lines(tmp_path / "run") if "day" in x] == ["1"]

    raw = write_day(tmp_path / "raw.csv", 2)
    grown = [*first, "--append-new", "--split", "1", "0", "0"]
    run("prepare_table", raw, "--output", directory / "2", *grown)
    refused = run("train", "--resume", tmp_path / "run", status=2).stderr
    assert "prepare it again, with --ids-of" in refused


def test_the_commands_of_the_page_work(run, monkeypatch, tmp_path):
    page = (ROOT / "docs" / "dynamic.md").read_text().partition("## Day after day")[2]
    blocks = re.findall(r"```bash\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    commands = [shlex.split(line)[1:] for line in "".join(blocks).splitlines()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "none")
    for day, name in enumerate(("monday", "tuesday")):
        raw = write_day(tmp_path / f"{name}.csv", day)
        raw.write_text(raw.read_text().replace("label", "clicked"))

    served = [own for own in commands if own[0] == "serve"]
    for name, *given in commands:
        if name != "serve":
            run(name, *given, *(["--follow_wait", "0"] if name == "train" else []))
    run("train", "--resume", "runs/clicks")
    assert [x["day"] for x in log_lines(tmp_path / "runs" / "clicks") if "day" in x] == [
        "2026-11-24"
    ]
    assert [(tmp_path / path).is_dir() for path in (served[0][1], served[0][3])] == [True, True]


@pytest.mark.slow
def test_a_day_in_parts_of_five_minutes_takes_no_more_memory(follow, five_days, tmp_path):
    directory = tmp_path / "arrived"
    for part in range(288):
        source = five_days / f"day_{part % 4}"
        shutil.copytree(source, directory / f"{part:03}")
    follow("run", directory, "--log_every", "8")
    peaks = [x["memory/process_peak"] for x in log_lines(tmp_path / "run") if "train/loss" in x]
    assert len(peaks) == 288
    assert peaks[-1] - peaks[72] < 20e6
