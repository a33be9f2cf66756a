"""Time an epoch from Parquet to test metrics on a GPU, by the parts of train.py.

    python scripts/make_synthetic.py --like kaggle --output data/synthetic_kaggle
    python scripts/benchmarks/benchmark_epoch.py --data data/synthetic_kaggle

Each run is train.py with its loop, loader and evaluation. Reported separately are the start
(importing, building the model, compiling, capturing), the training loop, the evaluation of a split
(its metrics also alone), and writing the checkpoint. ``step_ms`` is a step alone, with batches on
the GPU; ``loop_of_step`` is the speed of the training loop relative to such steps in sequence.
Next to kinds, ``--kinds`` takes models of TT-Rec's grid: ``tt7-r32``, ``tt7-r32-c0.001``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dlrm.config.cli import parse
from dlrm.data.schema import Meta
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.training import metrics
from dlrm.utils.program import Parser

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks.harness import ROOT, gpu_milliseconds, write
from scripts.experiments.tt_rec_grid import Cell
from train import Run

CONFIG = ROOT / "configs/criteo_kaggle_large_batch.yaml"  # its schedule is fitted to the epoch
KIND_OPTIONS = {"tt": ["--tt.rank", "32"], "qr": ["--qr.collisions", "100"]}


class TimedRun(Run):
    """A run that notes how long its parts take."""

    def __init__(self, *arguments: Any) -> None:
        self.seconds: dict[str, float] = {}
        began = time.perf_counter()
        super().__init__(*arguments)
        torch.cuda.synchronize()
        self.seconds["building"] = time.perf_counter() - began

    def _timed(self, name: str, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        values = work()
        torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - began
        return values

    def _evaluate(self, split: str, model: DLRM | None = None) -> dict[str, float]:
        evaluate = super()._evaluate
        return self._timed(f"{split} metrics", lambda: evaluate(split, model))

    def _validate(self) -> dict[str, float]:
        return self._timed("validation", super()._validate)


def importing() -> float:
    """Seconds that a fresh process needs to import all that train.py does."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import train"], cwd=ROOT, check=True)
    return time.perf_counter() - began


def metrics_alone(rows: int) -> float:
    """Seconds to compute the metrics of as many scores on the GPU."""
    logits = torch.randn(rows, device="cuda")
    labels = (torch.rand(rows, device="cuda") < logits.sigmoid()).float()
    times = gpu_milliseconds(lambda _: metrics.classification(logits, labels), warm_up=2, steps=5)
    return times / 1e3


def step_milliseconds(run: Run) -> float:
    """A step of the run alone, on batches that are on the GPU; it goes on training the model."""
    batches = list(islice(run.train_data, 8))
    run.model.train()
    return gpu_milliseconds(lambda index: run.step(batches[index % 8]), warm_up=50, steps=500)


def arguments(options: argparse.Namespace, kind: str, batch: int, directory: str) -> list[str]:
    """Options of train.py for one run."""
    chosen = ["--config", str(options.config)]
    chosen += ["--data", str(options.data), "--output", directory, "--name", f"{kind}-{batch}"]
    chosen += ["--batch_size", str(batch), "--eval_every", str(10**9)]
    chosen += [] if Cell.named(kind) else ["--emb", kind]
    chosen += ["--checkpoint", str(options.checkpoint).lower()]
    if options.config == CONFIG:
        half = (steps := Meta.read(options.data).splits["train"].rows // batch) // 2
        chosen += ["--optim.warmup_steps", str(steps // 20)]
        chosen += ["--optim.decay_start", str(half), "--optim.decay_steps", str(half + 1)]
    if cell := Cell.named(kind):
        chosen += cell.options(Meta.read(options.data).cardinalities)
    elif kind != "dense":
        chosen += ["--tables.largest", "7", *KIND_OPTIONS.get(kind, [])]
    return chosen + options.train


def measure_one(options: argparse.Namespace, kind: str, batch: int) -> dict[str, Any]:
    """One epoch; returns its seconds by part, and what the run reports."""
    with tempfile.TemporaryDirectory() as directory:
        config, resolved = parse(arguments(options, kind, batch, directory), available())
        run = TimedRun(config, resolved, World.from_environment())
        final = run.train()
    seconds = run.seconds
    preparing = run.step.graphs.preparing_seconds
    loop = final["speed/train_seconds"] - preparing
    rows = run.train_data.rows
    training, testing = (
        round(loop, 4),
        round(seconds["test metrics"], 4),
    )  # rounded, so that the figures add up
    result: dict[str, Any] = {
        "kind": kind,
        "batch": batch,
        "precision": config.precision,
        "rows": rows,
        "building": seconds["building"],
        "compiling_and_capturing": preparing,
        "training": training,
        "test_metrics": testing,
        "epoch": training + testing,
        "validation": seconds["val metrics"],
        "waiting_for_data": run.train_data.wait_seconds,
        "wait_share": run.train_data.wait_seconds / loop,
        "Mrows/s": rows / loop / 1e6,
        "step_ms": (step := step_milliseconds(run)),
        "loop_of_step": step * run.steps / loop / 1e3,
        "peak_gpu_MB": final["memory/gpu_peak"] / 1e6,
        "peak_process_MB": final["memory/process_peak"] / 1e6,
        "test_auc": final["test/auc"],
        "best_possible_auc": final.get("test/best_possible_auc"),
    }
    if options.checkpoint:
        result["checkpoint"] = seconds["validation"] - seconds["val metrics"]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure every case; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="prepared directory")
    parser.add_argument("--kinds", nargs="+", default=["dense", "tt"])
    parser.add_argument("--batches", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the runs: a YAML file")
    parser.add_argument("--checkpoint", action="store_true", help="write checkpoints, and time it")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("train", nargs="*", help="further options of train.py, after --")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")
    record: dict[str, Any] = {"unit": "seconds", "importing": round(importing(), 4)}
    record |= {"metrics_alone": round(metrics_alone(3_274_330), 4), "results": []}
    for batch in options.batches:
        for kind in options.kinds:
            record["results"].append(measure_one(options, kind, batch))
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            print(json.dumps(record["results"][-1]), flush=True)
            if options.output:
                write(options.output, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
