"""Any block of rows of a synthetic data set, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dlrm.data.synthetic.distributions import (
    UNIFORM_BITS,
    Distribution,
    PermutedUniforms,
    hashed,
    invert,
    mix,
)
from dlrm.data.synthetic.label_model import LabelModel

PILOT_ROWS = 1 << 16
CPU_ROWS = 1 << 14  # rows made at once on a CPU, so that [S, B] stays in its caches


@dataclass(frozen=True, kw_only=True)
class GeneratedRows:
    """``B`` consecutive rows as raw values, feature-major."""

    labels: Tensor  # [B] uint8
    dense: Tensor  # [N, B] int64, whatever where the value is missing
    missing: Tensor  # [N, B] bool
    ids: Tensor  # [F, B] int64
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
        dense: Sequence[Distribution],
        categorical: Sequence[Distribution],
        *,
        rows: int,
        seed: int,
        auc: float,
        positives: float,
        device: torch.device,
    ) -> None:
        self.dense, self.categorical, self.device = tuple(dense), tuple(categorical), device
        laws = self.dense + self.categorical
        words = sorted({law.together for law in laws if law.missing})
        jitter = [law.smallest_share * rows < 1 for law in laws]
        self.uniforms = PermutedUniforms(
            rows, jitter=jitter + [False] * len(words), seed=seed, device=device
        )

        def column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device)[:, None]

        self.missing_below = column(int(law.missing * (1 << UNIFORM_BITS)) for law in laws)
        self.missing_stream = torch.tensor(
            [len(laws) + words.index(law.together) if law.missing else 0 for law in laws],
            device=device,
        )
        self.missing_rank = column(law.missing_rank for law in categorical)
        self.has_missing = column(law.missing > 0 for law in categorical)
        self.lowest = column(law.lowest for law in dense)
        self.quantiles = torch.stack([law.quantiles() for law in laws]).to(device)
        self.noise_key = int(hashed(seed, 4, 1))
        largest = max(law.lowest + law.values for law in dense)
        logs = np.log(np.arange(1, largest + 1, dtype=np.float64)).astype(np.float32)
        self.logs = torch.from_numpy(logs).to(device)
        self.truth = LabelModel(dense, categorical, seed=seed, device=device)
        # The values of the first rows are a random sample of all: they come by a permutation.
        dense_values, missing, ids = self._columns(torch.arange(min(rows, PILOT_ROWS)).to(device))
        scores = self.truth.score(_non_negative(dense_values, missing), ids)
        self.truth.fit(scores, auc=auc, positives=positives)

    def block(self, start: int, stop: int) -> GeneratedRows:
        """Rows ``start`` to ``stop - 1``."""
        size = CPU_ROWS if self.device.type == "cpu" else stop - start
        parts = [self._block(first, min(first + size, stop)) for first in range(start, stop, size)]
        return GeneratedRows(
            **{
                field.name: torch.cat([getattr(part, field.name) for part in parts], dim=-1)
                for field in fields(GeneratedRows)
            }
        )

    def transformed(self, block: GeneratedRows) -> Tensor:
        """The dense columns as log(x + 1), missing and negative as 0; float32 ``[N, B]``."""
        values = _non_negative(block.dense, block.missing)
        return self.logs.index_select(0, values.view(-1)).view_as(values)

    def _block(self, start: int, stop: int) -> GeneratedRows:
        rows = torch.arange(start, stop, device=self.device)
        dense, missing, ids = self._columns(rows)
        bins = self.truth.bins(self.truth.score(_non_negative(dense, missing), ids))
        labels = self.truth.labels(bins, mix(mix(rows ^ self.noise_key)))
        return GeneratedRows(labels=labels, dense=dense, missing=missing, ids=ids, bins=bins)

    def _columns(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dense values [N, B], which of them are missing [N, B], and ids [F, B]."""
        uniform = self.uniforms.draw(rows)  # [S, B]
        missing = uniform.index_select(0, self.missing_stream) < self.missing_below
        values = invert(self.quantiles, uniform[: len(self.quantiles)])
        count = len(self.dense)
        dense, ids = values[:count].add_(self.lowest), values[count:]
        ids += (ids >= self.missing_rank) & self.has_missing  # "missing" has an id of its own
        ids += (self.missing_rank - ids).mul_(missing[count:])
        return dense, missing[:count], ids


def _non_negative(dense: Tensor, missing: Tensor) -> Tensor:
    """Missing and negative values as 0, as the preparation of real data has them."""
    return dense.clamp(min=0).mul_(~missing)
