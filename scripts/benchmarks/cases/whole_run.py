"""Time whole runs of train.py as they are typed, from the start of the process to its end.

    python scripts/benchmarks/run.py whole_run --output benchmarks/whole_run_h200.json
    python scripts/benchmarks/run.py whole_run --data DATA --kinds dense tt --tree ../before
    python scripts/benchmarks/run.py whole_run --config mlperf_dcnv2 --data DATA --kinds dense \
        --train epochs=8 loader.window=12

Each kind runs twice, in processes of their own, with a file of ``configs/``: the ``first`` run
finds empty caches of kernels and bytecode, the ``second`` one what the first left there. ``wall_s``
is the time of the whole process. ``parts`` are those that the run reports (``seconds/*`` in its
result), and ``exit``, the time to end after that. ``Msamples/s`` counts waiting for data
and logging, but not compiling.

``--tree`` times another checkout, to compare two on one machine; if it is older than the parts,
``wall_s`` is all there is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.programs import run_program

SMALL = "--like demo --rows 3000 --kinds dense"
KINDS = {
    **dict.fromkeys(("dense", "tt", "qr", "robe", "hash", "offload"), ()),
    "auto": ("--budget", "20MB"),
}
"""Kinds, with the options that they need."""
CACHES = (
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--data", type=Path, help="prepared directory; made if not given")
    add("--like", default="kaggle", help="kind of rows to make without --data")
    add("--rows", type=count_arg, help="rows to make without --data (default: those of --like)")
    kinds = ["dense", "tt", "auto", "qr", "robe"]
    add("--kinds", nargs="+", choices=KINDS, default=kinds, help="kinds of embeddings")
    add("--runs", type=count_arg, default=2, help="runs of each kind")
    add("--tree", type=Path, default=harness.ROOT, help="checkout to measure")
    add("--config", default="criteo_kaggle_large_batch", help="name of a file in configs/")
    add("--train", nargs="+", default=[], metavar="NAME=VALUE", help="more options of train.py")


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every kind."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        data = options.data or make_data(options, work / "data")
        meta = json.loads((data / "meta.json").read_text())
        rows = meta["splits"]["train"]["rows"]
        record.note(rows=rows, config=options.config, train=options.train)
        for kind in options.kinds:
            caches = {name: str(work / kind / name) for name in CACHES}
            for run in range(options.runs):
                flags = [*KINDS[kind], *(f"--{option}" for option in options.train)]
                flags += ["--device", options.device]
                config = options.tree.resolve() / "configs" / f"{options.config}.yaml"
                found = time_run(config, data.resolve(), kind, flags, work, caches)
                name = ("first", "second")[run] if run < 2 else f"run {run + 1}"
                record.add({"kind": kind, "run": name, **found})
            shutil.rmtree(work / kind)


def make_data(options: argparse.Namespace, output: Path) -> Path:
    """Synthetic rows."""
    rows = [] if options.rows is None else ["--rows", options.rows]
    run_program("scripts/make_synthetic.py", "--like", options.like, *rows, "--output", output)
    return output


def time_run(
    config: Path, data: Path, kind: str, flags: list[str], work: Path, caches: dict[str, str]
) -> dict[str, Any]:
    """One run; its directory is removed.

    Args:
        config: of the run, in the checkout that is measured.
        data: prepared rows.
        kind: of embeddings.
        flags: more options.
        work: directory for the run.
        caches: environment variables that name the caches.
    """
    done = run_program(
        str(config.parents[1] / "train.py"),
        *("--config", config, "--data", data, "--emb", kind, *flags),
        *("--output", work, "--name", "run"),
        environment=os.environ | caches,
    )
    metrics = json.loads((work / "run" / "result.json").read_text())["metrics"]
    shutil.rmtree(work / "run")

    # Older checkouts report no parts.
    seconds = {name: value for name, value in metrics.items() if name.startswith("seconds/")}
    parts = {name.removeprefix("seconds/"): value for name, value in seconds.items()}
    if parts:
        parts["exit"] = done.seconds - parts.pop("total")

    samples = metrics["speed/samples_per_second"] * metrics["speed/train_seconds"]
    stepping = sum(parts.get(name, 0) for name in ("train", "data_wait"))
    return {
        "wall_s": done.seconds,
        "core_s": done.core_seconds,
        "parts": parts,
        "Msamples/s": samples / stepping / 1e6 if stepping else None,
        "train_seconds": metrics["speed/train_seconds"],
        "test_auc": metrics["test/auc"],
        "peak_process_GB": metrics["memory/process_peak"] / 1e9,
        "peak_gpu_GB": metrics.get("memory/gpu_peak", 0) / 1e9,
    }
