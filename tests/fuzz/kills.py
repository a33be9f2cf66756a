"""Kills runs at random moments, and compares what they end with bit for bit with whole runs.

    python tests/fuzz/kills.py --seed 0 --count 30
    python tests/fuzz/kills.py --count 200 --device cuda --ranks 1
    python tests/fuzz/kills.py --seed 0 --first 17 --count 1 --keep /tmp/kept      # case 17 again

A case is a kind, an optimizer, a number of ranks, who is killed and when. A killed worker of
torchrun is restarted by torchrun. A killed job is resumed, or started again if it had no checkpoint
yet. Losses of every step, metrics and weights must be those of the run that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks may share a GPU

import launcher
import torch

from dlrm.data import synthetic
from dlrm.embeddings import available
from dlrm.optim import RULES
from dlrm.training import checkpoint
from dlrm.training.run_directory import has_checkpoint

ROOT = Path(__file__).parents[2]
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
}
TIMEOUT = 240  # seconds of a run and its restarts
BAD = ("DIFFERENT", "FAILED", "HANG", "TRACEBACK")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that can be compared."""

    kind: str
    rule: str
    ranks: int
    device: str
    deterministic: bool
    data: Path = field(repr=False)

    def arguments(self, output: Path) -> list[str]:
        """The command line of the run, which writes to ``output/run``."""
        given = f"--emb {self.kind} --optim.embeddings {self.rule} --device {self.device}"
        given += f" --deterministic {self.deterministic} {KIND_OPTIONS.get(self.kind, '')}"
        places = ["--data", str(self.data), "--output", str(output), "--name", "run"]
        return [*OPTIONS.split(), *given.split(), *places]


class Process:
    """A run in processes of its own."""

    def __init__(self, setup: Setup, output: Path, arguments: list[str], restarts: int | None):
        self.files = [output / "out", output / "err"]
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                launcher.start(
                    str(ROOT / "train.py"),
                    arguments,
                    setup.ranks,
                    [str(file) for file in self.files],
                    max_restarts=restarts,
                )
                os._exit(0)
            except SystemExit as stop:
                os._exit(stop.code if isinstance(stop.code, int) else bool(stop.code))
            except BaseException as error:
                print(f"{type(error).__name__}", file=sys.stderr, flush=True)
                os._exit(1)
        self.status: int | None = None
        self.until = time.monotonic() + TIMEOUT

    def alive(self) -> bool:
        """Whether it runs; raises TimeoutError when it has run too long."""
        if self.status is None:
            self.status = launcher.wait(self.pid, 0)
        if self.status is None and time.monotonic() > self.until:
            self.kill()
            raise TimeoutError
        return self.status is None

    def wait(self) -> int:
        """The exit status."""
        while self.alive():
            time.sleep(0.01)
        return self.status or 0

    def workers(self) -> list[int]:
        """The processes of the ranks under torchrun."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def kill(self) -> None:
        """Kill all of its processes."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)  # it has no group of its own yet
        self.status = launcher.wait(self.pid, 60)

    @property
    def errors(self) -> str:
        """What it printed to stderr."""
        return self.files[1].read_text() if self.files[1].exists() else ""


def outcome_of_run(run: Path) -> dict[str, object]:
    """Losses by step, metrics and weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    found: dict[str, object] = {
        f"loss of step {line['step']}": line["train/loss"] for line in lines if "train/loss" in line
    }
    found |= {k: v for k, v in metrics.items() if k.startswith(("test/", "val/", "embeddings/"))}
    for name in ("latest", "best"):
        model, _ = checkpoint.load_model(run / "checkpoints" / name)
        found |= {f"{name}: {key}": value for key, value in model.state_dict().items()}
    return found


def differences(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """The names of what differs."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        a, b = found[name], expected[name]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # type: ignore[arg-type]
        wrong += [] if same else [name]
    return wrong


def wait_until(when: str, rng: random.Random, seconds: float, run: Path, process: Process) -> None:
    """Wait for the moment of a kill."""
    began, step = time.monotonic(), rng.randint(1, 53)
    delay = rng.uniform(0, seconds)
    while process.alive():
        log = run / "metrics.jsonl"
        if when == "time" and time.monotonic() > began + delay:
            return
        if when == "step" and log.exists() and f'"step": {step},' in log.read_text():
            return
        if when == "checkpoint" and any((run / "checkpoints").glob("*.tmp")):
            time.sleep(rng.uniform(0, 0.02))
            return
        time.sleep(0.001)


def kill_and_recover(
    setup: Setup, who: str, when: str, rng: random.Random, seconds: float, output: Path
) -> str:
    """Kill a run once or twice, let it go on, and return what became of it."""
    arguments, run = setup.arguments(output), output / "run"
    restarts = 3 if who == "worker" else None if setup.ranks == 1 else 0
    process = Process(setup, output, arguments, restarts)
    kills, resumed = 0, False
    for _ in range(rng.choice((1, 1, 2))):
        wait_until(when, rng, seconds, run, process)
        if not process.alive():
            break
        if who == "worker":
            if workers := process.workers():
                os.kill(rng.choice(workers), signal.SIGKILL)
                kills += 1
            continue
        process.kill()
        kills += 1
        resumed = has_checkpoint(run)
        if not resumed:
            shutil.rmtree(run, ignore_errors=True)
        again = ["--resume", str(run)] if resumed else arguments
        process = Process(setup, output, again, restarts)
    status, errors = process.wait(), process.errors
    if re.search(r"^(\[rank\d+\]: )?Traceback", errors, re.MULTILINE):  # torchrun's are indented
        return "TRACEBACK"
    if status:
        return "FAILED"
    if not kills:
        return "equal, had ended"
    if resumed or "is resumed" in errors:
        return "equal, resumed"
    return "equal, begun again" if "begins again" in errors or who == "job" else "equal, new"


def case(
    number: int, options: argparse.Namespace, data: Path, wholes: dict[Setup, tuple[float, dict]]
) -> tuple[str, str]:
    """Run a case; returns its description and its outcome."""
    rng = random.Random(f"{options.seed}/{number}")
    setup = Setup(
        kind=rng.choice(options.kinds),
        rule=rng.choice(options.rules),
        ranks=rng.choice(options.ranks),
        device=options.device,
        deterministic=options.deterministic,
        data=data,
    )
    who, when = rng.choice(options.who), rng.choice(options.when)
    what = f"{setup.kind}, {setup.rule}, {setup.ranks} ranks, {who} killed by {when}"
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        output = Path(place)
        if setup not in wholes:
            (output / "whole").mkdir()
            began = time.monotonic()
            arguments = setup.arguments(output / "whole")
            process = Process(setup, output / "whole", arguments, None)
            if process.wait():
                raise SystemExit(f"{what}: the run that nobody killed failed:\n{process.errors}")
            taken = time.monotonic() - began
            wholes[setup] = taken, outcome_of_run(output / "whole" / "run")
        seconds, expected = wholes[setup]
        try:
            outcome = kill_and_recover(setup, who, when, rng, seconds, output)
        except TimeoutError:
            outcome = "HANG"
        if outcome not in BAD:
            wrong = differences(outcome_of_run(output / "run"), expected)
            if wrong:
                what += f" ({len(wrong)} differ: {', '.join(wrong[:3])})"
                outcome = "DIFFERENT"
        if outcome in BAD:
            print((output / "err").read_text()[-3000:])
            if options.keep:
                shutil.copytree(output, options.keep / str(number), symlinks=True)
    return what, outcome


def main() -> int:
    """Run the cases; the exit status is 0 if all ended equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first case")
    add("--count", type=int, default=20, help="number of cases")
    add("--kinds", nargs="+", default=sorted(available()))
    add("--rules", nargs="+", default=sorted(RULES))
    add("--ranks", nargs="+", type=int, default=[1, 2, 4])
    add("--who", nargs="+", default=["worker", "job"], choices=["worker", "job"])
    add("--when", nargs="+", default=["time", "step", "checkpoint"])
    add("--device", default="cpu")
    add("--deterministic", action="store_true", help="needed for equal bits on a GPU")
    add("--keep", type=Path, help="directory for the files of cases that ended badly")
    options = parser.parse_args()
    os.chdir(ROOT)
    launcher.preload()
    outcomes: Counter[str] = Counter()
    by_setup: Counter[tuple[str, str]] = Counter()
    wholes: dict[Setup, tuple[float, dict]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-data-") as place:
        data = Path(place) / "data"
        rows = [3000 if column % 5 == 0 else 20 + column for column in range(26)]
        synthetic.write(data, rows=4001, cardinalities=rows, fractions=[0.8, 0.1, 0.1])
        for number in range(options.first, options.first + options.count):
            began = time.monotonic()
            what, outcome = case(number, options, data, wholes)
            outcomes[outcome] += 1
            by_setup[what.split(",")[0], outcome] += 1
            print(f"{number}: {what}: {outcome} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"\n{'outcome':20} cases")
    for outcome, count in sorted(outcomes.items()):
        print(f"{outcome:20} {count:5}")
    print(f"\n{'kind':10} {'outcome':20} cases")
    for (kind, outcome), count in sorted(by_setup.items()):
        print(f"{kind:10} {outcome:20} {count:5}")
    return int(any(outcomes[outcome] for outcome in BAD))


if __name__ == "__main__":
    sys.exit(main())
