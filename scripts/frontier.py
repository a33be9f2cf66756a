"""Compare embedding kinds at equal bytes: quality and throughput against memory.

    python scripts/frontier.py --data data/sample --config configs/criteo_sample.yaml

Trains every kind at every compression ratio with several seeds, each run by ``train.py``, then
writes one table, one plot and one JSON. ``drop``, which keeps the frequent rows and lets the rare
ones share one, is the baseline that every method must beat. Runs that have finished are not
repeated, so an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compare
from tqdm import tqdm

from dlrm import measure
from dlrm.data.schema import Meta
from dlrm.hints import Parser

ROOT = Path(__file__).parent.parent


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--data", required=True, help="prepared directory")
    parser.add_argument("--config", help="YAML of the runs, as for train.py")
    parser.add_argument("--kinds", nargs="+", default=["tt", "qr", "block", "hash", "drop"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[4, 10, 30])
    parser.add_argument("--seeds", type=int, default=3, help="runs per point (default: 3)")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="where runs go")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--plot", type=Path, default=Path("frontier.png"))
    parser.add_argument("--json", type=Path, help="where the result is written as JSON")
    parser.add_argument("--options", nargs="*", default=[], help="more options, as epochs=2")
    return parser


def points(kinds: list[str], ratios: list[float], seeds: int) -> Iterator[tuple[str, list[str]]]:
    """Name and options of every run: dense, then each kind at each ratio."""
    for seed in range(seeds):
        yield f"dense-{seed}", ["--emb=dense", f"--seed={seed}"]
        for kind in kinds:
            for ratio in ratios:
                budget = f"{ratio:g}x"
                yield (
                    f"{kind}-{budget}-{seed}",
                    [f"--emb={kind}", f"--budget={budget}", f"--seed={seed}"],
                )


def train(name: str, options: list[str], common: list[str], runs: Path, threads: int) -> str | None:
    """One run; returns why it could not be done, or None."""
    if (runs / name / "result.json").exists():
        return None
    command = [sys.executable, "train.py", f"--output={runs.resolve()}", f"--name={name}"]
    log = runs / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            [*command, "--checkpoint=false", *common, *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode == 0:
        return None
    errors = [line for line in log.read_text().splitlines() if line.startswith("error")]
    if not errors:
        raise ChildProcessError(f"run {name} failed; see {log}")
    return f"{name}: {errors[0]}"


def main(argv: list[str] | None = None) -> int:
    """Train what is missing, then compare; returns the exit status."""
    options = arguments().parse_args(argv)
    try:
        Meta.read(options.data)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.runs.mkdir(parents=True, exist_ok=True)
    common = [f"--data={Path(options.data).resolve()}", *(f"--{o}" for o in options.options)]
    if options.config:
        common.append(f"--config={Path(options.config).resolve()}")
    todo = list(points(options.kinds, options.ratios, options.seeds))
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda run: train(run[0], run[1], common, options.runs, threads), todo)
        impossible = [why for why in tqdm(results, total=len(todo), unit=" runs") if why]
    for why in impossible:
        print(why)
    runs = [options.runs / name for name, _ in todo]
    summary = compare.summarize(
        compare.read([run for run in runs if (run / "result.json").exists()])
    )
    print(compare.render(summary))
    compare.draw(summary, "AUC", options.plot)
    if options.json:
        measure.write(
            options.json,
            {
                "data": Path(options.data).name,
                "config": options.config,
                "options": options.options,
                "impossible": impossible,
                "results": json.loads(summary.to_json(orient="records")),
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
