"""Fit the distributions of the synthetic data to a sample of real Criteo rows.

Writes the profile that ``dlrm.data.synthetic`` draws from, ``dlrm/data/synthetic/profile.json``:
aggregates alone (shares by rank, quantiles, missing rates), never a value or a row of the sample.
With ``--plot`` it also draws the fit: coverage by rank of the real sample beside a synthetic sample
of as many rows.

    python scripts/maintenance/calibrate_synthetic.py kaggle=train_sample.tsv.gz --plot FILE
"""

from __future__ import annotations

import json
import sys
import zlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dlrm.data.schema import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    KAGGLE_CARDINALITIES,
    TERABYTE_CARDINALITIES,
)
from dlrm.data.synthetic.distributions import PROFILE_FILE, Profile, profiles
from dlrm.data.synthetic.generator import Generator
from dlrm.utils.atomic import atomic_write, save_figure
from dlrm.utils.program import Parser, exit_status, figure_arg, path_arg

# Rows of the full files, over which the cardinalities were counted.
FULL = {
    "kaggle": (45_840_617, KAGGLE_CARDINALITIES),
    "terabyte": (4_373_472_329, TERABYTE_CARDINALITIES),
}
WELL_COUNTED = 20  # sample count from which a rank's share is taken as measured
HEAD_STEP, TAIL_STEP = 1.2, 1.5  # ratio of neighbouring knots


def read_sample(path: str | Path) -> pd.DataFrame:
    """The raw rows of a Criteo TSV file; missing integers NaN, missing tokens ''.

    Raises:
        ValueError: it holds others.
    """
    names = ["label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]
    try:
        return pd.read_csv(
            path,
            sep="\t",
            header=None,
            names=names,
            index_col=False,
            dtype=dict.fromkeys(CRITEO_DENSE, float) | dict.fromkeys(CRITEO_CATEGORICAL, str),
            keep_default_na=False,
            na_values={name: [""] for name in CRITEO_DENSE},
        )
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} holds no raw rows of Criteo's: {error}") from None


def require_enough(path: str | Path, sample: pd.DataFrame) -> None:
    """Raise unless each column has something to be fitted to."""
    for name in CRITEO_DENSE:
        if not sample[name].notna().any():
            raise ValueError(f"{path} holds no raw rows of Criteo's: {name} has no values")
    for name in CRITEO_CATEGORICAL:
        counts = sample.loc[sample[name] != "", name].value_counts()
        if counts.empty or counts.iloc[0] < WELL_COUNTED:
            raise ValueError(
                f"{path}: no value of {name} is in {WELL_COUNTED} rows: give more rows"
            )


def knots_between(first: int, last: int, step: float) -> np.ndarray:
    """Integers from ``first`` to ``last``, both included, consecutive ones about ``step`` apart."""
    knots = [first]
    while knots[-1] < last:
        knots.append(min(last, max(knots[-1] + 1, round(knots[-1] * step))))
    return np.array(knots)


def seen(ids: np.ndarray, shares: np.ndarray, rows: int, full_rows: int) -> np.ndarray:
    """Expected distinct values in ``rows`` of ``full_rows`` rows drawn without replacement.

    Args:
        ids: number of values in each segment [S].
        shares: share of the rows that one value of the segment takes [..., S].
    """
    return (1 - (1 - rows / full_rows) ** (full_rows * shares)) @ ids


def fit_ranks(
    counts: np.ndarray, values: int, full_rows: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Coverage by rank of a column with ``values`` values in the full file.

    The well counted head is taken as measured. The tail is log-quadratic, ``log p(r) = log p0 -
    s t - q t^2`` with ``t = log(r / r0)``, no value rarer than one row of the full file; ``s``
    makes the shares add to one, ``q`` matches the number of distinct values of the sample.

    Args:
        counts: rows per value in the sample, falling, missing left out.
        values: values in the full file.
        full_rows: rows of the full file where the column is present.

    Returns:
        Knots in rank [K + 1] from 0 to ``values``, the coverage there [K + 1] from 0 to 1, and the
        expected number of distinct values in the sample.
    """
    rows = int(counts.sum())
    head = int((counts >= WELL_COUNTED).sum()) if len(counts) < values else values
    covered = np.concatenate([[0], np.cumsum(counts[:head])]) / rows
    if head < values:  # a row each at least for the values that the sample lacks
        covered *= min(1, (1 - (values - head) / full_rows) / covered[-1])
    knots = np.concatenate([[0], knots_between(1, head, HEAD_STEP)])
    coverage = covered[knots]
    if head == values:
        return knots, coverage, float(values)
    tail = knots_between(head, values, TAIL_STEP)
    width = np.diff(tail)
    t = np.log((tail[:-1] + tail[1:]) / 2 / head)
    first = counts[int(head * 0.8) : head].mean() / rows
    floor = min(1 / full_rows, (1 - covered[-1]) / (values - head))
    left = 1 - covered[-1]
    q = np.linspace(-1, 6, 351)[:, None]
    low, high = np.full_like(q, -5), np.full_like(q, 30)
    for _ in range(40):
        s = (low + high) / 2
        shares = np.clip(first * np.exp(-s * t - q * t * t), floor, first)  # [Q, S]
        shares = np.minimum.accumulate(shares, axis=1)
        more = (shares @ width > left)[:, None]
        low, high = np.where(more, s, low), np.where(more, high, s)
    shares *= left / (shares @ width)[:, None]
    distinct = head + seen(width, shares, rows, full_rows)
    best = np.abs(distinct - len(counts)).argmin()
    shares, expected = shares[best], float(distinct[best])
    knots = np.concatenate([knots, tail[1:]])
    coverage = np.concatenate([coverage, covered[-1] + np.cumsum(width * shares)])
    falling = np.minimum.accumulate(np.diff(coverage) / np.diff(knots)) * np.diff(knots)
    return knots, np.concatenate([[0], np.cumsum(falling) / falling.sum()]), expected


def fit_dense(values: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Lowest value, knots above it and the share of rows below each knot."""
    lowest = int(values.min())
    above = np.sort(values.astype(np.int64) - lowest)
    knots = np.concatenate([[0], knots_between(1, int(above[-1]) + 1, 1.15)])
    return lowest, knots, np.searchsorted(above, knots, side="left") / len(above)


def profile_of(sample: pd.DataFrame, full_rows: int, cardinalities: tuple[int, ...]) -> dict:
    """The profile of a data set as it stands in the file.

    Args:
        sample: real rows, as from ``read_sample``.
        full_rows: rows of the full file.
        cardinalities: distinct values of each column there, "missing" counted as one.
    """
    masks: dict[bytes, str] = {}

    def missing(name: str, mask: np.ndarray) -> dict:
        if not mask.any():
            return {}
        word = masks.setdefault(np.packbits(mask).tobytes(), name)
        return {"missing": round(float(mask.mean()), 6), "together": word}

    dense, categorical = [], []
    for name in CRITEO_DENSE:
        column = sample[name]
        lowest, knots, below = fit_dense(column.dropna().to_numpy())
        dense.append(
            {"name": name, "knots": knots.tolist(), "below": below.round(8).tolist()}
            | ({"lowest": lowest} if lowest else {})
            | missing(name, column.isna().to_numpy())
        )
    for name, cardinality in zip(CRITEO_CATEGORICAL, cardinalities, strict=True):
        mask = (sample[name] == "").to_numpy()
        counts = sample.loc[~mask, name].value_counts().to_numpy()
        rows = round(full_rows * (1 - mask.mean()))
        knots, below, _ = fit_ranks(counts, cardinality - bool(mask.any()), rows)
        categorical.append(
            {"name": name, "knots": knots.tolist(), "below": below.round(11).tolist()}
            | missing(name, mask)
        )
    return {"rows": full_rows, "dense": dense, "categorical": categorical}


def write_profiles(path: Path, made: dict[str, dict]) -> None:
    """Write the profiles, a column per line, those not made this time as they are."""
    old = json.loads(path.read_text()) if path.exists() else {}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(old | made).replace('{"name"', '\n{"name"') + "\n")


def plot(path: str | Path, sample: pd.DataFrame, profile: Profile) -> None:
    """Draw real beside synthetic: coverage by rank, dense distributions, missing rates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    generator = Generator(
        profile.dense,
        profile.categorical,
        rows=profile.rows,
        seed=0,
        auc=0.8,
        positives=0.256,
        device=torch.device("cpu"),
    )
    block = generator.block(0, len(sample))  # a random subset of the full synthetic data
    figure, axes = plt.subplots(8, 5, figsize=(15, 20), layout="constrained")
    panels = iter(axes.flat)
    rates: list[tuple[float, float]] = []
    for law, ids in zip(profile.categorical, block.ids, strict=True):
        axis = next(panels)
        real = sample[law.name].value_counts().to_numpy()
        made = np.sort(np.bincount(ids.numpy()))[::-1]
        made = made[made > 0]
        for counts, style in ((real, "-"), (made, "--")):
            axis.semilogx(np.arange(1, len(counts) + 1), counts.cumsum() / counts.sum(), style)
        axis.set_title(f"{law.name}: {len(real):,} values, {len(made):,}", fontsize=9)
        if law.missing:
            synthetic = float((ids == law.missing_rank).double().mean())
            rates.append((float((sample[law.name] == "").mean()), synthetic))
    for law, values, missing in zip(profile.dense, block.dense, block.missing, strict=True):
        axis = next(panels)
        made = values[~missing].numpy()
        for column, style in ((sample[law.name].dropna(), "-"), (made, "--")):
            ordered = np.log1p(np.sort(column) - law.lowest)
            axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), style)
        axis.set_title(f"{law.name}, log scale", fontsize=9)
        if law.missing:
            rates.append((float(sample[law.name].isna().mean()), float(missing.double().mean())))
    axis = next(panels)
    axis.plot([0, 1], [0, 1], color="lightgray")
    axis.plot(*zip(*rates, strict=True), "o")
    axis.set_title("missing rates: real, synthetic", fontsize=9)
    figure.suptitle(
        f"{len(sample):,} rows, real (solid) and synthetic (dashed): share of the rows covered by "
        "the most frequent values (C, by rank) or by the values up to x (I)"
    )
    save_figure(figure, Path(path), dpi=60)


def calibrate(options: Namespace) -> None:
    """Fit each sample, write the profiles and draw the plot."""
    samples = {}
    for argument in options.samples:
        name, _, path = argument.partition("=")
        if name not in FULL or not Path(path).is_file():
            raise ValueError(f"{argument!r} must be kaggle=FILE or terabyte=FILE")
        samples[name] = read_sample(path)
        require_enough(path, samples[name])
    made = {name: profile_of(sample, *FULL[name]) for name, sample in samples.items()}
    write_profiles(options.output, made)
    if options.plot:
        name = next(iter(samples))
        plot(options.plot, samples[name], profiles(options.output)[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument(
        "samples", nargs="+", metavar="NAME=FILE", help="kaggle or terabyte, and a raw TSV file"
    )
    parser.add_argument(
        "--output",
        type=path_arg,
        default=PROFILE_FILE,
        help="profile to write (default: %(default)s)",
    )
    parser.add_argument(
        "--plot", type=figure_arg, metavar="PNG", help="draw the fit of the first sample"
    )
    options = parser.parse_args(argv)
    return exit_status(lambda: calibrate(options))


if __name__ == "__main__":
    sys.exit(main())
