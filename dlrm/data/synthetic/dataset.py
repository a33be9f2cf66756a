"""Synthetic Criteo data of any size, with labels from a known model.

The columns follow distributions fitted to real samples (``distributions``). The labels are drawn
from a known model (``label_model``), so the best possible AUC and log loss are known:
``Meta.planted`` has them for each split. The same arguments give the same bytes on any device and
with any number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import torch

from dlrm.data.prepare.splitting import split_by_days, split_by_shares
from dlrm.data.schema import META_FILE, SPLITS, Categorical, Meta
from dlrm.data.synthetic.distributions import Distribution, Profile, profiles
from dlrm.data.synthetic.generator import Generator
from dlrm.data.synthetic.label_model import best_metrics
from dlrm.data.synthetic.multi_hot import with_bag_sizes
from dlrm.data.synthetic.writers import Writer, write_parquet
from dlrm.utils.atomic import atomic_directory
from dlrm.utils.cpus import cpu_count
from dlrm.utils.messages import did_you_mean

DEMO_ROWS, DEMO_CAP, DEMO_FRACTIONS = 300_000, 20_000, (0.8, 0.1, 0.1)
MAX_CARDINALITY = 1 << 27  # the limit of the fixed-point numbers in the quantile tables
MAX_DRIFT = 8  # up to this, the sum of the slopes of a row is exact in float32


def write(
    directory: str | os.PathLike[str],
    *,
    rows: int = DEMO_ROWS,
    like: str = "kaggle",
    cardinalities: Sequence[int] | None = None,
    bag_sizes: Sequence[int] | None = None,
    fractions: Sequence[float] | None = None,
    seed: int = 0,
    auc: float = 0.80,
    positives: float = 0.256,
    drift: float = 0.0,
    device: str | None = None,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    writer: Writer = write_parquet,
    meta_file: str = META_FILE,
) -> Meta:
    """Write a synthetic data set into ``directory``; on an error, nothing is left behind.

    Parquet files are like those of ``prepare_criteo`` with the transform log(x + 1): ids are in
    order of falling frequency, and "missing" has its rank among them.

    Args:
        directory: directory to create; it may exist if it is empty.
        rows: number of rows of all splits together.
        like: profile of the distributions of the columns, ``kaggle`` or ``terabyte``.
        cardinalities: rows of each table; by default those of the profile. A smaller table keeps
            the most frequent values.
        bag_sizes: number of ids of each column in a row: one on which the label depends, and
            others, see :mod:`~dlrm.data.synthetic.multi_hot`. By default all columns are one-hot.
        fractions: shares of train, val and test; by default the reference protocol, see
            :func:`~dlrm.data.prepare.splitting.split_by_days`.
        seed: seed of everything random.
        auc: expected AUC of the label model, the best that any model can reach.
        positives: expected share of label 1.
        drift: how much the effects of ids change from the first row to the last. It is the standard
            deviation of the change to either side of the middle, divided by that of the effects.
        device: device that generates the rows, ``cpu`` or ``cuda``; by default a GPU if available.
        threads: files written at a time; by default one per core.
        progress: called with the number of rows just written, by several threads.
        writer: writes the rows in another format.
        meta_file: name of the meta file.

    Returns:
        The meta data, with the metrics of the label model on each split in ``planted``.

    Raises:
        ValueError: an argument is out of range, or ``directory`` is not empty.
    """
    threads = cpu_count() if threads is None else threads
    profile = _profile(like)
    _check(rows, fractions, seed, auc, positives, drift, device, threads)

    categorical = _columns(profile, cardinalities)
    tables = tuple(Categorical(name=c.name, cardinality=c.cardinality) for c in categorical)
    if bag_sizes:
        tables = with_bag_sizes(tables, bag_sizes)
    if fractions is None:
        ranges = split_by_days([rows])
    else:  # the shares exactly as written in decimals
        ranges = split_by_shares(rows, *(Fraction(str(share)) for share in fractions[:2]))

    # The arguments, as the meta data keeps them.
    options = {"source": "synthetic", "like": like, "rows": rows, "fractions": fractions}
    options |= {"seed": seed, "auc": auc, "positives": positives, "dense_transform": "log1p"}
    options |= {"drift": drift} if drift else {}
    options |= {"bag_sizes": list(bag_sizes)} if bag_sizes else {}

    with atomic_directory(Path(directory)) as temporary, _one_thread_per_operation():
        generator = Generator(
            profile.dense,
            categorical,
            rows=rows,
            seed=seed,
            auc=auc,
            positives=positives,
            device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
            drift=drift,
        )
        splits, counts = writer(
            temporary, generator, ranges, threads, progress, tables=tables, seed=seed
        )
        probabilities = generator.label_model.probabilities
        meta = Meta(
            dense=tuple(column.name for column in profile.dense),
            categorical=tables,
            splits={split: splits[split] for split in SPLITS},
            options=options,
            planted={split: best_metrics(counts[split], probabilities) for split in SPLITS},
        )
        meta.write(temporary, meta_file)
    return meta


def write_demo(directory: str | os.PathLike[str]) -> Meta:
    """Write the small data set that ``train.py`` uses by default, unless it exists.

    It has 300,000 rows, 80% for training, and Kaggle's 26 tables with at most 20,000 rows each.
    Several processes may call this at the same time.
    """
    if not (Path(directory) / META_FILE).is_file():
        print(f"making synthetic demo data in {directory} (first use)")
        columns = _profile("kaggle").categorical
        cardinalities = [min(column.cardinality, DEMO_CAP) for column in columns]
        try:
            write(
                directory,
                rows=DEMO_ROWS,
                cardinalities=cardinalities,
                fractions=DEMO_FRACTIONS,
                device="cpu",
            )
        except (ValueError, OSError):
            if not (Path(directory) / META_FILE).is_file():
                raise
    return Meta.read(directory)


def _profile(like: str) -> Profile:
    if like not in profiles():
        raise ValueError(f"there is no profile {like!r}{did_you_mean(like, profiles())}")
    return profiles()[like]


def _columns(profile: Profile, cardinalities: Sequence[int] | None) -> list[Distribution]:
    """The distribution of each categorical column, resized to the cardinalities."""
    if cardinalities is None:
        return list(profile.categorical)
    if not cardinalities:
        raise ValueError("there are no cardinalities, at least one table is needed")

    columns = []
    for number, size in enumerate(cardinalities):
        if not 1 <= size <= MAX_CARDINALITY:
            raise ValueError(
                f"the cardinality of C{number + 1} is {size}, it must be 1 to {MAX_CARDINALITY}"
            )
        columns.append(_large_enough(profile, number, size).resized(size, name=f"C{number + 1}"))
    return columns


def _large_enough(profile: Profile, number: int, size: int) -> Distribution:
    """The distribution of column ``number``, or of the next larger column if it is too small."""
    column = profile.categorical[number % len(profile.categorical)]
    by_size = sorted(profile.categorical, key=lambda column: column.cardinality)
    larger = [each for each in (column, *by_size) if each.cardinality >= size]
    return larger[0] if larger else by_size[-1]


def _check(
    rows: int, fractions: Sequence[float] | None, seed: int, auc: float, positives: float,
    drift: float, device: str | None, threads: int,
) -> None:  # fmt: skip
    """Raise unless all arguments are in their ranges."""
    kind = (device or "cpu").partition(":")[0]
    shares = list(DEMO_FRACTIONS if fractions is None else fractions)
    sums_up = len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6

    # The value of each, whether it is valid, and what it must be.
    rules = {
        "rows": (rows, rows >= 1, "at least 1"),
        "seed": (seed, 0 <= seed < 2**63, "at least 0 and below 2**63"),
        "auc": (auc, 0.5 <= auc < 1, "at least 0.5 and below 1"),
        "positives": (positives, 0 < positives < 1, "between 0 and 1"),
        "drift": (drift, 0 <= drift <= MAX_DRIFT, f"0 to {MAX_DRIFT}"),
        "threads": (threads, threads >= 1, "at least 1"),
        "device": (device, kind in ("cpu", "cuda"), "cpu or cuda"),
        "fractions": (
            shares, sums_up,
            "the shares of train, val and test, which are not negative and add up to 1, such as "
            "0.8 0.1 0.1",
        ),
    }  # fmt: skip

    for name, (value, valid, rule) in rules.items():
        if not valid:
            raise ValueError(f"{name} is {value!r}, it must be {rule}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but there is no CUDA GPU; use cpu")


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Let PyTorch use one thread per operation, as the threads that write use all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
