"""Jobs of torchrun that go on after a process is lost, with ``--max-restarts``."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrm.data import synthetic
from dlrm.distributed.world import agree_on_attempt

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
OPTIONS = "--device cpu --model.bottom_mlp [8] --model.top_mlp [8] --batch_size 180 --emb paged"
OPTIONS += " --optim.warmup_steps 5 --log_every 1 --eval_every 10 --eval_batch_size 500 --epochs 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "synthetic"
    cardinalities = [3000 if column % 5 == 0 else 20 + column for column in range(26)]
    synthetic.write(directory, rows=4001, cardinalities=cardinalities, fractions=[0.8, 0.1, 0.1])
    return directory


@pytest.fixture
def given(data, tmp_path):
    """The options of a run."""
    return lambda *more: [*OPTIONS.split(), "--data", data, "--output", tmp_path, *more]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert len({step for step, _ in logged}) == len(logged), "a step is logged twice"
    return dict(logged)


def wait_for_step(process, output, step):
    """Wait until a run below ``output`` has logged a step."""
    deadline = time.monotonic() + 120
    while not any(f'"step": {step},' in p.read_text() for p in output.glob("*/metrics.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kill_a_worker(pid, which):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[which]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("step", "which", "name", "note"),
    [
        (23, 1, ["--name", "run"], "is resumed"),
        pytest.param(23, 0, [], "is resumed", marks=pytest.mark.slow),
        pytest.param(5, 0, ["--name", "run"], "and begins again", marks=pytest.mark.slow),
        pytest.param(5, 1, [], "and begins again", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_loses_a_worker_ends_as_if_it_had_not(
    step, which, name, note, start, given, tmp_path
):
    process = start("train", *given(*name), processes=2, max_restarts=1)
    wait_for_step(process, tmp_path, step)
    kill_a_worker(process.pid, which)
    assert process.wait().returncode == 0, process.stderr
    assert process.stderr.count(f"note: restarted by torchrun: {tmp_path}") == 1
    assert note in process.stderr
    (run,) = tmp_path.iterdir()
    assert len(list(run.glob("events.*"))) == (2 if note == "is resumed" else 1)
    whole = start("train", *given("--name", "whole"), processes=2).wait()
    assert whole.returncode == 0, whole.stderr
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [
        ["--standalone"],
        ["--master-port", "29533"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29534", "--rdzv-id", "own"],
    ],
    ids=["standalone", "static", "c10d"],
)
def test_every_rendezvous_knows_its_own_run(launch, given, tmp_path):
    """And a job that is started anew does not take the run for its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *launch]
    command += ["--max-restarts", "2", "train.py", *map(str, given("--name", "run"))]
    popen = {"cwd": ROOT, "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **popen) as process:
        for step in (12, 26):
            wait_for_step(process, tmp_path, step)
            kill_a_worker(process.pid, step % 2)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert error.count("is resumed") == 2, error
    if "--rdzv-id" in launch:
        command[command.index("own")] = "another"
    done = subprocess.run(command, check=False, timeout=120, **popen)
    assert done.returncode
    refused = re.findall("^error: .*run exists: choose another --name", done.stderr, re.MULTILINE)
    assert len(refused) == 3, done.stderr


def test_an_attempt_is_not_confused_by_what_another_one_left():
    """Its processes agree on a text, though those of an earlier attempt ended at any point."""
    store = torch.distributed.HashStore()
    first = in_threads(store, 3)
    assert len(set(first)) == 1
    left = torch.distributed.HashStore()
    left.set("hello/1", "of a process that ended")  # it was answered, or not
    left.set("hello/2", "another")
    left.set("welcome/another", "old")
    left.set("ready/old/2", "")
    assert len({*in_threads(left, 3), "old", *first}) == 3


def in_threads(store, size):
    """What ``size`` processes agree on, the first being the last to begin."""
    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(agree_on_attempt, store, rank, size) for rank in reversed(range(size))]
        return [future.result(timeout=30) for future in found]
