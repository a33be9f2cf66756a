"""Synthetic Criteo data of any size, with labels from a known model.

The columns follow distributions fitted to real samples (``distributions``). The labels are drawn
from a known model (``label_model``), so the best possible AUC and log loss are known:
``Meta.planted`` has them for each split. The same arguments give the same bytes on any device and
with any number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Interval

from dlrm.data.prepare.splitting import split_by_days, split_by_shares
from dlrm.data.schema import META_FILE, SPLITS, Categorical, Meta
from dlrm.data.synthetic.distributions import Distribution, Profile, profiles
from dlrm.data.synthetic.generator import Generator
from dlrm.data.synthetic.label_model import best_metrics
from dlrm.data.synthetic.multi_hot import with_bag_sizes
from dlrm.data.synthetic.writers import Job, Progress, Writer, write_parquet
from dlrm.utils.atomic import atomic_directory
from dlrm.utils.cpus import cpu_count
from dlrm.utils.messages import did_you_mean
from dlrm.utils.validation import Whole, validate

DEMO_ROWS, DEMO_CAP, DEMO_FRACTIONS = 300_000, 20_000, (0.8, 0.1, 0.1)
MAX_CARDINALITY = 1 << 27  # the limit of the fixed-point numbers in the quantile tables
MAX_DRIFT = 8  # up to this, the sum of the slopes of a row is exact in float32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of a synthetic data set. The same recipe gives the same bytes.

    Raises:
        ValueError: an option is out of range.
    """

    rows: Annotated[Whole, Ge(1)] = DEMO_ROWS
    """Of all splits together."""
    like: str = "kaggle"
    """Profile of the distributions of the columns, ``kaggle`` or ``terabyte``."""
    cardinalities: Sequence[int] | None = None
    """Rows of each table; by default those of the profile. A smaller table keeps the most frequent
    values."""
    bag_sizes: Sequence[int] | None = None
    """Number of ids of each column in a row: one on which the label depends, and others, see
    :mod:`~dlrm.data.synthetic.multi_hot`. By default all columns are one-hot."""
    fractions: Sequence[float] | None = None
    """Shares of train, val and test; by default the reference protocol, see
    :func:`~dlrm.data.prepare.splitting.split_by_days`."""
    seed: Annotated[Whole, Interval(ge=0, lt=2**63)] = 0
    """Of everything random."""
    auc: Annotated[float, Interval(ge=0.5, lt=1)] = 0.80
    """Expected AUC of the label model, the best that any model can reach."""
    positives: Annotated[float, Interval(gt=0, lt=1)] = 0.256
    """Expected share of label 1."""
    drift: Annotated[float, Interval(ge=0, le=MAX_DRIFT)] = 0.0
    """How much the effects of ids change from the first row to the last. It is the standard
    deviation of the change to either side of the middle, divided by that of the effects."""
    device: str | None = None
    """Generates the rows, ``cpu`` or ``cuda``; by default a GPU if available."""
    threads: Annotated[Whole, Ge(1)] = field(default_factory=cpu_count)
    """Files written at a time; by default one per core."""

    def __post_init__(self) -> None:
        kind = (self.device or "cpu").partition(":")[0]
        shares = list(DEMO_FRACTIONS if self.fractions is None else self.fractions)
        if not (len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
            raise ValueError(
                f"fractions is {self.fractions!r}, it must be the shares of train, val and test, "
                "which are not negative and add up to 1, such as 0.8 0.1 0.1"
            )
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}, it must be cpu or cuda")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but there is no CUDA GPU; use cpu")

    def splits(self) -> dict[str, range]:
        """The rows of each split."""
        if self.fractions is None:
            return split_by_days([self.rows])
        shares = (Fraction(str(share)) for share in self.fractions[:2])  # exactly as written
        return split_by_shares(self.rows, *shares)

    def options(self) -> dict[str, Any]:
        """The options, as the meta data keeps them."""
        kept = ("like", "rows", "fractions", "seed", "auc", "positives")
        options = {"source": "synthetic", **{name: getattr(self, name) for name in kept}}
        options |= {"dense_transform": "log1p"}
        options |= {"drift": self.drift} if self.drift else {}
        return options | ({"bag_sizes": list(self.bag_sizes)} if self.bag_sizes else {})


def write(
    directory: str | os.PathLike[str],
    *,
    progress: Progress = lambda rows: None,
    writer: Writer = write_parquet,
    meta_file: str = META_FILE,
    **recipe: Any,
) -> Meta:
    """Write a synthetic data set into ``directory``, which may exist if it is empty; on an error,
    nothing is left behind.

    Parquet files are like those of ``prepare_criteo`` with the transform log(x + 1): ids are in
    order of falling frequency, and "missing" has its rank among them.

    Args:
        progress: called with the number of rows just written, by several threads.
        writer: writes the rows in another format.
        recipe: options of the data, those of :class:`Recipe`.

    Returns:
        The meta data, with the metrics of the label model on each split in ``planted``.

    Raises:
        ValueError: an option is out of range, or ``directory`` is not empty.
    """
    # The columns.
    made = validate(Recipe, recipe)
    profile = _profile(made.like)
    categorical = _columns(profile, made.cardinalities)
    tables = tuple(Categorical(name=c.name, cardinality=c.cardinality) for c in categorical)
    if made.bag_sizes:
        tables = with_bag_sizes(tables, made.bag_sizes)

    with atomic_directory(Path(directory)) as temporary, _one_thread_per_operation():
        generator = Generator(
            profile.dense,
            categorical,
            rows=made.rows,
            seed=made.seed,
            auc=made.auc,
            positives=made.positives,
            device=torch.device(made.device or ("cuda" if torch.cuda.is_available() else "cpu")),
            drift=made.drift,
        )

        job = Job(
            generator=generator,
            splits=made.splits(),
            tables=tables,
            seed=made.seed,
            threads=made.threads,
            progress=progress,
        )
        splits, counts = writer(temporary, job)

        # How good the true probabilities are on the labels that were drawn.
        probabilities = generator.label_model.probabilities
        meta = Meta(
            dense=tuple(column.name for column in profile.dense),
            categorical=tables,
            splits={split: splits[split] for split in SPLITS},
            options=made.options(),
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


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Let PyTorch use one thread per operation, as the threads that write use all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
