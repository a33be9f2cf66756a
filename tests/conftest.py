"""What every test needs to know: is there a GPU, and if not, Triton interprets its kernels."""

import importlib
import os
import signal
import zlib
from pathlib import Path

import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
"""Processes started here can be interrupted, though a job in the background ignores that."""


def pytest_addoption(parser):
    parser.addoption("--part", default="0/1", help="run part i of n alone, as i/n, i from 0")


def pytest_collection_modifyitems(config, items):
    """Skip what needs a GPU where there is none, and run slow tests last.

    Where there is one, the tests of the kernels run natively, and they and all that use the device
    under test count as tests of the GPU.
    """
    for item in items:
        if torch.cuda.is_available():
            if "kernels" in item.path.parts or "device" in item.fixturenames:
                item.add_marker(pytest.mark.gpu)
        elif "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    items.sort(key=lambda item: "slow" in item.keywords)


@pytest.fixture
def device():
    """The device under test: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def script(monkeypatch):
    """Imports a program of ``scripts/`` by its name."""
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(root)

    def load(name):
        (path,) = (root / "scripts").rglob(f"{name}.py")
        return importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))

    return load


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # a step of another test sets its own
