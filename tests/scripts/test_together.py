"""Models that are trained next to each other."""

import json

import pytest
import torch

from dlrm.data import synthetic
from dlrm.utils.streams import MODELS, PURPOSES, stream_of, streams_of_model
from scripts.benchmarks import harness
from scripts.experiments.runner import Runner, RunSpec, _by_seed
from scripts.experiments.together import train_together

CELLS = {
    "dense": ["--emb=dense"],
    "tt": ["--emb=tt", "--tables.largest=4", "--tt.rank=4"],
    "cached": ["--emb=tt", "--tables.largest=4", "--tt.rank=4", "--tt.cache_rows=20"],
}


@pytest.fixture
def data(tmp_path):
    sizes = [300, 40, 7, 900, 20, 500]
    path = tmp_path / "data"
    synthetic.write(path, rows=3000, cardinalities=sizes, fractions=(0.8, 0.1, 0.1))
    return path


def options(data, device, name, *own):
    model = ["--model.bottom_mlp=16", "--model.top_mlp=16", "--model.embedding_dim=8"]
    training = ["--batch_size=64", "--optim.dense=sgd", "--optim.embeddings=sgd", "--optim.lr=0.1"]
    training += ["--populate_every=10", "--eval_every=100000", "--checkpoint=false"]
    common = [f"--data={data}", f"--device={device}", f"--output={data.parent}", f"--name={name}"]
    return [*common, *model, *training, *own]


def metrics(directory):
    found = json.loads((directory / "result.json").read_text())["metrics"]
    return {name: found[name] for name in ("val/auc", "test/auc", "test/log_loss")}


def test_models_that_are_trained_together_become_what_they_do_alone(data, device):
    from dlrm.commands.train import main

    tasks = []
    for name, own in CELLS.items():
        assert main(options(data, device, f"{name}-alone", *own)) == 0
        arguments = options(data, device, name, *own)
        tasks.append((data.parent / name, arguments))
    timed = train_together(tasks)
    assert timed["steps"] == -(-2400 // 64)
    assert timed["seconds"] > 0
    for name in CELLS:
        alone, together = (metrics(data.parent / each) for each in (f"{name}-alone", name))
        exact = {"rel": 2e-3} if device.type == "cuda" else {"rel": 0, "abs": 0}
        assert together == pytest.approx(alone, **exact), name
    harness.release()


def test_runs_of_one_seed_are_grouped(data):
    tasks = [(data, ["--seed=1", f"--seed={seed}"]) for seed in (3, 4, 3, 3)]
    assert [len(group) for group in _by_seed(tasks, 2)] == [2, 1, 1]


def test_other_rows_are_refused(data):
    first, other = (options(data, "cpu", name, *CELLS["tt"]) for name in ("first", "other"))
    tasks = [(data.parent / "first", first), (data.parent / "other", [*other, "--seed=1"])]
    with pytest.raises(ValueError, match="other would not read the rows of"):
        train_together(tasks)


@pytest.mark.slow
def test_a_runner_trains_them(data):
    common = options(data, "cpu", "unused")[2:3] + options(data, "cpu", "unused")[4:]
    runner = Runner(data.parent, 1, common, together=3)
    runs = [RunSpec(name, [*own, "--seed=0"]) for name, own in CELLS.items()]
    assert runner.train(runs, data) == []
    assert all(runner.metrics(name)["test/auc"] > 0.4 for name in CELLS)


def test_more_models_than_streams():
    message = f"model {MODELS}: at most {MODELS} of a GPU"
    with pytest.raises(ValueError, match=message), streams_of_model(MODELS):
        pass


@pytest.mark.gpu
def test_models_share_no_stream_that_their_steps_use():
    device = torch.device("cuda")
    found = {}
    for number in range(MODELS):
        with streams_of_model(number):
            for purpose in PURPOSES:
                found.setdefault(purpose, set()).add(stream_of(device, purpose).cuda_stream)
    assert [len(found[each]) for each in ("steps", "sorts", "parallel")] == [MODELS] * 3
    assert len(set.union(*found.values())) == 3 * MODELS + len(PURPOSES) - 3
