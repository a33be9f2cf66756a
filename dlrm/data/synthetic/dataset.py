"""Synthetic Criteo of any size from a seed, with a planted truth.

The columns follow distributions fitted to real samples (``distributions``) and the labels are drawn
from a known model (``label_model``), so that the best possible AUC and log loss are known:
``Meta.planted`` has them per split. The same arguments give the same bytes, whatever the device
and the number of threads.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch

from dlrm.data.schema import META_FILE, SPLITS, Categorical, Meta
from dlrm.data.synthetic.distributions import Distribution, Profile, profiles
from dlrm.data.synthetic.generator import Generator
from dlrm.data.synthetic.label_model import best_metrics
from dlrm.data.synthetic.writers import write_parquet, write_tsv
from dlrm.utils.atomic import disk_full_names
from dlrm.utils.device import cpu_count
from dlrm.utils.messages import did_you_mean

DEMO_ROWS, DEMO_CAP, DEMO_FRACTIONS = 300_000, 20_000, (0.8, 0.1, 0.1)
MAX_CARDINALITY = 1 << 27  # what the fixed point of the quantile tables holds
TSV_META_FILE = "synthetic.json"


def write(
    directory: str | os.PathLike[str],
    *,
    rows: int = DEMO_ROWS,
    like: str = "kaggle",
    cardinalities: Sequence[int] | None = None,
    fractions: Sequence[float] | None = None,
    seed: int = 0,
    auc: float = 0.80,
    positives: float = 0.256,
    format: Literal["parquet", "tsv"] = "parquet",
    device: str | None = None,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Meta:
    """Write a synthetic data set into ``directory``, whole or not at all.

    Parquet comes as from ``prepare_criteo`` with the transform log(x + 1): ids in order of falling
    frequency, the row of "missing" at its rank among them. TSV is one ``train.txt`` with the splits
    in the order of ``split_rows``, and the meta data beside it in ``synthetic.json``.

    Args:
        directory: made here; must not exist or be empty.
        rows: rows of all splits together.
        like: profile whose distributions the columns follow, ``kaggle`` or ``terabyte``.
        cardinalities: rows of each table; the profile's by default. A smaller table keeps the most
            frequent values. TSV needs 26.
        fractions: of train, val and test; by default the reference protocol, see ``split_rows``.
        seed: everything random follows from it.
        auc: expected AUC of the planted truth, the best that a model can reach.
        positives: expected share of label 1.
        format: ``parquet`` or ``tsv``.
        device: where the rows are made, ``cpu`` or ``cuda``; a GPU if there is one by default.
        threads: files (blocks of TSV) written at a time; the cores at hand by default.
        progress: called with a number of new rows, from several threads.

    Returns:
        The meta data, with ``planted`` holding the metrics of the truth per split.

    Raises:
        ValueError: an argument is out of its range, or ``directory`` is taken.
    """
    options = {
        "like": like,
        "rows": rows,
        "fractions": fractions,
        "seed": seed,
        "auc": auc,
        "positives": positives,
        "dense_transform": "log1p",
    }
    profile = _profile(like)
    _check(rows=rows, fractions=fractions, seed=seed, auc=auc, positives=positives, format=format)
    categorical = _laws(profile, cardinalities, format)
    threads = cpu_count() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads is {threads}, it must be at least 1")
    with _made_whole(Path(directory)) as temporary, _one_thread_per_operation():
        generator = Generator(
            profile.dense,
            categorical,
            rows=rows,
            seed=seed,
            auc=auc,
            positives=positives,
            device=_device(device),
        )
        work = (temporary, generator, split_rows(rows, fractions), threads, progress)
        if format == "parquet":
            splits, counts = write_parquet(*work)
        else:
            splits, counts = write_tsv(*work, seed=seed)
        probabilities = generator.truth.probabilities
        meta = Meta(
            dense=tuple(law.name for law in profile.dense),
            categorical=tuple(
                Categorical(name=law.name, cardinality=law.cardinality) for law in categorical
            ),
            splits={split: splits[split] for split in SPLITS},
            options={"source": "synthetic", **options},
            planted={split: best_metrics(counts[split], probabilities) for split in SPLITS},
        )
        if format == "parquet":
            meta.write(temporary)
        else:
            (temporary / TSV_META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n")
    return meta


def write_demo(directory: str | os.PathLike[str]) -> Meta:
    """The small data set that the program trains on by default; one that is there is kept.

    300,000 rows, 80% for training; Kaggle's 26 tables with at most 20,000 rows each. Several
    processes may ask for it at once.
    """
    if not (Path(directory) / META_FILE).is_file():
        print(f"making synthetic demo data in {directory} (first use)")
        cardinalities = [min(law.cardinality, DEMO_CAP) for law in _profile("kaggle").categorical]
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


def split_rows(rows: int, fractions: Sequence[float] | None = None) -> dict[str, range]:
    """The rows of each split, as ``prepare_criteo`` would split a raw file of them.

    With ``fractions``: train, then val, then test. Without: the reference protocol, where of seven
    days six are for training, the first half of the last one is test and the rest validation.
    """
    if fractions is None:
        day = rows // 7
        test = (day + 1) // 2
        lengths = {"train": rows - day, "test": test, "val": day - test}
    else:
        shares = [Fraction(str(share)) for share in fractions[:2]]  # exactly as written
        train, end = int(shares[0] * rows), int(sum(shares) * rows)
        lengths = {"train": train, "val": end - train, "test": rows - end}
    splits, start = {}, 0
    for name, length in lengths.items():
        splits[name] = range(start, start + length)
        start += length
    return splits


def _profile(like: str) -> Profile:
    if like not in profiles():
        raise ValueError(f"no profile is called {like!r}{did_you_mean(like, profiles())}")
    return profiles()[like]


def _laws(profile: Profile, cardinalities: Sequence[int] | None, format: str) -> list[Distribution]:
    """The law of each column, resized to the cardinalities wanted."""
    if cardinalities is None:
        return list(profile.categorical)
    if format == "tsv" and len(cardinalities) != len(profile.categorical):
        raise ValueError(
            f"{len(cardinalities)} cardinalities are given, a Criteo TSV file has "
            f"{len(profile.categorical)} columns C1..C26; write Parquet for another number"
        )
    if not cardinalities:
        raise ValueError("no cardinalities are given, at least one table is needed")
    laws = []
    for number, size in enumerate(cardinalities):
        if not 1 <= size <= MAX_CARDINALITY:
            raise ValueError(
                f"the cardinality of C{number + 1} is {size}, it must be 1 to {MAX_CARDINALITY}"
            )
        laws.append(_law(profile, number, size).resized(size, name=f"C{number + 1}"))
    return laws


def _law(profile: Profile, number: int, size: int) -> Distribution:
    """The column's own law if it reaches that far, else that of the next larger column."""
    own = profile.categorical[number % len(profile.categorical)]
    by_size = sorted(profile.categorical, key=lambda law: law.cardinality)
    larger = [law for law in (own, *by_size) if law.cardinality >= size]
    return larger[0] if larger else by_size[-1]


def _check(
    *,
    rows: int,
    fractions: Sequence[float] | None,
    seed: int,
    auc: float,
    positives: float,
    format: str,
) -> None:
    if rows < 1:
        raise ValueError(f"rows is {rows}, it must be at least 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}, it must not be negative, and below 2**63")
    if format not in ("parquet", "tsv"):
        raise ValueError(f"the format is {format!r}, it must be parquet or tsv")
    if not 0.5 <= auc < 1:
        raise ValueError(f"auc is {auc}, it must be at least 0.5 and below 1")
    if not 0 < positives < 1:
        raise ValueError(f"positives is {positives}, it must lie between 0 and 1")
    if fractions is not None and (
        len(fractions) != 3 or min(fractions) < 0 or not abs(sum(fractions) - 1) <= 1e-6
    ):
        raise ValueError(
            f"fractions is {list(fractions)}, it must be three numbers of train, val and test, "
            "none negative, that add to 1, such as 0.8 0.1 0.1"
        )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"the device is {name!r}, it must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device is 'cuda', but no CUDA GPU is at hand; use cpu")
    return torch.device(name)


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """One thread per torch operation: the blocks made at the same time keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _made_whole(directory: Path) -> Iterator[Path]:
    """A temporary directory that takes the name ``directory`` if nothing goes wrong."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists already; choose another output or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".synthetic-", dir=directory.parent) as outer:
        inner = Path(outer) / "data"
        inner.mkdir()
        with disk_full_names(directory):
            yield inner
            inner.replace(directory)
