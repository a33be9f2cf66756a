"""Reproduce TT-Rec: quality, size and speed of tensor-train embeddings on Criteo Kaggle.

    python scripts/reproduce_tt_rec.py --ratios-only
    python scripts/reproduce_tt_rec.py --data data/kaggle

``--data`` is any directory that ``prepare_criteo.py`` or ``make_synthetic.py`` made. The largest
tables are put into tensor-train format at several ranks, and at one of them with a cache of the
most used rows, and trained beside dense tables: every run by ``train.py``, with several seeds.
With ``--fine-tune STEPS`` the first dense run is also compressed, and trained for so many steps
more. Steps are timed alone, after all runs. Runs that have finished are not repeated.

Reference: Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021, arXiv 2101.11714.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from dlrm.data.schema import KAGGLE_CARDINALITIES, Meta
from dlrm.embeddings.common.factorization import factorize_dim, factorize_rows
from dlrm.embeddings.tt import clip_ranks, tt_weights
from dlrm.training import benchmark, run_directory
from dlrm.utils.atomic import save_figure
from dlrm.utils.program import Parser, count_arg, exit_status, figure_arg, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[1]))  # for train.py and the other scripts
from scripts.experiments.runner import Pool, Run, require_rows, step_speed

# Rows of the tables of Criteo Terabyte with ids modulo 10,000,000, as in the paper.
TERABYTE_10M = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10,
    2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
METRICS = {
    "test/accuracy": "accuracy",
    "test/auc": "AUC",
    "test/log_loss": "log loss",
    "test/normalized_entropy": "NE",
}
FITTED = {"accuracy": "fitted accuracy", "auc": "fitted AUC"}
FORMATS = {
    **dict.fromkeys(("accuracy", "AUC", "log loss", "NE"), ".4f"),
    **{"loss, %": ".3f", "MB": ",.2f", "ratio": ".1f", "step, ms": ".3f", "samples/s": ",.0f"},
    **dict.fromkeys(FITTED.values(), ".4f"),
}
AXES = {"loss, %": "accuracy below dense (percentage points)", "step, ms": "training step (ms)"}


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("--data", help="prepared directory")
    parser.add_argument("--ratios-only", action="store_true", help="the ratios alone, at once")
    config = "configs/criteo_kaggle_large_batch.yaml"
    parser.add_argument("--config", default=config, help="YAML of the runs, as for train.py")
    parser.add_argument(
        "--tables", nargs="+", type=count_arg, default=[3, 5, 7], help="largest tables"
    )
    parser.add_argument("--ranks", nargs="+", type=count_arg, default=[8, 16, 32, 64], help="of TT")
    parser.add_argument(
        "--caches", nargs="*", type=share, default=[1e-4, 1e-3, 1e-2], help="shares of the rows"
    )
    parser.add_argument(
        "--cache-at", nargs=2, type=count_arg, default=[7, 32], help="tables and rank"
    )
    parser.add_argument("--seeds", type=count_arg, default=3, help="runs per cell (default: 3)")
    parser.add_argument(
        "--tt-lr", type=positive_arg, help="learning rate of TT, if not the config's"
    )
    parser.add_argument(
        "--fine-tune",
        type=count_arg,
        default=0,
        metavar="STEPS",
        help="of the compressed dense model",
    )
    parser.add_argument(
        "--fine-tune-lr", type=positive_arg, default=5e-4, help="their learning rate"
    )
    parser.add_argument("--runs", type=path_arg, default=Path("runs/tt_rec"), help="where runs go")
    parser.add_argument("--jobs", type=count_arg, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--no-timing", action="store_true", help="leave out the step times")
    parser.add_argument(
        "--plot", type=figure_arg, default=Path("tt_rec.png"), help="PNG, SVG or PDF to draw"
    )
    parser.add_argument("--json", type=path_arg, help="where the result is written as JSON")
    parser.add_argument("--options", nargs="*", default=[], help="more options, as epochs=2")
    return parser


def share(text: str) -> float:
    """A number above 0, at most 1: the ``type`` of an option."""
    value = positive_arg(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, it must be a share, at most 1")
    return value


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of the grid: the ``tables`` largest tables in TT; none for the dense model."""

    tables: int = 0
    rank: int = 0
    cache: float = 0.0
    """Share of the rows of these tables that are cached."""

    def __str__(self) -> str:
        if not self.tables:
            return "dense"
        return f"tt{self.tables}-r{self.rank}" + (f"-c{self.cache:g}" if self.cache else "")

    def options(self, cardinalities: Sequence[int]) -> list[str]:
        """Of the command line of ``train.py``."""
        if not self.tables:
            return ["--emb=dense"]
        rows = sum(sorted(cardinalities)[-self.tables :])
        return [
            *("--emb=tt", f"--tables.largest={self.tables}", f"--tt.rank={self.rank}"),
            f"--tt.cache_rows={round(self.cache * rows)}",
        ]


def compression(cardinalities: Sequence[int], dim: int, tables: int, rank: int) -> float:
    """Dense weights over weights with the ``tables`` largest tables in TT, without a cache."""
    order = sorted(cardinalities, reverse=True)
    q, shapes = factorize_dim(dim, 3), [factorize_rows(rows, 3) for rows in order[:tables]]
    ranks = clip_ranks(rank, shapes, q)
    weights = sum(tt_weights(p, q, ranks) for p in shapes) + dim * sum(order[tables:])
    return dim * sum(order) / weights


def print_ratios(tables: Sequence[int], ranks: Sequence[int]) -> None:
    """The paper's compression ratios of Kaggle (dim 16) and Terabyte (dim 64)."""
    grid = {
        f"rank {rank}": [f"{compression(KAGGLE_CARDINALITIES, 16, n, rank):.1f}x" for n in tables]
        for rank in ranks
    }
    print("Criteo Kaggle, dim 16, compression of all embeddings:")
    print(pd.DataFrame(grid, index=[f"{n} largest tables" for n in tables]).to_string())
    terabyte = compression(TERABYTE_10M, 64, 7, 8)
    print(f"Criteo Terabyte, ids modulo 10 M, dim 64, 7 largest, rank 8: {terabyte:.1f}x")


def cells(options: argparse.Namespace) -> list[Cell]:
    """Every model of the grid, dense first."""
    grid = [Cell(tables=n, rank=rank) for n in options.tables for rank in options.ranks]
    n, rank = options.cache_at
    return [Cell(), *grid, *(Cell(tables=n, rank=rank, cache=share) for share in options.caches)]


def to_fit(options: argparse.Namespace) -> list[Cell]:
    """The models that the dense one is compressed to: all numbers of tables at one rank."""
    return [Cell(tables=n, rank=options.cache_at[1]) for n in options.tables]


def runs_of(cell: Cell, options: argparse.Namespace, meta: Meta) -> list[Run]:
    """The runs of a cell, one per seed."""
    given = cell.options(meta.cardinalities)
    if cell.tables and options.tt_lr:
        given.append(f"--optim.embeddings_lr={options.tt_lr}")
    runs = [(f"{cell}-{seed}", [*given, f"--seed={seed}"]) for seed in range(options.seeds)]
    if not cell.tables and options.fine_tune:
        runs[0][1].append("--checkpoint=true")
    return runs


def fine_tuning(cell: Cell, options: argparse.Namespace, meta: Meta) -> Run:
    """The first dense run compressed to a cell, and trained on for a while."""
    rate = options.fine_tune_lr
    return f"fitted-{cell}", [
        *cell.options(meta.cardinalities),
        f"--init_from={(options.runs / 'dense-0').resolve()}",
        *(f"--max_steps={options.fine_tune}", "--seed=1000"),
        *(f"--optim.lr={rate}", f"--optim.embeddings_lr={rate}", "--optim.warmup_steps=0"),
        *("--optim.decay_start=0", f"--optim.decay_steps={options.fine_tune}"),
    ]


def seed_of(name: str, cell: str) -> str:
    """The seed in the name of a run of a cell; that of the dense run that was compressed."""
    return "0" if name == cell else name.removeprefix(f"{cell}-")


def summarize(names: dict[str, list[str]], pool: Pool) -> pd.DataFrame:
    """One line per cell: means, deviations over seeds, and the loss of accuracy against dense.

    Args:
        names: the runs of each cell; those of "dense" are the baseline.
        pool: where they are.
    """
    baseline = {
        seed_of(name, "dense"): pool.metrics(name)["test/accuracy"] for name in names["dense"]
    }
    rows = []
    for cell, runs in names.items():
        metrics = [pool.metrics(name) for name in runs]
        row: dict[str, Any] = {"cell": cell, "seeds": len(runs)}
        for name, label in METRICS.items():
            values = pd.Series([found[name] for found in metrics])
            row |= {label: values.mean(), f"{label} std": values.std()}
        pairs = [  # of one seed, for a run of either may have failed
            (baseline[seed_of(name, cell)], found["test/accuracy"])
            for name, found in zip(runs, metrics, strict=True)
            if seed_of(name, cell) in baseline
        ]
        lost = pd.Series([100 * (best - own) for best, own in pairs], dtype=float)
        row |= {"loss, %": lost.mean(), "loss, % std": lost.std()}
        row |= {"MB": metrics[0]["embeddings/bytes"] / 1e6}
        row |= {"ratio": metrics[0]["embeddings/compression"]}
        if "fitted/accuracy" in metrics[0]:
            row |= {label: metrics[0][f"fitted/{key}"] for key, label in FITTED.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def render(summary: pd.DataFrame) -> str:
    """The summary as a text table, ``mean ± std`` where there are several seeds."""
    shown = summary[["cell", "seeds"]].copy()
    for label, form in FORMATS.items():
        if label not in summary:
            continue
        spread = summary.get(f"{label} std", pd.Series([float("nan")] * len(summary)))
        shown[label] = [
            ("-" if mean != mean else f"{mean:{form}}") + (f" ± {std:{form}}" if std == std else "")
            for mean, std in zip(summary[label], spread, strict=True)
        ]
    return shown.to_string(index=False)


def draw(summary: pd.DataFrame, path: Path) -> None:
    """Loss of accuracy, and time of a step if it was measured, against compression."""
    labels = [label for label in AXES if label in summary]
    figure, panels = plt.subplots(
        1, len(labels), figsize=(6.5 * len(labels), 5), layout="constrained", squeeze=False
    )
    for axes, label in zip(panels[0], labels, strict=True):
        draw_points(axes, summary, label)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.1)
        axes.set_xlabel("compression of all embeddings")
        axes.set_ylabel(AXES[label])
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        title="beside a point: its rank, or the share of rows in its cache",
        loc="outside lower center",
        ncols=6,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=150)
    plt.close(figure)


def draw_points(axes: Axes, summary: pd.DataFrame, label: str) -> None:
    """One column of the summary against compression.

    No lines join the points: along the ranks of some tables, both go up and down.
    """
    axes.axhline(summary[label][0], color="gray", linestyle="--", label="dense")
    parts = summary["cell"].str.extract(r"^(fitted-)?tt(\d+)-r(\d+)(-c)?([\d.e-]+)?$").fillna("")
    colors = {tables: f"C{color}" for color, tables in enumerate(sorted(set(parts[1])))}
    for (fitted, tables, cached), points in summary.groupby([parts[0], parts[1], parts[3]]):
        if not tables or points[label].isna().all():
            continue
        spread = points.get(f"{label} std")
        axes.errorbar(
            points["ratio"],
            points[label],
            yerr=None if fitted or spread is None else spread.fillna(0.0),
            fmt="x" if fitted else ("s" if cached else "o"),
            color="black" if fitted else colors[tables],
            markerfacecolor="white" if cached else None,
            capsize=3,
            label="_" if fitted else f"{tables} tables" + (" with a cache" if cached else ""),
        )
        if fitted:
            continue
        low, high = points["ratio"].min(), points["ratio"].max()
        named = points[["ratio", label]].join(parts[[2, 4]])
        for ratio, value, rank, share in named.itertuples(index=False):
            left = ratio < high if cached else ratio == low
            axes.annotate(
                f"{100 * float(share):g}%" if cached else rank,
                (ratio, value),
                xytext=(-6 if left else 5, 3 if cached or ratio < high else -10),
                ha="right" if left else "left",
                textcoords="offset points",
                fontsize=8,
            )
    if parts[0].any():
        axes.plot([], [], "kx", label="dense, compressed and fine-tuned")


def reproduce(options: argparse.Namespace) -> None:
    """Train what is missing, time, and compare."""
    if not options.data:
        raise ValueError("--data is needed, or --ratios-only")
    meta = Meta.read(options.data)
    require_rows(options.data, meta, "test")
    common = [f"--config={options.config}", "--checkpoint=false", "--eval_every=2000000000"]
    common += [f"--{option}" for option in options.options]
    pool = Pool(options.runs, options.jobs, common)
    runs = {str(cell): runs_of(cell, options, meta) for cell in cells(options)}
    seeds = [list(seed) for seed in zip(*runs.values(), strict=True)]
    impossible = pool.train([run for seed in seeds for run in seed], options.data)
    if options.fine_tune:
        dense = options.runs / "dense-0"
        if not run_directory.has_checkpoint(dense):
            raise ValueError(
                f"{dense} has no checkpoint, which --fine-tune begins with: remove it, to be "
                "trained again"
            )
        tuned = {f"fitted-{cell}": fine_tuning(cell, options, meta) for cell in to_fit(options)}
        impossible += pool.train(list(tuned.values()), options.data)
        runs |= {name: [run] for name, run in tuned.items()}
    print(*impossible, sep="\n")
    names = {cell: [name for name, _ in own if pool.done(name)] for cell, own in runs.items()}
    if not names["dense"]:
        raise ValueError("the dense model could not be trained, for the reason above")
    summary = summarize({cell: own for cell, own in names.items() if own}, pool)
    report = {
        "data": Path(options.data).name,
        "config": options.config,
        "options": options.options,
        "fine_tune": {"steps": options.fine_tune, "lr": options.fine_tune_lr},
        "best_possible": meta.planted.get("test"),
        "impossible": impossible,
    }
    publish(summary, options, report)
    if not options.no_timing:
        for line, cell in enumerate(summary["cell"]):
            if not cell.startswith("fitted"):
                speed = step_speed([*common, f"--data={options.data}", *runs[cell][0][1]])
                summary.loc[line, list(speed)] = list(speed.values())
        publish(summary, options, report)


def publish(summary: pd.DataFrame, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print the table, draw the plot and write the JSON."""
    print(render(summary))
    if report["best_possible"]:
        print("best possible under the planted truth:", report["best_possible"])
    draw(summary, options.plot)
    if options.json:
        results = json.loads(summary.to_json(orient="records"))
        benchmark.write(options.json, {**report, "results": results})


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)
    if options.ratios_only:
        print_ratios(options.tables, options.ranks)
        return 0
    again = "interrupted; the same command goes on where it was"
    return exit_status(lambda: reproduce(options), again)


if __name__ == "__main__":
    sys.exit(main())
