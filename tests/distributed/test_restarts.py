"""Jobs of torchrun that go on after a process or a host is lost, with fewer or more of them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrm.distributed.world import agree_on_attempt
from tests.kit import children, latest_step, losses, write_synthetic

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
OPTIONS = "--device cpu --model.bottom_mlp [8] --model.top_mlp [8] --batch_size 180 --emb paged"
OPTIONS += " --optim.warmup_steps 5 --log_every 1 --eval_every 10 --eval_batch_size 500 --epochs 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "synthetic", rows=4001)


@pytest.fixture
def given(data, tmp_path):
    """The options of a run."""
    return lambda *more: [*OPTIONS.split(), "--data", data, "--output", tmp_path, *more]


def wait_for_step(process, output, step):
    """Wait until a run below ``output`` has logged a step and saved the checkpoint before it."""

    def reached():
        logged = any(f'"step": {step},' in p.read_text() for p in output.glob("*/metrics.jsonl"))
        return logged and (step < 10 or any(map(latest_step, output.iterdir())))

    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, "".join(p.read_text() for p in output.glob("error*"))
        assert time.monotonic() < deadline
        time.sleep(0.005)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def kill_a_worker(pid, which):
    os.kill(children(pid)[which], signal.SIGKILL)


def kill_with_workers(pid):
    """Kill a process of torchrun and its workers, as the loss of its host does."""
    for each in [pid, *children(pid)]:
        os.kill(each, signal.SIGKILL)


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
        ["--master-port", "PORT"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:PORT", "--rdzv-id", "own"],
    ],
    ids=["static", "c10d"],
)
def test_every_rendezvous_knows_its_own_run(launch, given, tmp_path):
    """And a job that is started anew does not take the run for its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [option.replace("PORT", str(free_port())) for option in launch]
    command += ["--max-restarts", "4", "train.py", *map(str, given("--name", "run"))]
    popen = {"cwd": ROOT, "env": ENVIRONMENT}
    with (
        (tmp_path / "error").open("w+") as stderr,
        subprocess.Popen(command, stderr=stderr, **popen) as process,
    ):
        for step in (12, 26):
            wait_for_step(process, tmp_path, step)
            kill_a_worker(process.pid, step % 2)
        process.wait(120)
    error = (tmp_path / "error").read_text()
    assert process.returncode == 0, error
    assert error.count("is resumed") >= 2, error
    if "--rdzv-id" in launch:
        command[command.index("own")] = "another"
    command[command.index("--max-restarts") + 1] = "0"
    done = subprocess.run(
        command, check=False, timeout=120, stderr=subprocess.PIPE, text=True, **popen
    )
    assert done.returncode
    refused = re.findall("^error: .*run exists: choose another --name", done.stderr, re.MULTILINE)
    assert len(refused) == 1, done.stderr


@pytest.mark.slow
def test_four_processes_are_killed_and_two_go_on(start, given, tmp_path):
    process = start("train", *given("--name", "run"), processes=4)
    wait_for_step(process, tmp_path, 23)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = start("train", "--resume", tmp_path / "run", processes=2).wait()
    assert done.returncode == 0, done.stderr
    whole = start("train", *given("--name", "whole"), processes=4).wait()
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


@pytest.fixture
def agent(given, tmp_path):
    """Starts one of the agents of a job, each with two workers; all have the same command."""
    started = []
    port = free_port()

    def agent(nodes, *more):
        conf = f"is_host={int(not started)},last_call_timeout=2,keep_alive_interval=1"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", "own"]
        command += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", conf]
        command += ["--monitor-interval", "0.1", "--max-restarts", "2"]
        command += ["train.py", *map(str, given("--name", "run", *more))]
        # Else one that joins a running job waits for an address that is written only once.
        environment = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (tmp_path / f"error{len(started)}").open("w") as error:
            popen = {"cwd": ROOT, "env": environment, "stdout": error, "stderr": error}
            started.append(subprocess.Popen(command, **popen))
        return started[-1]

    yield agent
    for process in started:
        if process.poll() is None:
            kill_with_workers(process.pid)
            process.wait()


def resumed(tmp_path):
    """How often the agents resumed their run."""
    return sum(path.read_text().count("is resumed") for path in tmp_path.glob("error?"))


@pytest.mark.slow
def test_two_agents_go_on_when_a_worker_is_lost(agent, start, given, tmp_path):
    agents = [agent("2"), agent("2")]
    wait_for_step(agents[0], tmp_path, 23)
    kill_a_worker(agents[0].pid, 1)
    for index, each in enumerate(agents):
        assert each.wait(timeout=180) == 0, (tmp_path / f"error{index}").read_text()
    assert resumed(tmp_path) == 1
    whole = start("train", *given("--name", "whole"), processes=4).wait()
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_an_agent_goes_on_when_the_other_is_lost_and_when_it_is_back(agent, start, given, tmp_path):
    """With two of four processes, and then with four again."""
    more = ["--epochs", "5", "--patience", "0"]
    first, second = agent("1:2", *more), agent("1:2", *more)
    wait_for_step(first, tmp_path, 23)
    kill_with_workers(second.pid)
    second.wait()
    wait_for_step(first, tmp_path, 43)
    left, log = children(first.pid), tmp_path / "error0"
    for worker in left:  # until the new agent is there
        os.kill(worker, signal.SIGSTOP)
    ended = log.read_text().count("closing signal")
    agent("1:2", *more)
    deadline = time.monotonic() + 120
    while log.read_text().count("closing signal") < ended + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for worker in left:
        os.kill(worker, signal.SIGCONT)
    assert first.wait(timeout=180) == 0, (tmp_path / "error0").read_text()
    assert resumed(tmp_path) == 2
    whole = start("train", *given("--name", "whole", *more), processes=4).wait()
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


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
