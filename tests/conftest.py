"""What every test needs to know: is there a GPU, and if not, Triton interprets its kernels."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in several processes side by side

import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch.distributed as dist

from dlrm import commands
from dlrm.utils.cpus import cpu_count

with contextlib.suppress(ImportError):  # without the dev extra, as on a GPU machine
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)  # leave no files
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same",
        max_examples=25,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # of a busy machine, not of a test
    )
    settings.load_profile("same")

ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
"""Programs that tests start import this tree, and else what the tests import."""

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Processes started here can be interrupted, though a job in the background ignores that."""


def program_path(name):
    """The file of a program: ``train``, or the name of one in ``scripts/``."""
    found = [*ROOT.glob(f"{name}.py"), *(ROOT / "scripts").rglob(f"{name}.py")]
    (path,) = [path for path in found if path.parent.name != "cases"]  # which are no programs
    return path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """As many processes as there are cores, but as many as fit in usual memory."""
    return min(cpu_count(), 8)


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none, and run slow tests last.

    Where there is one, the tests of the kernels run natively, and they and all that use the device
    under test count as tests of the GPU.
    """
    for item in items:
        if torch.cuda.is_available():
            if ROOT / "tests" / "kernels" in item.path.parents or "device" in item.fixturenames:
                item.add_marker(pytest.mark.gpu)
        elif "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    items.sort(key=lambda item: "slow" in item.keywords)


@pytest.fixture
def group_of_one():
    """A process group of this process alone, in which sums over processes change nothing."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def device():
    """The device under test: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def script(monkeypatch):
    """Imports a command, or a program of ``scripts/``, by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)

    def load(name):
        if (ROOT / "dlrm" / "commands" / f"{name}.py").exists():
            return importlib.import_module(f"dlrm.commands.{name}")
        if name in commands.COMMANDS:
            return SimpleNamespace(main=partial(commands.run, name))
        path = program_path(name).relative_to(ROOT)
        return importlib.import_module(".".join(path.with_suffix("").parts))

    return load


@pytest.fixture
def run(script, capsys, monkeypatch):
    """Runs a program in this process; returns what it printed."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # train.py sets its own

    def run(name, *arguments, status=0):
        capsys.readouterr()
        try:
            found = script(name).main([str(argument) for argument in arguments])
        except SystemExit as stop:
            found = stop.code
        printed = capsys.readouterr()
        assert found == status, printed.out + printed.err
        assert "Traceback" not in printed.err
        return SimpleNamespace(stdout=printed.out, stderr=printed.err)

    return run


class Reruns:
    """Records steps on a CPU: a replay runs the step again on the tensors of the capture.

    If ``fails``, recording a step ends in its backward pass, with gradients of some parameters.
    """

    def __init__(self, model, *, fails=False):
        self._model, self._fails = model, fails
        self.attempts = 0

    def warm_up(self, run):
        return run()

    def record(self, run):
        self.attempts += 1
        if self._fails:
            for parameter in self._model.top_mlp.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise RuntimeError("operation not permitted when stream is capturing")
        out = {}
        return lambda: out.update(run()), out


@pytest.fixture
def recorded_on_a_cpu():
    """Has a step on a CPU run as if it were captured; returns what records it."""
    from dlrm.training.cuda_graph import StepGraphs

    def recorded(step, **options):
        reruns = Reruns(step.model, **options)
        by_group = step.model.sparse_arch.feature_order.by_group
        step.mode = "graph"
        step.graphs = StepGraphs(step.device, by_group, step.graphs.undo, lambda _: reruns)
        return reruns

    return recorded


@pytest.fixture(scope="session")
def _launcher(tmp_path_factory):
    """Sends a request to launcher.py; returns the answer."""
    command = [sys.executable, str(ROOT / "tests" / "launcher.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as server:

        def request(**given):
            print(json.dumps(given), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())

        yield request
        server.stdin.close()


@pytest.fixture
def start(_launcher, tmp_path_factory):
    """Starts a program in a process of its own, or in several as ``torchrun`` does."""
    started = []

    def start(program, *arguments, processes=1, **limits):
        path = program if isinstance(program, Path) else program_path(program)
        output = [str(tmp_path_factory.mktemp("output") / name) for name in ("out", "err")]
        pid = _launcher(
            program=str(path),
            arguments=[str(argument) for argument in arguments],
            processes=processes,
            output=output,
            **limits,
        )
        started.append(Process(pid, output, _launcher))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Process:
    """A process that ``start`` started."""

    def __init__(self, pid, output, launcher):
        self.pid, self.returncode = pid, None
        self.out, self.err = map(Path, output)
        self._launcher = launcher

    def poll(self, seconds=0):
        """The exit status; None if it still runs after the given seconds."""
        if self.returncode is None:
            self.returncode = self._launcher(wait=[self.pid, seconds])
        return self.returncode

    def wait(self, seconds=240):
        """The process when it has ended; what it printed is in ``stdout`` and ``stderr``."""
        if self.poll(seconds) is None:
            raise TimeoutError(f"process {self.pid} has not ended in {seconds} seconds")
        self.stdout, self.stderr = self.out.read_text(), self.err.read_text()
        return self


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # a step of another test sets its own
