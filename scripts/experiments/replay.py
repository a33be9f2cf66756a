"""A replay of days: a model that is trained on with every day, and one that stood still.

    python scripts/experiments/replay.py train.tsv.gz --json benchmarks/replay_sample.json

The rows, which are in the order of time, are divided into parts of equal size, the days. Each model
trains on the first day. Then, day by day, all models score the day before they see it; after that,
those that stay fresh train on it once: its rows get the ids of the days before, and values not seen
before get new ones (``prepare_criteo.py --append-new``, ``train.py --init_from``). One of them
forgets values for new ones (``--forget``).
"""

from __future__ import annotations

import gzip
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from dlrm.config.schema import RunConfig
from dlrm.data.criteo import Options, prepare
from dlrm.data.schema import Meta
from dlrm.training.predictor import Predictor
from dlrm.training.ranking import Ties, roc_area
from dlrm.training.score_file import LABEL, PROBABILITY
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness
from scripts.experiments.runner import INTERRUPTED, Runner, RunSpec

STARTS = ("unseen", "random")
STILL, NO_NEW, FORGET = "still", "no_new", "forget"
WAYS = (STILL, NO_NEW, *STARTS, FORGET)
"""Stood still; trained on without rows for new values; with rows for them that start so; as the
first of these, but values are forgotten."""


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("rows", type=path_arg, help="raw rows of Criteo in the order of time, plain or gzip")
    add("--days", type=count_arg, default=7, help="number of parts")
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="models to compare")

    # The models.
    add("--seeds", type=count_arg, default=3, help="runs of each model")
    add("--min-count", type=count_arg, default=2, help="occurrences in a day of values with an id")
    add(
        "--forget",
        type=count_arg,
        default=2,
        help="preparations of values to forget (prepare_criteo.py --forget)",
    )

    add("--work", type=path_arg, default=Path("runs/replay"), help="directory for days and runs")
    add("--jobs", type=count_arg, default=1, help="number of runs at a time")
    config = Path(__file__).parents[2] / "configs" / "criteo_sample.yaml"
    add("--config", type=path_arg, default=config, help="configuration of train.py")
    add("--options", nargs="*", default=[], help="options of train.py, e.g. epochs=2")
    add("--json", type=path_arg, help="also write the results to this JSON file")
    return parser


class Replay:
    """The days, their preparations and the runs, in one directory; finished parts are kept."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        common = [f"--config={options.config.resolve()}"]
        common += [f"--{option}" for option in options.options]
        self.runner = Runner(self.work / "runs", options.jobs, common)
        self.days = self._divide(options.rows, options.days)

    def _divide(self, path: Path, days: int) -> list[Path]:
        """One file with the raw rows of each day."""
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = file.readlines()
        if len(lines) < days:
            raise ValueError(f"{path} has {len(lines)} rows; give one for each of {days} days")
        files = []
        for day in range(days):
            start, stop = (len(lines) * at // days for at in (day, day + 1))
            files.append(self.work / f"day_{day + 1}.tsv")
            content = "".join(lines[start:stop])
            if not files[-1].is_file() or files[-1].read_text() != content:
                files[-1].write_text(content)
        return files

    def _prepared(self, way: str, day: int) -> Path:
        """The rows of a day, from 0, with the ids that a model has after it."""
        names = {NO_NEW: "old_ids", FORGET: f"forget_{self.options.forget}"}
        name = names.get(way, "day")
        output = self.work / f"{name if day else 'day'}_{day + 1}"
        first = self.work / "day_1"
        before = first if way == NO_NEW or day == 1 else self.work / f"{name}_{day}"
        given = Options(
            split=("1", "0", "0"),
            min_count=self.options.min_count,
            ids_of=str(before) if day else None,
            append_new=way != NO_NEW and day > 0,
            forget=self.options.forget if way == FORGET and day else None,
        )
        prepare([self.days[day]], output, given, progress=False)
        return output

    def run(self, way: str, seed: int, day: int) -> str:
        """The name of the run of a model after a day, counted from 0."""
        name = f"{way}_{self.options.forget}" if way == FORGET else way
        return f"{name}_seed_{seed}_day_{day + 1}" if day and way != STILL else f"first_seed_{seed}"

    def train(self, day: int) -> dict[str, int]:
        """Train all models on a day; those that are not trained further, on the first day alone.

        Returns:
            The rows of the tables of each.
        """
        seeds, ways = range(self.options.seeds), [w for w in self.options.ways if w != STILL]
        first = self._prepared(STILL, 0)
        sizes = {STILL: sum(Meta.read(first).cardinalities)}
        if not day:
            self._train([RunSpec(self.run(STILL, s, 0), [f"--seed={s}"]) for s in seeds], first)
            return dict.fromkeys(self.options.ways, sizes[STILL])
        runs: dict[Path, list[RunSpec]] = {}
        for way in ways:
            own = self._prepared(way, day)
            sizes[way] = sum(Meta.read(own).cardinalities)
            for seed in seeds:
                before = self.work / "runs" / self.run(way, seed, day - 1)
                given = [f"--init_from={before.resolve()}", f"--seed={seed}"]
                given += [f"--new_rows={way}"] if way in STARTS else []
                runs.setdefault(own, []).append(RunSpec(self.run(way, seed, day), given))
        for own, specs in runs.items():
            self._train(specs, own)
        return {way: sizes[way] for way in self.options.ways}

    def _train(self, runs: list[RunSpec], data: Path) -> None:
        if impossible := self.runner.train(runs, data):
            raise ValueError(impossible[0])

    def auc(self, way: str, seed: int, day: int) -> float:
        """The AUC on a day of a model that has seen the days before it."""
        run = self.work / "runs" / self.run(way, seed, day - 1)
        parts = list(Predictor.load(run).score([self.days[day]]))
        scores, labels = (
            torch.from_numpy(np.concatenate([part[name].to_numpy() for part in parts]))
            for name in (PROBABILITY, LABEL)
        )
        return roc_area(Ties.of(scores, labels))


def replay(options: Namespace) -> None:
    """Train and score day by day, and print the AUC of each model by day."""
    if options.days < 2:
        raise ValueError(f"--days is {options.days}; a replay needs at least 2")
    options.work.mkdir(parents=True, exist_ok=True)

    parts = Replay(options)
    found: dict[str, list[list[float]]] = {way: [] for way in options.ways}  # by day and seed
    rows: dict[str, list[int]] = {way: [] for way in options.ways}

    for day in range(options.days):
        if day:
            for way in options.ways:
                found[way].append([parts.auc(way, seed, day) for seed in range(options.seeds)])
                values = found[way][-1]
                spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
                print(f"day {day + 1} {way:>7}: AUC {np.mean(values):.4f} +- {spread:.4f}")
        if day < options.days - 1:
            for way, size in parts.train(day).items():
                rows[way].append(size)

    for way, days in found.items():
        means = np.mean(days, axis=0)  # of the days, by seed
        print(f"{way:>7}: mean AUC {means.mean():.4f}, by seed {np.round(means, 4).tolist()}")

    if options.json:
        chosen = {name: getattr(options, name) for name in ("min_count", "forget", "options")}
        defaults = {"config": options.config.name, "emb": RunConfig.emb}
        report = {"days": options.days, "rows_of_tables": rows, **chosen, **defaults, "auc": found}
        harness.write(options.json, report)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    return exit_status(lambda: replay(options), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
