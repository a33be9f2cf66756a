"""Synthetic Criteo of any size from a seed, with a planted truth.

Columns follow the distributions of real samples (``synthetic_law``), labels are drawn from a known
model (``synthetic_truth``), so the best possible AUC and log loss are known: they stand in
``Meta.planted`` per split. The same arguments give the same bytes, whatever the device and the
number of threads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dlrm.data.schema import META_FILE, SPLITS, Categorical, Meta, Split
from dlrm.data.synthetic_law import Law, Uniforms, hashed, invert, mix, profiles
from dlrm.data.synthetic_truth import BINS, Truth, best_metrics

GROUP_ROWS = 1 << 17  # rows of a Parquet row group, and of a block that is generated at once
PART_GROUPS = 16  # row groups of a file
PILOT_ROWS = 1 << 16
DEMO = {"rows": 300_000, "cap": 20_000, "fractions": (0.8, 0.1, 0.1)}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows: raw integers, before the transformation of the dense columns."""

    labels: Tensor  # [B] uint8
    dense: list[Tensor]  # N times [B] int64
    dense_missing: list[Tensor | None]  # N times [B] bool
    ids: list[Tensor]  # F times [B] int64
    bins: Tensor  # [B] int64, index of the true probability


class Generator:
    """Makes any block of the rows of a data set."""

    def __init__(
        self,
        dense: Sequence[Law],
        categorical: Sequence[Law],
        *,
        rows: int,
        seed: int,
        auc: float,
        positives: float,
        device: torch.device,
    ) -> None:
        self.dense, self.categorical, self.device = tuple(dense), tuple(categorical), device
        laws = self.dense + self.categorical
        groups = sorted({law.together for law in laws if law.missing})
        self.missing_streams = {name: len(laws) + i for i, name in enumerate(groups)}
        self.uniforms = Uniforms(rows, len(laws) + len(groups), seed=seed, device=device)
        self.quantiles = [law.quantiles().to(device) for law in laws]
        self.noise_key = int(hashed(seed, 4, 1))
        self.truth = Truth(dense, categorical, seed=seed, device=device)
        largest = max((law.values + law.lowest for law in dense), default=1)
        logs = np.log(np.arange(1, largest + 2, dtype=np.float64)).astype(np.float32)
        self.logs = torch.from_numpy(logs).to(device)
        # The pilot rows are the first ones: every block is a random sample.
        pilot = self._columns(torch.arange(min(rows, PILOT_ROWS), device=device))
        self.truth.fit(self._score(*pilot), auc=auc, positives=positives)

    def block(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop - 1``."""
        rows = torch.arange(start, stop, device=self.device)
        dense, missing, ids = self._columns(rows)
        bins = self.truth.bins(self._score(dense, missing, ids))
        noise = mix(mix(rows ^ self.noise_key))
        labels = self.truth.labels(bins, noise).to(torch.uint8)
        return Block(labels=labels, dense=dense, dense_missing=missing, ids=ids, bins=bins)

    def transformed(self, block: Block) -> list[Tensor]:
        """The dense columns as log(x + 1), missing and negative as 0; float32 ``[B]`` each."""
        return [self.logs[values] for values in _non_negative(block.dense, block.dense_missing)]

    def _columns(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        digits = self.uniforms.digits(rows)
        absent = {
            name: self.uniforms.draw(stream, digits)
            for name, stream in self.missing_streams.items()
        }
        values, missing = [], []
        for stream, law in enumerate(self.dense + self.categorical):
            value = invert(self.quantiles[stream], self.uniforms.draw(stream, digits))
            mask = absent[law.together] < int(law.missing * 2**48) if law.missing else None
            if stream < len(self.dense):
                value = value + law.lowest
            elif mask is not None:
                place = law.missing_id
                value = torch.where(mask, place, value + (value >= place))
            values.append(value)
            missing.append(mask)
        count = len(self.dense)
        return values[:count], missing[:count], values[count:]

    def _score(
        self, dense: list[Tensor], missing: list[Tensor | None], ids: list[Tensor]
    ) -> Tensor:
        return self.truth.score(_non_negative(dense, missing), ids)


def _non_negative(dense: list[Tensor], missing: list[Tensor | None]) -> list[Tensor]:
    return [
        values.clamp(min=0) if mask is None else values.clamp(min=0).masked_fill(mask, 0)
        for values, mask in zip(dense, missing, strict=True)
    ]


def split_rows(rows: int, fractions: Sequence[float] | None = None) -> dict[str, range]:
    """The rows of each split, in the order train, test, val.

    Without ``fractions`` (of train, val and test) the reference protocol: of seven days six are
    for training, the first half of the last one is the test set and the rest for validation.
    """
    if fractions is None:
        train = rows - rows // 7
        test = (rows // 7 + 1) // 2
    else:
        train, test = round(rows * fractions[0]), round(rows * fractions[2])
        test = min(test, rows - train)
    return {
        "train": range(train),
        "test": range(train, train + test),
        "val": range(train + test, rows),
    }


def write(
    directory: str | os.PathLike[str],
    *,
    rows: int = 300_000,
    like: str = "kaggle",
    cardinalities: Sequence[int] | None = None,
    cap: int | None = None,
    fractions: Sequence[float] | None = None,
    seed: int = 0,
    auc: float = 0.80,
    positives: float = 0.256,
    device: str | None = None,
    threads: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Meta:
    """Write a synthetic data set into ``directory``, whole or not at all."""
    directory = Path(directory)
    profile = profiles()[like]
    sizes = list(cardinalities or [law.cardinality for law in profile.categorical])
    sizes = [min(size, cap) if cap else size for size in sizes]
    categorical = [law.resized(size) for law, size in zip(profile.categorical, sizes, strict=True)]
    generator = Generator(
        profile.dense,
        categorical,
        rows=rows,
        seed=seed,
        auc=auc,
        positives=positives,
        device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
    )
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        splits, counts = _write_parquet(
            temporary, generator, split_rows(rows, fractions), threads, progress
        )
        meta = Meta(
            dense=tuple(law.name for law in profile.dense),
            categorical=tuple(
                Categorical(name=law.name, cardinality=law.cardinality) for law in categorical
            ),
            splits=splits,
            options={
                "source": "synthetic",
                "like": like,
                "rows": rows,
                "seed": seed,
                "dense_transform": "log1p",
            },
            planted={
                name: best_metrics(counts[name], generator.truth.probabilities) for name in SPLITS
            },
        )
        meta.write(temporary)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def write_demo(directory: str | os.PathLike[str]) -> Meta:
    """The small data set that the program trains on by default; one that is there is kept."""
    if (Path(directory) / META_FILE).is_file():
        return Meta.read(directory)
    return write(directory, **DEMO)


def _write_parquet(
    directory: Path,
    generator: Generator,
    splits: dict[str, range],
    threads: int | None,
    progress: Callable[[int], object],
) -> tuple[dict[str, Split], dict[str, np.ndarray]]:
    part = GROUP_ROWS * PART_GROUPS
    jobs = [
        (name, f"{name}-{number:05d}.parquet", range(start, min(start + part, rows.stop)))
        for name, rows in splits.items()
        for number, start in enumerate(range(rows.start, max(rows.stop, rows.start + 1), part))
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # one file per thread keeps all cores busy
    try:
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            done = list(
                pool.map(
                    lambda job: _write_part(directory / job[1], generator, job[2], progress), jobs
                )
            )
    finally:
        torch.set_num_threads(before)
    counts = {
        name: sum(c for job, c in zip(jobs, done, strict=True) if job[0] == name) for name in splits
    }
    return {
        name: Split(
            files=tuple(job[1] for job in jobs if job[0] == name),
            rows=len(splits[name]),
            positives=int(counts[name][1].sum()),
        )
        for name in SPLITS
    }, counts


def _write_part(
    path: Path, generator: Generator, rows: range, progress: Callable[[int], object]
) -> np.ndarray:
    schema = pa.schema(
        [("label", pa.uint8())]
        + [(law.name, pa.float32()) for law in generator.dense]
        + [(law.name, pa.int32()) for law in generator.categorical]
    )
    counts = np.zeros((2, BINS), dtype=np.int64)
    with pq.ParquetWriter(path, schema, compression="lz4", use_dictionary=False) as writer:
        for start in range(rows.start, rows.stop, GROUP_ROWS):
            block = generator.block(start, min(start + GROUP_ROWS, rows.stop))
            columns = [
                block.labels,
                *generator.transformed(block),
                *(ids.to(torch.int32) for ids in block.ids),
            ]
            arrays = [pa.array(column.cpu().numpy()) for column in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            tally = torch.bincount(block.bins + BINS * block.labels.long(), minlength=2 * BINS)
            counts += tally.cpu().numpy().reshape(2, BINS)
            progress(len(block.labels))
    return counts
