"""Fit the distributions of the synthetic data to a sample of real Criteo rows.

Writes the profile from which ``dlrm.data.synthetic`` draws, ``dlrm/data/synthetic/profile.json``.
It contains only aggregates (shares by rank, quantiles, missing rates), no value or row of the
sample.

    python scripts/maintenance/calibrate_synthetic.py kaggle=train_sample.tsv.gz
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

from dlrm.data.schema import (
    CRITEO_CATEGORICAL,
    CRITEO_DENSE,
    KAGGLE_CARDINALITIES,
    TERABYTE_CARDINALITIES,
)
from dlrm.data.synthetic.distributions import PROFILE_FILE
from dlrm.utils.atomic import atomic_write
from dlrm.utils.program import Parser, exit_status, path_arg

# Rows of the full files, in which the cardinalities were counted.
FULL = {
    "kaggle": (45_840_617, KAGGLE_CARDINALITIES),
    "terabyte": (4_373_472_329, TERABYTE_CARDINALITIES),
}
WELL_COUNTED = 20  # with at least this count in the sample, the share of a rank is used as it is
HEAD_STEP, TAIL_STEP = 1.2, 1.5  # ratio of neighbouring knots


def read_sample(path: str | Path) -> pd.DataFrame:
    """The raw rows of a Criteo TSV file; missing integers are NaN, missing tokens ''.

    Raises:
        ValueError: the file has no such rows.
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
        raise ValueError(f"{path} has no raw Criteo rows: {error}") from None


def require_enough(path: str | Path, sample: pd.DataFrame) -> None:
    """Check that each column has enough values for a fit."""
    for name in CRITEO_DENSE:
        if not sample[name].notna().any():
            raise ValueError(f"{path} has no raw Criteo rows: {name} has no values")
    for name in CRITEO_CATEGORICAL:
        counts = sample.loc[sample[name] != "", name].value_counts()
        if counts.empty or counts.iloc[0] < WELL_COUNTED:
            raise ValueError(
                f"{path}: no value of {name} occurs in {WELL_COUNTED} rows; give more rows"
            )


def knots_between(first: int, last: int, step: float) -> np.ndarray:
    """Integers from ``first`` to ``last``, both included, consecutive ones about ``step`` apart."""
    knots = [first]
    while knots[-1] < last:
        knots.append(min(last, max(knots[-1] + 1, round(knots[-1] * step))))
    return np.array(knots)


def expected_distinct(ids: np.ndarray, shares: np.ndarray, rows: int, full_rows: int) -> np.ndarray:
    """Expected number of distinct values in ``rows`` of ``full_rows`` rows, without replacement.

    Args:
        ids: number of values in each segment [S].
        shares: share of a single value of each segment [..., S].
    """
    return (1 - (1 - rows / full_rows) ** (full_rows * shares)) @ ids


def fit_ranks(
    counts: np.ndarray, values: int, full_rows: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Coverage by rank of a column with ``values`` values in the full file.

    The head, whose counts are large enough, is used as measured. The tail is log-quadratic, ``log
    p(r) = log p0 - s t - q t^2`` with ``t = log(r / r0)``, and no value is rarer than one row of
    the full file; ``s`` makes the shares add up to one, and ``q`` matches the number of distinct
    values in the sample.

    Args:
        counts: rows per value in the sample, falling, without missing.
        values: values in the full file.
        full_rows: rows of the full file where the column is present.

    Returns:
        Knots [K + 1], ranks from 0 to ``values``; the coverage [K + 1] there, from 0 to 1; and the
        expected number of distinct values in the sample.
    """
    rows = int(counts.sum())
    head = int((counts >= WELL_COUNTED).sum()) if len(counts) < values else values
    covered = np.concatenate([[0], np.cumsum(counts[:head])]) / rows

    if head < values:  # leave at least one row for each value that the sample lacks
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
    distinct = head + expected_distinct(width, shares, rows, full_rows)
    best = np.abs(distinct - len(counts)).argmin()
    shares, expected = shares[best], float(distinct[best])
    knots = np.concatenate([knots, tail[1:]])
    coverage = np.concatenate([coverage, covered[-1] + np.cumsum(width * shares)])
    falling = np.minimum.accumulate(np.diff(coverage) / np.diff(knots)) * np.diff(knots)
    return knots, np.concatenate([[0], np.cumsum(falling) / falling.sum()]), expected


def fit_dense(values: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """The lowest value, the knots above it, and the CDF at the knots."""
    lowest = int(values.min())
    above = np.sort(values.astype(np.int64) - lowest)
    knots = np.concatenate([[0], knots_between(1, int(above[-1]) + 1, 1.15)])
    return lowest, knots, np.searchsorted(above, knots, side="left") / len(above)


def profile_of(sample: pd.DataFrame, full_rows: int, cardinalities: tuple[int, ...]) -> dict:
    """The profile of a data set, as in the JSON file.

    Args:
        sample: real rows, as from ``read_sample``.
        full_rows: rows of the full file.
        cardinalities: distinct values of each column there; "missing" counts as one.
    """
    groups: dict[bytes, str] = {}  # of columns that are missing in the same rows

    def missing(name: str, mask: np.ndarray) -> dict:
        if not mask.any():
            return {}
        group = groups.setdefault(np.packbits(mask).tobytes(), name)
        return {"missing": round(float(mask.mean()), 6), "missing_group": group}

    dense, categorical = [], []
    for name in CRITEO_DENSE:
        column = sample[name]
        lowest, knots, cdf = fit_dense(column.dropna().to_numpy())
        dense.append(
            {"name": name, "knots": knots.tolist(), "cdf": cdf.round(8).tolist()}
            | ({"lowest": lowest} if lowest else {})
            | missing(name, column.isna().to_numpy())
        )

    for name, cardinality in zip(CRITEO_CATEGORICAL, cardinalities, strict=True):
        mask = (sample[name] == "").to_numpy()
        counts = sample.loc[~mask, name].value_counts().to_numpy()
        rows = round(full_rows * (1 - mask.mean()))
        knots, cdf, _ = fit_ranks(counts, cardinality - bool(mask.any()), rows)
        categorical.append(
            {"name": name, "knots": knots.tolist(), "cdf": cdf.round(11).tolist()}
            | missing(name, mask)
        )
    return {"rows": full_rows, "dense": dense, "categorical": categorical}


def write_profiles(path: Path, made: dict[str, dict]) -> None:
    """Write the profiles, one column per line; profiles that were not made are kept."""
    old = json.loads(path.read_text()) if path.exists() else {}
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(old | made).replace('{"name"', '\n{"name"') + "\n")


def calibrate(options: Namespace) -> None:
    """Fit each sample, and write the profiles."""
    samples = {}
    for argument in options.samples:
        name, _, path = argument.partition("=")
        if name not in FULL or not Path(path).is_file():
            raise ValueError(f"{argument!r} must be kaggle=FILE or terabyte=FILE")
        samples[name] = read_sample(path)
        require_enough(path, samples[name])
    made = {name: profile_of(sample, *FULL[name]) for name, sample in samples.items()}
    write_profiles(options.output, made)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument(
        "samples",
        nargs="+",
        metavar="NAME=FILE",
        help="kaggle or terabyte, and a raw TSV file",
    )
    parser.add_argument(
        "--output",
        type=path_arg,
        default=PROFILE_FILE,
        help="profile to write (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    return exit_status(lambda: calibrate(options))


if __name__ == "__main__":
    sys.exit(main())
