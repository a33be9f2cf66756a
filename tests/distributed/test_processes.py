"""Real processes under torchrun, with gloo on the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dlrm.distributed.world import World
from dlrm.utils.device import pick_device
from tests.kit import (
    best_name,
    children,
    latest_step,
    losses,
    metrics_of,
    wait_for,
    write_synthetic,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # two processes may share a GPU
OPTIONS = ["--device", "cpu", "--model.bottom_mlp", "[8]", "--model.top_mlp", "[8]"]
OPTIONS += ["--batch_size", "180", "--optim.warmup_steps", "5", "--log_every", "1"]
OPTIONS += ["--sharding.threshold", "1000", "--eval_every", "10", "--eval_batch_size", "500"]


@pytest.fixture
def torchrun(start):
    """Runs a program in several processes, to an exit status."""

    def torchrun(processes, program, *arguments, status=0):
        done = start(program, *arguments, processes=processes).wait()
        assert done.returncode == status, done.stderr
        return done

    return torchrun


def real_torchrun(processes, *arguments):
    """The program torchrun itself, in a process of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--standalone", *(str(argument) for argument in arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **pipes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_synthetic(tmp_path_factory.mktemp("data") / "synthetic", rows=4001)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_and_way_equals_one_process(torchrun, processes):
    done = torchrun(processes, HERE / "ranks.py")
    assert "all is equal" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("processes", "impl"),
    [
        (2, []),
        pytest.param(2, ["triton", "short"], marks=pytest.mark.slow),
        pytest.param(4, [], marks=pytest.mark.slow),
    ],
)
def test_tables_that_peers_hold_equal_whole_ones(torchrun, processes, impl):
    done = torchrun(processes, HERE / "peers.py", *impl)
    assert "all is equal" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("part", ["dynamic", "exchanges", "bags", "drop"])
def test_captured_steps_of_two_gpus_equal_those_of_one(part):
    out, error = real_torchrun(2, HERE / "ranks.py", "gpus", part).communicate(timeout=240)
    assert "all is equal" in out, out + error


@pytest.mark.gpu
def test_tables_that_gpus_hold_equal_whole_ones():
    out, error = real_torchrun(3, HERE / "peers.py").communicate(timeout=240)
    assert "all is equal" in out, out + error


def test_a_run_of_several_processes(run, torchrun, data, tmp_path):
    """Losses, metrics and checkpoints: of two processes, resumed by one and by three."""
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--epochs", "2"]
    common += ["--emb", "paged", "--optim.embeddings", "adam"]
    run("train", *common, "--name", "one")
    expected = losses(tmp_path / "one")
    assert len(expected) == 2 * 18  # the last batch of an epoch has 141 rows
    # stopped in the first epoch, behind the last evaluation
    peers = ["--sharding.exchange", "peers"]
    done = torchrun(2, "train", *common, *peers, "--name", "two", "--max_steps", "15")
    assert "rank 1: " in done.stdout
    assert "exchange by peers" in done.stdout
    assert done.stdout.count("training rows") == 1
    shutil.copytree(tmp_path / "two", tmp_path / "again", symlinks=True)
    run("train", "--resume", tmp_path / "again", "--max_steps", "36")
    assert losses(tmp_path / "again") == pytest.approx(expected, abs=1e-5)
    collective = ["--sharding.exchange", "collective", "--max_steps", "36"]
    done = torchrun(3, "train", "--resume", tmp_path / "two", *collective)
    assert "exchange by collectives" in done.stdout
    assert losses(tmp_path / "two") == pytest.approx(expected, abs=1e-5)
    # bytes are of all processes; each part of a row that is cut by columns counts its own steps
    one, three = (metrics_of(tmp_path / name) for name in ("one", "two"))
    for name, rel in (("embeddings/bytes", 0), ("embeddings/optimizer_bytes", 1e-3)):
        assert three[name] == pytest.approx(one[name], rel=rel)
    # the metrics of one process given the same weights, to the last digit
    measured = run("evaluate", tmp_path / "two", data, "--device", "cpu").stdout
    metrics = metrics_of(tmp_path / "two")
    for name, value in json.loads(measured).items():
        if name not in ("split", "rows"):
            assert metrics[f"test/{name}"] == pytest.approx(value, abs=1e-7), name


@pytest.mark.slow
def test_dynamic_tables_of_several_processes(run, torchrun, data, tmp_path):
    """Ids come and leave as in one process; a run of two is resumed by one and by three."""
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--emb", "dynamic"]
    common += ["--dynamic.rows", "64", "--dynamic.admit", "2", "--dynamic.half_life", "5"]
    common += ["--sharding.threshold", "66"]  # those of 3,000 ids; the others are replicated
    run("train", *common, "--name", "one", "--max_steps", "30")
    done = torchrun(2, "train", *common, "--name", "two", "--max_steps", "15")
    assert re.search(r"rank 1: .* rows 33-66; .*\n.*\nevery rank: 0.0 MB, the index", done.stdout)
    shutil.copytree(tmp_path / "two", tmp_path / "again", symlinks=True)
    run("train", "--resume", tmp_path / "again", "--max_steps", "30")
    torchrun(3, "train", "--resume", tmp_path / "two", "--max_steps", "30")

    expected = metrics_of(tmp_path / "one")
    assert expected["ids/evicted"] > 100
    for name in ("two", "again"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        found = metrics_of(tmp_path / name)
        for value in [*(n for n in expected if n.startswith("ids/")), "embeddings/bytes"]:
            assert found[value] == expected[value]

    # Rows in host memory are replicated.
    host = ["--dynamic.cache_share", "0.3", "--name", "host", "--max_steps", "15"]
    torchrun(2, "train", *common, *host)
    first = {step: loss for step, loss in losses(tmp_path / "one").items() if step <= 15}
    assert losses(tmp_path / "host") == pytest.approx(first, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--tables.dtype", "int8", "--sharding.threshold", "0", "--sharding.by", "row"],
        ["--emb", "auto", "--budget", "4x", "--sharding.threshold", "20"],  # some of each kind
        # Pieces of one column have the shape of a state with one number a row.
        ["--model.embedding_dim", "2", "--optim.embeddings", "adam", "--sharding.by", "column",
         "--sharding.threshold", "0"],
    ],
    ids=["rows", "auto", "columns"],
)  # fmt: skip
def test_a_checkpoint_of_shards_of_any_number_of_processes(run, torchrun, data, tmp_path, options):
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--name", "run"]
    done = torchrun(2, "train", *common, *options, "--max_steps", "6")
    assert "rank 1: " in done.stdout
    found = run("evaluate", tmp_path / "run", data, "--device", "cpu").stdout
    assert json.loads(found)["auc"] == pytest.approx(
        metrics_of(tmp_path / "run")["test/auc"], abs=1e-7
    )
    run("train", "--resume", tmp_path / "run", "--max_steps", "8")
    torchrun(3, "train", "--resume", tmp_path / "run", "--max_steps", "10")

    # As a run of two processes that was not stopped, but for how int8 weights are rounded.
    common[-1] = "whole"
    torchrun(2, "train", *common, *options, "--max_steps", "10")
    noise = 1e-5 if "column" in options else 2e-4
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=noise)


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(torchrun, data, tmp_path):
    """A killed process ends all; the run goes on from its last checkpoint."""
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--epochs", "30", "--patience", "0"]
    common += ["--emb", "tt", "--tt.rank", "4", "--tt.cache_rows", "40", "--populate_every", "7"]
    process = real_torchrun(2, "train.py", *common, "--name", "killed")
    wait_for(tmp_path / "killed" / "metrics.jsonl", '"step": 33,', process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SIGKILL" in error
    assert "[rank0]: Traceback" not in error
    assert (tmp_path / "killed" / "checkpoints" / best_name(tmp_path / "killed")).exists()
    step = max(losses(tmp_path / "killed")) + 10
    torchrun(2, "train", "--resume", tmp_path / "killed", "--max_steps", step)
    torchrun(2, "train", *common, "--name", "whole", "--max_steps", step)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_signal_to_one_process_ends_all_after_the_same_step(start, torchrun, data, tmp_path):
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--epochs", "30", "--emb", "paged"]
    common[common.index("--eval_every") + 1] = "1000"
    process = start("train", *common, "--name", "run", processes=2)
    wait_for(tmp_path / "run" / "metrics.jsonl", '"step": 33,', process)
    began = time.time()
    os.kill(children(process.pid)[1], signal.SIGTERM)
    process.wait()
    assert time.time() - began < 30
    assert len(re.findall("exitcode *: 143", process.stderr)) >= 1, process.stderr
    own, *_ = process.stderr.partition("torch/distributed/elastic")  # its report repeats the line
    assert own.count("interrupted") == 1, process.stderr
    assert f"interrupted; resume with --resume {tmp_path / 'run'}\n" in process.stderr
    assert "error: " not in process.stderr
    last = max(losses(tmp_path / "run"))
    assert latest_step(tmp_path / "run") == last
    torchrun(2, "train", "--resume", tmp_path / "run", "--max_steps", last + 10)
    torchrun(2, "train", *common, "--name", "whole", "--max_steps", last + 10)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_an_error_is_told_once(torchrun, data, tmp_path):
    common = [*OPTIONS, "--data", data, "--output", tmp_path]
    for options, text in (
        (["--batch_size", "181"], "can't be shared evenly by 2 processes: use 180 or 182"),
        (["--optim.lr", "1e30", "--optim.dense", "sgd"], "the loss is"),
    ):
        done = torchrun(2, "train", *common, *options, status=1)
        assert done.stderr.count("error: ") == 1, done.stderr
        assert text in done.stderr
        last = done.stderr.rpartition("traceback : ")[2]
        assert text in last, "torchrun's report ends with the error"
        assert len(re.findall("exitcode *: 2", done.stderr)) >= 1


def test_what_one_process_has_told_the_others_leave_at_that(torchrun, data, tmp_path):
    (tmp_path / "run").mkdir()
    done = torchrun(
        2, "train", *OPTIONS, "--data", data, "--output", tmp_path, "--name", "run", status=1
    )
    assert "run exists: choose another --name, or remove it" in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr


def test_a_full_disk_of_one_process_is_told(torchrun, data, tmp_path):
    """An archive of PyTorch's that can't be written says what is amiss to its own process only."""
    program = tmp_path / "full.py"
    program.write_text(
        "import os, resource, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.exit(__import__('train').main())\n"
    )
    done = torchrun(
        2, program, *OPTIONS, "--data", data, "--output", tmp_path, "--name", "run", status=1
    )
    assert "step_10 can't be written: File too large\n" in done.stderr, done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["job.json"]


def test_a_batch_that_nobody_chose_can_be_shared_and_is_kept(run, torchrun, data, tmp_path):
    given = [option for option in OPTIONS if option not in ("--batch_size", "180")]
    common = [*given, "--data", data, "--output", tmp_path, "--name", "run"]
    done = torchrun(3, "train", *common, "--max_steps", "3")
    assert "3 steps, as given, of 20 epochs of 107 steps with 30 rows each" in done.stdout, "not 32"
    resumed = run("train", "--resume", tmp_path / "run", "--max_steps", "6")
    assert "107 steps with 30 rows each" in resumed.stdout, "one process keeps them"
    assert max(losses(tmp_path / "run")) == 6


def test_another_batch_is_refused_by_any_number_of_processes(run, torchrun, data, tmp_path):
    common = [*OPTIONS, "--data", data, "--output", tmp_path, "--name", "run"]
    run("train", *common, "--batch_size", "181", "--max_steps", "3")
    done = torchrun(2, "train", "--resume", tmp_path / "run", "--batch_size", "180", status=1)
    assert "batch_size is 180 here and 181 in the state" in done.stderr, done.stderr


def test_scores_are_written_by_one_process(torchrun, data, tmp_path):
    done = torchrun(2, "predict", tmp_path, data, tmp_path / "scores.parquet", status=1)
    assert "error: dlrm predict runs in one process, but there are 2: start it" in done.stderr
    assert not (tmp_path / "scores.parquet").exists()


def test_metrics_are_printed_by_one_process(run, torchrun, data, tmp_path):
    run("train", *OPTIONS, "--data", data, "--output", tmp_path, "--name", "run",
          "--max_steps", "1")  # fmt: skip
    done = torchrun(2, "evaluate", tmp_path / "run", data, "--device", "cpu")
    assert json.loads(done.stdout)["auc"] == metrics_of(tmp_path / "run")["test/auc"]
    done = torchrun(2, "evaluate", tmp_path, data, status=1)
    assert done.stderr.count("error: ") == 1, done.stderr


def test_a_mistake_is_told_though_the_first_process_comes_last(torchrun, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        "import os, sys, time\n"
        "time.sleep(1.5 * (os.environ['RANK'] == '0'))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.exit(__import__('train').main())\n"
    )
    done = torchrun(2, program, "--device", "cpu", "--emb", "dence", status=1)
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "--emb is 'dence', did you mean 'dense'" in done.stderr


def test_devices_of_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="use --device cuda, and CUDA_VISIBLE_DEVICES"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 processes on this host and 2 GPUs: lower --nproc"):
        pick_device("auto")


def test_the_device_of_one_process_becomes_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cuda") == torch.device("cuda")
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="--device is cuda:2, but the last GPU is cuda:1"):
        pick_device("cuda:2")


def test_an_error_is_told_though_torchrun_is_gone(capsys):
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    world = World(rank=0, size=2, _store=torch.distributed.TCPStore("localhost", store.port))
    del store
    world.print_error_once("error: the loss is nan")
    assert capsys.readouterr().err.endswith("error: the loss is nan\n")


def test_shares_of_a_batch():
    world = World(rank=1, size=4)
    assert world.share(64) == 16
    assert world.share(66, even=False) == 17
    with pytest.raises(ValueError, match=r"use 64 or 68$"):
        world.share(66)
    with pytest.raises(ValueError, match="use 4 or 8"):
        world.share(3)
