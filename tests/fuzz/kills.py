"""Kills runs at random moments, and compares what they end with bit for bit with whole runs.

    python tests/fuzz/kills.py --seed 0 --count 30
    python tests/fuzz/kills.py --count 200 --jobs 14 --seconds 500 --device cuda --deterministic
    python tests/fuzz/kills.py --seed 0 --first 17 --count 1 --keep /tmp/kept      # case 17 again

A case is a kind, an optimizer, a number of ranks, who gets which signal and when. A worker of
torchrun that ends is restarted by torchrun. A job that ends is resumed, or started again if it had
no checkpoint yet. Losses of every step, metrics and weights must be those of the run that nobody
killed. Two cases in a row share such a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each run starts processes for it
# A process that has asked CUDA's runtime for its devices cannot fork; NVML is another library.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import launcher
import torch
from run_process import ROOT, TIMEOUT, Process

from dlrm.data import synthetic
from dlrm.embeddings import available
from dlrm.optim import RULES
from dlrm.sparse_arch.table_plan import AUTO
from dlrm.training import checkpoint
from dlrm.training.run_directory import CHECKPOINTS, has_checkpoint

OPTIONS = "--model.bottom_mlp [8] --model.top_mlp [8] --batch_size 180 --optim.warmup_steps 5"
OPTIONS += " --log_every 1 --eval_every 10 --eval_batch_size 500 --epochs 3 --populate_every 7"
OPTIONS += " --sharding.threshold 1000 --tables.threshold 300"
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
STEPS = 54
SHARING = 2  # cases in a row with the same run that nobody killed
BAD = ("DIFFERENT", "FAILED", "HANG", "SLOW TO LEAVE", "TRACEBACK")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that can be compared."""

    kind: str
    rule: str
    ranks: int

    def arguments(self, options: argparse.Namespace, data: Path, output: Path) -> list[str]:
        """The command line of the run, which writes to ``output/run``."""
        given = f"--emb {self.kind} --optim.embeddings {self.rule} --step {options.step}"
        given += f" --device {options.device} --deterministic {options.deterministic}"
        places = ["--data", str(data), "--output", str(output), "--name", "run"]
        own = KIND_OPTIONS.get(self.kind, "")
        return [*OPTIONS.split(), *given.split(), *own.split(), *places]


@dataclass(kw_only=True)
class Case:
    """A run that gets signals, and what became of it."""

    number: int
    setup: Setup
    who: str
    signal: str
    when: str
    outcome: str = ""
    signals: int = 0
    """How many it got."""
    inside: int = 0
    """How many of them while a checkpoint was being written."""

    def __str__(self) -> str:
        setup = f"{self.setup.kind}, {self.setup.rule}, {self.setup.ranks} ranks"
        return f"{self.number}: {setup}, SIG{self.signal} to the {self.who} by {self.when}"


def outcome_of_run(run: Path) -> dict[str, object]:
    """Losses by step, metrics and weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    found: dict[str, object] = {
        f"loss of step {line['step']}": line["train/loss"] for line in lines if "train/loss" in line
    }
    assert len(found) == lines[-1]["step"], f"{len(found)} losses"  # a run may stop early
    kept = ("test/", "val/", "last/", "embeddings/", "best_step")
    found |= {name: value for name, value in metrics.items() if name.startswith(kept)}
    for name in ("latest", "best"):
        model, _ = checkpoint.load_model(run / CHECKPOINTS / name)
        found |= {f"{name}: {key}": value for key, value in model.state_dict().items()}
    return found


def differences(run: Path, whole: Path) -> list[str]:
    """The names of what differs. Called in a fork, as reading a checkpoint may start CUDA, and no
    process that has done so can fork.
    """
    report = run.with_name("differences")
    sys.stdout.flush()
    if not (pid := os.fork()):
        try:
            found, expected = outcome_of_run(run), outcome_of_run(whole)
            wrong = sorted(found.keys() ^ expected.keys())
            for name in sorted(found.keys() & expected.keys()):
                a, b = found[name], expected[name]
                tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
                wrong += [] if (torch.equal(a, b) if tensors else a == b) else [name]  # type: ignore[arg-type]
            report.write_text(json.dumps(wrong))
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    launcher.wait(pid, TIMEOUT)
    return list(json.loads(report.read_text())) if report.exists() else ["it can't be read"]


def wait_until(when: str, rng: random.Random, seconds: float, run: Path, process: Process) -> None:
    """Wait for the moment of a signal."""
    began, step = time.monotonic(), rng.randint(1, STEPS - 1)
    delay = rng.uniform(0, 0.9 * seconds)
    while process.alive():
        log = run / "metrics.jsonl"
        if when == "time" and time.monotonic() > began + delay:
            return
        if when == "step" and log.exists() and f'"step": {step},' in log.read_text():
            return
        if when == "checkpoint" and writes_checkpoint(run, since=step):
            time.sleep(rng.uniform(0, 0.02))
            return
        time.sleep(0.001)


def writes_checkpoint(run: Path, since: int = 0) -> bool:
    """Whether a checkpoint of a step, or of a later one, is half written."""
    found = (run / CHECKPOINTS).glob("step_*.tmp")
    return any(int(path.stem.removeprefix("step_")) >= since for path in found)


def signal_and_recover(
    case: Case, arguments: list[str], rng: random.Random, seconds: float, output: Path
) -> str:
    """Send a run one or two signals, let it go on, and return what became of it."""
    run, ranks = output / "run", case.setup.ranks
    number = signal.Signals[f"SIG{case.signal}"]
    restarts = 3 if case.who == "worker" else None if ranks == 1 else 0
    process = Process(ranks, output, arguments, restarts)
    resumed = False
    for _ in range(rng.choice((1, 1, 2))):
        wait_until(case.when, rng, seconds, run, process)
        if not process.alive():
            break
        inside = writes_checkpoint(run)
        if case.who == "worker":
            if workers := process.workers():
                os.kill(rng.choice(workers), number)
                case.signals, case.inside = case.signals + 1, case.inside + inside
            continue
        if bad := process.end(number):
            return bad
        case.signals, case.inside = case.signals + 1, case.inside + inside
        resumed = has_checkpoint(run)
        if not resumed:
            shutil.rmtree(run, ignore_errors=True)
        again = ["--resume", str(run)] if resumed else arguments
        process = Process(ranks, output, again, restarts)
    status = process.wait()
    if process.has_traceback():
        return "TRACEBACK"
    if status:
        return "FAILED"
    if not case.signals:
        return "equal, had ended"
    return "equal, " + ("resumed" if resumed or "is resumed" in process.errors else "begun again")


def run_case(
    case: Case, options: argparse.Namespace, data: Path, seconds: float, place: Path
) -> list[str]:
    """Run a case, set its outcome, and return what differs.

    Args:
        case: the case.
        options: the command line.
        data: on which to train.
        seconds: that the run in ``place/whole`` took, which nobody killed.
        place: directory for the case's own.
    """
    rng = random.Random(f"{options.seed}/{case.number}/moments")
    output = place / str(case.number)
    output.mkdir()
    wrong: list[str] = []
    try:
        arguments = case.setup.arguments(options, data, output)
        case.outcome = signal_and_recover(case, arguments, rng, seconds, output)
        if case.outcome not in BAD:
            wrong = differences(output / "run", place / "whole" / "run")
            case.outcome = "DIFFERENT" if wrong else case.outcome
    except TimeoutError:
        case.outcome = "HANG"
    errors = output / "err"
    if case.outcome in BAD and errors.exists():
        wrong = [*wrong[:3], errors.read_text()[-3000:]]
    return wrong


def run_setup(number: int, options: argparse.Namespace, data: Path, stop_at: float) -> list[Case]:
    """Run the cases of a setup, and the run that nobody kills.

    Args:
        number: of the setup.
        options: the command line.
        data: on which to train.
        stop_at: time, by ``time.monotonic``, after which nothing is begun.
    """
    rng = random.Random(f"{options.seed}/{number}")
    kind = options.kinds[number % len(options.kinds)]  # any few cases have many kinds
    setup = Setup(kind=kind, rule=rng.choice(options.rules), ranks=rng.choice(options.ranks))
    first, last = number * SHARING, min(options.first + options.count, (number + 1) * SHARING)
    done: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        place, seconds = Path(directory), 0.0
        for index in range(first, last):
            who, name, when = map(rng.choice, (options.who, options.signals, options.when))
            case = Case(number=index, setup=setup, who=who, signal=name, when=when)
            began = time.monotonic()
            if index < options.first or began > stop_at:
                continue
            if not seconds:
                (place / "whole").mkdir()
                arguments = setup.arguments(options, data, place / "whole")
                process = Process(setup.ranks, place / "whole", arguments, None)
                if process.wait():
                    raise SystemExit(f"{case}: the run that nobody killed failed: {process.errors}")
                seconds = time.monotonic() - began
            wrong = run_case(case, options, data, seconds, place)
            done.append(case)
            taken = time.monotonic() - began
            print(f"{case}: {case.outcome} ({taken:.1f} s) {', '.join(wrong)}", flush=True)
            if case.outcome in BAD and options.keep:
                shutil.copytree(place, options.keep / str(index), symlinks=True)
    return done


def report(cases: list[Case]) -> None:
    """Print how many cases of each kind, rule and so on had which outcome."""
    columns: dict[str, Callable[[Case], str]] = {
        "kind": lambda case: case.setup.kind,
        "rule": lambda case: case.setup.rule,
        "ranks": lambda case: str(case.setup.ranks),
        "signal": lambda case: f"SIG{case.signal} to the {case.who}",
        "moment": lambda case: case.when,
        "in all": lambda case: "",
    }
    outcomes = sorted({case.outcome for case in cases})
    for title, key in columns.items():
        print(f"\n{title:20}  {'  '.join(outcomes)}  cases")
        for row in sorted({key(case) for case in cases}):
            counts = Counter(case.outcome for case in cases if key(case) == row)
            cells = "  ".join(f"{counts[outcome]:>{len(outcome)}}" for outcome in outcomes)
            print(f"{row:20}  {cells}  {counts.total():5}")
    sent, inside = sum(case.signals for case in cases), sum(case.inside for case in cases)
    print(f"\n{len(cases)} cases, {sent} signals, {inside} while a checkpoint was being written")


def main() -> int:
    """Run the cases; the exit status is 0 if all ended equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first case")
    add("--count", type=int, default=20, help="number of cases")
    add("--seconds", type=float, default=float("inf"), help="begin no case after these")
    add("--jobs", type=int, default=1, help="cases at a time")
    add("--kinds", nargs="+", default=[*sorted(available()), AUTO])
    add("--rules", nargs="+", default=["sgd", "adagrad", "rowwise_adagrad", "adam"], choices=RULES)
    add("--ranks", nargs="+", type=int, help="default: 1 2 4, and 1 on a GPU")
    add("--who", nargs="+", default=["worker", "job"], choices=["worker", "job"])
    add("--signals", nargs="+", default=["KILL", "TERM"], choices=["KILL", "TERM", "INT", "HUP"])
    add("--when", nargs="+", default=["time", "step", "checkpoint"])
    add("--device", default="cpu")
    add("--step", default="auto", help="how a step runs: auto, eager, compile or graph")
    add("--deterministic", action="store_true", help="needed for equal bits on a GPU")
    add("--keep", type=Path, help="directory for the files of cases that ended badly")
    options = parser.parse_args()
    # Processes can't share a GPU: NCCL refuses that.
    options.ranks = options.ranks or ([1, 2, 4] if options.device == "cpu" else [1])
    stop_at = time.monotonic() + options.seconds
    os.chdir(ROOT)
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    launcher.preload()
    with tempfile.TemporaryDirectory(prefix="kills-data-") as place:
        data = Path(place) / "data"
        rows = [3000 if column % 5 == 0 else 20 + column for column in range(26)]
        sizes = {"rows": 4001, "cardinalities": rows, "fractions": [0.8, 0.1, 0.1]}
        synthetic.write(data, **sizes, device="cpu")
        setups = range(options.first // SHARING, -(-(options.first + options.count) // SHARING))
        run = partial(run_setup, options=options, data=data, stop_at=stop_at)
        with ProcessPoolExecutor(options.jobs, get_context("fork")) as processes:
            cases = [case for found in processes.map(run, setups) for case in found]
    report(cases)
    return int(not cases or any(case.outcome in BAD for case in cases))


if __name__ == "__main__":
    sys.exit(main())
