"""Any block of rows of a synthetic data set, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm.data.synthetic_law import UNIFORM_BITS, Law, Uniforms, hashed, invert, mix
from dlrm.data.synthetic_truth import Truth

PILOT_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Block:
    """``B`` consecutive rows as raw values, a tensor per column."""

    labels: Tensor  # [B] uint8
    dense: list[Tensor]  # N times [B] int64
    dense_missing: list[Tensor | None]  # N times [B] bool, None where a column is never missing
    ids: list[Tensor]  # F times [B] int64
    bins: Tensor  # [B] int64, index of the true probability of label 1


class Generator:
    """Makes any block of the rows of a data set.

    Args:
        dense: laws of the dense columns.
        categorical: laws of the categorical columns.
        rows: rows of the whole data set.
        seed: everything follows from it and the other arguments but ``device``.
        auc: expected AUC of the planted truth.
        positives: expected share of label 1.
        device: where the blocks are made.
    """

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
        together = sorted({law.together for law in laws if law.missing})
        self.missing_streams = {name: len(laws) + i for i, name in enumerate(together)}
        self.uniforms = Uniforms(rows, len(laws) + len(together), seed=seed, device=device)
        self.quantiles = [law.quantiles().to(device) for law in laws]
        self.noise_key = int(hashed(seed, 4, 1))
        largest = max((law.lowest + law.values for law in dense), default=1)
        logs = np.log(np.arange(1, largest + 1, dtype=np.float64)).astype(np.float32)
        self.logs = torch.from_numpy(logs).to(device)
        self.truth = Truth(dense, categorical, seed=seed, device=device)
        # The values of the first rows are a random sample of all: they come by a permutation.
        pilot = self._columns(torch.arange(min(rows, PILOT_ROWS), device=device))
        self.truth.fit(self._score(*pilot), auc=auc, positives=positives)

    def block(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop - 1``."""
        rows = torch.arange(start, stop, device=self.device)
        dense, missing, ids = self._columns(rows)
        bins = self.truth.bins(self._score(dense, missing, ids))
        labels = self.truth.labels(bins, mix(mix(rows ^ self.noise_key)))
        return Block(labels=labels, dense=dense, dense_missing=missing, ids=ids, bins=bins)

    def transformed(self, block: Block) -> list[Tensor]:
        """The dense columns as log(x + 1), missing and negative as 0; float32 ``[B]`` each."""
        values = _non_negative(block.dense, block.dense_missing)
        return [self.logs.index_select(0, column) for column in values]

    def _columns(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
        digits = self.uniforms.digits(rows)
        absent = {
            name: self.uniforms.draw(stream, digits)
            for name, stream in self.missing_streams.items()
        }
        values: list[Tensor] = []
        missing: list[Tensor | None] = []
        for stream, law in enumerate(self.dense + self.categorical):
            jitter = law.smallest_share * self.uniforms.rows < 1
            uniform = self.uniforms.draw(stream, digits, jitter=jitter)
            value = invert(self.quantiles[stream], uniform)
            mask = None
            if law.missing:
                mask = absent[law.together] < int(law.missing * (1 << UNIFORM_BITS))
            if stream < len(self.dense):
                value += law.lowest
            elif mask is not None:
                value += value >= law.missing_rank
                value.masked_fill_(mask, law.missing_rank)
            values.append(value)
            missing.append(mask)
        count = len(self.dense)
        return values[:count], missing[:count], values[count:]

    def _score(
        self, dense: list[Tensor], missing: list[Tensor | None], ids: list[Tensor]
    ) -> Tensor:
        return self.truth.score(_non_negative(dense, missing), ids)


def _non_negative(dense: list[Tensor], missing: list[Tensor | None]) -> list[Tensor]:
    """Missing and negative values as 0, as the preparation of real data has them."""
    columns = [values.clamp(min=0) for values in dense]
    for column, mask in zip(columns, missing, strict=True):
        if mask is not None:
            column.masked_fill_(mask, 0)
    return columns
