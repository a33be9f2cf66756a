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
from pathlib import Path
from typing import Any

import torch

from dlrm.data.schema import META_FILE, SPLITS, Categorical, Meta
from dlrm.data.synthetic.distributions import Distribution, Profile, profiles
from dlrm.data.synthetic.generator import DEMO_FRACTIONS, DEMO_ROWS, Generator, Recipe
from dlrm.data.synthetic.label_model import best_metrics
from dlrm.data.synthetic.multi_hot import with_bag_sizes
from dlrm.data.synthetic.writers import Job, Progress, Writer, write_parquet
from dlrm.utils.atomic import atomic_directory
from dlrm.utils.messages import did_you_mean
from dlrm.utils.validation import validate

DEMO_CAP = 20_000
MAX_CARDINALITY = 1 << 27  # the limit of the fixed-point numbers in the quantile tables


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
        recipe: options of the data, those of :class:`~dlrm.data.synthetic.generator.Recipe`.

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
        generator = Generator(profile.dense, categorical, made)
        splits, counts = writer(temporary, Job(generator, tables, progress))

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
