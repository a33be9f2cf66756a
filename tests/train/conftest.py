"""What tests of train.py share: data, the program, runs that are only read."""

import importlib
from pathlib import Path

import pytest

from tests.kit import write_synthetic

ROOT = Path(__file__).parents[2]

SMALL = ["--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]", "--batch_size", "256"]
SMALL += ["--epochs", "1", "--optim.warmup_steps", "5", "--device", "cpu"]
KIND_OPTIONS = {
    "tt": ["--tt.rank", "4", "--tt.cache_rows", "40", "--populate_every", "7"],
    "hash": ["--hash.rows", "64"],
    "drop": ["--drop.keep", "64"],
    "robe": ["--robe.rows", "64"],
    "cafe": ["--cafe.rows", "200"],
    "dynamic": ["--dynamic.rows", "600"],
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Synthetic data, which no test writes to."""
    return write_synthetic(tmp_path_factory.mktemp("data") / "synthetic", rows=12_000)


@pytest.fixture
def options():
    """The options of a run of a kind of embeddings."""
    return lambda kind: ["--emb", kind, *KIND_OPTIONS.get(kind, [])]


@pytest.fixture
def command(data, tmp_path):
    """The arguments of train.py for a small run below ``tmp_path``."""

    def command(name, *options, data=data, output=tmp_path):
        name = ["--name", name] if name else []
        return ["--data", data, "--output", output, *name, *SMALL, *options]

    return command


@pytest.fixture
def train(run, command):
    """Trains a small run below ``tmp_path``; returns what was printed."""

    def train(name, *options, status=0, **places):
        return run("train", *command(name, *options, **places), status=status)

    return train


@pytest.fixture(scope="session")
def two_steps(data, tmp_path_factory):
    """A run of two steps, which no test writes to."""
    output = tmp_path_factory.mktemp("runs")
    given = ["--data", str(data), "--output", str(output), "--name", "run", "--max_steps", "2"]
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT))
        assert importlib.import_module("dlrm.commands.train").main([*given, *SMALL]) == 0
    return output / "run"
