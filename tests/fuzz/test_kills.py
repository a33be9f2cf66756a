"""Runs that get signals at random moments end with the bits of those that nobody killed.

    KILLS=200 python -m pytest -n 14 tests/fuzz/test_kills.py
    KILLS=17 KILLS_DEVICE=cuda python -m pytest tests/fuzz/test_kills.py -k 16     # case 16 again

A case is a kind, an optimizer, a number of ranks, who gets which signal and when. A worker of
torchrun that ends is restarted by torchrun. A job that ends is resumed, or started again if it had
no checkpoint yet.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from functools import partial

import pytest
import torch

from dlrm.embeddings import available
from dlrm.sparse_arch.table_plan import AUTO
from dlrm.training import checkpoint
from dlrm.training.run_directory import CHECKPOINTS, has_checkpoint
from tests.kit import children, log_lines, losses, metrics_of, write_synthetic

DEVICE = os.getenv("KILLS_DEVICE", "cpu")
RANKS = (1, 2) if DEVICE == "cpu" else (1,)  # NCCL refuses processes that share a GPU
OPTIONS = "--model.bottom_mlp [8] --model.top_mlp [8] --batch_size 180 --optim.warmup_steps 5"
OPTIONS += " --log_every 1 --eval_every 10 --eval_batch_size 500 --epochs 3 --populate_every 7"
OPTIONS += f" --sharding.threshold 1000 --tables.threshold 300 --device {DEVICE}"
OPTIONS += f" --deterministic {DEVICE != 'cpu'}"
KIND_OPTIONS = {
    "tt": "--tt.rank 4 --tt.cache_rows 30",
    "hash": "--hash.rows 64",
    "drop": "--drop.keep 40",
    "block": "--block.dim 2",
    "qr": "--qr.collisions 9",
    "robe": "--robe.rows 64",
    "cafe": "--cafe.rows 64",
    "offload": "--offload.cache_rows 500",
    AUTO: "--budget 3x",
}
KINDS = [*sorted(available()), AUTO]
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
STEPS = 54
TRACEBACK = r"(?m)^(\[rank\d+\]: )?Traceback"  # those that torchrun shows are indented
GRACE = 10  # seconds to leave after a signal, on a machine that does nothing else


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "synthetic", rows=4001)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(int(os.getenv("KILLS", "8"))))
def test_killed_runs_end_with_the_bits_of_whole_ones(number, start, data, tmp_path):
    rng = random.Random(number)
    kind, who = KINDS[number % len(KINDS)], ("job", "worker")[number % 2]
    sent = (signal.SIGKILL, signal.SIGTERM)[number // 2 % 2]
    given = f"{OPTIONS} --emb {kind} --optim.embeddings {rng.choice(RULES)}".split()
    given += ["--data", data, "--name", "run", *KIND_OPTIONS.get(kind, "").split(), "--output"]
    ranks = rng.choice(RANKS)
    launch = partial(start, "train", processes=ranks)

    began = time.monotonic()
    process = launch(*given, tmp_path / "whole").wait()
    assert process.returncode == 0, process.stderr
    seconds = time.monotonic() - began

    run, arguments = tmp_path / "killed" / "run", [*given, tmp_path / "killed"]
    limits = {"max_restarts": 3} if who == "worker" else {}
    process = launch(*arguments, **limits)
    for _ in range(rng.choice((1, 1, 2))):
        wait_for_moment(rng, seconds, run, process)
        if process.poll() is not None:
            break
        if who == "worker":
            with contextlib.suppress(FileNotFoundError, IndexError):  # there are none at the moment
                os.kill(rng.choice(children(process.pid)), sent)
            continue
        end(process, sent)
        if not has_checkpoint(run):
            shutil.rmtree(run, ignore_errors=True)
        again = ["--resume", run] if has_checkpoint(run) else arguments
        process = launch(*again, **limits)

    assert process.wait().returncode == 0, process.stderr
    assert not re.search(TRACEBACK, process.stderr), process.stderr
    found, expected = outcome(run), outcome(tmp_path / "whole" / "run")
    assert found.keys() == expected.keys()
    different = [name for name, value in found.items() if not equal(value, expected[name])]
    assert not different


def wait_for_moment(rng, seconds, run, process):
    """Wait for a time, a step, or a checkpoint that is half written."""
    when, step, log = rng.choice(("time", "step", "checkpoint")), rng.randrange(1, STEPS), None
    until = time.monotonic() + rng.uniform(0, 0.9 * seconds)
    while process.poll() is None:
        log = run / "metrics.jsonl"
        if when == "time" and time.monotonic() > until:
            return
        if when == "step" and log.exists() and f'"step": {step},' in log.read_text():
            return
        written = [path.stem.removeprefix("step_") for path in (run / CHECKPOINTS).glob("*.tmp")]
        if when == "checkpoint" and any(name.isdigit() and int(name) >= step for name in written):
            time.sleep(rng.uniform(0, 0.02))
            return
        time.sleep(0.001)


def end(process, sent):
    """Send a job a signal; it leaves soon, and says so with its status."""
    allowed = GRACE * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    began = time.monotonic()
    try:
        os.killpg(process.pid, sent)
    except ProcessLookupError:
        os.kill(process.pid, sent)  # it has no group of its own yet
    process.wait()
    # Before its first line nothing handles the signal, and torchrun has a status of its own.
    assert process.returncode in (0, 1, 128 + sent, -sent), process.stderr
    assert sent == signal.SIGKILL or not re.search(TRACEBACK, process.stderr), process.stderr
    assert time.monotonic() - began < allowed


def outcome(run):
    """Losses by step, metrics and weights."""
    found: dict = losses(run)
    assert len(found) == log_lines(run)[-1]["step"]  # a run may stop early
    metrics = metrics_of(run)
    kept = ("test/", "val/", "last/", "embeddings/", "best_step")
    found |= {name: value for name, value in metrics.items() if name.startswith(kept)}
    for name in ("latest", "best"):
        model, _ = checkpoint.load_model(run / CHECKPOINTS / name)
        found |= {f"{name}: {key}": value for key, value in model.state_dict().items()}
    return found


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
