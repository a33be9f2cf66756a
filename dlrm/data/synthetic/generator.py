"""Generate any range of rows of a synthetic data set, on any device."""

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
from dlrm.data.synthetic.label_model import TIME_POINT, LabelModel

PILOT_ROWS = 1 << 16
CPU_ROWS = 1 << 14  # rows generated at a time on a CPU: [S, B] fits into its caches


@dataclass(frozen=True, kw_only=True)
class GeneratedRows:
    """``B`` consecutive rows as raw values, feature-major."""

    labels: Tensor  # [B] uint8
    dense: Tensor  # [N, B] int64; undefined for missing values
    missing: Tensor  # [N, B] bool
    ids: Tensor  # [F, B] int64
    bins: Tensor  # [B] int64 index of the true probability of label 1


class Generator:
    """Generates any range of ``rows`` of a data set, which depend on all arguments except
    ``device``; see :class:`~dlrm.data.synthetic.dataset.Recipe` for these."""

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
        drift: float = 0.0,
    ) -> None:
        self.row_count = rows
        self.dense = tuple(dense)
        self.categorical = tuple(categorical)
        self.device = device

        # A stream of uniform numbers for each column, and one for each group of columns, which
        # decides where they are missing.
        columns = self.dense + self.categorical
        groups = sorted({column.missing_group for column in columns if column.missing})
        streams = [
            len(columns) + groups.index(column.missing_group) if column.missing else 0
            for column in columns
        ]
        jitter = [column.smallest_share * rows < 1 for column in columns]
        self.permuted_uniforms = PermutedUniforms(
            rows, jitter=jitter + [False] * len(groups), seed=seed, device=device
        )

        def per_column(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=device)[:, None]

        self.missing_stream = torch.tensor(streams, device=device)
        self.missing_below = per_column(
            int(column.missing * (1 << UNIFORM_BITS)) for column in columns
        )
        self.missing_rank = per_column(column.missing_rank for column in categorical)
        self.has_missing = per_column(column.missing > 0 for column in categorical)
        self.lowest = per_column(column.lowest for column in dense)
        self.quantiles = torch.stack([column.quantiles() for column in columns]).to(device)

        self.noise_key = int(hashed(seed, 4, 1))
        largest = max(column.lowest + column.values for column in dense)
        logs = np.log(np.arange(1, largest + 1, dtype=np.float64)).astype(np.float32)
        self.logs = torch.from_numpy(logs).to(device)
        self.label_model = LabelModel(dense, categorical, seed=seed, device=device, drift=drift)

        # Columns are permutations, so the first rows are a random sample of all rows. Their times
        # are spread over the whole data set.
        pilot = torch.arange(min(rows, PILOT_ROWS)).to(device)
        dense_values, missing, ids = self._columns(pilot)
        times = self._times(pilot * (rows // len(pilot)))
        scores = self.label_model.score(_non_negative(dense_values, missing), ids, times)
        self.label_model.fit(scores, auc=auc, positives=positives)

    def rows(self, start: int, stop: int) -> GeneratedRows:
        """Rows ``start`` to ``stop - 1``."""
        size = CPU_ROWS if self.device.type == "cpu" else stop - start
        parts = [self._rows(first, min(first + size, stop)) for first in range(start, stop, size)]
        return GeneratedRows(
            **{
                field.name: torch.cat([getattr(part, field.name) for part in parts], dim=-1)
                for field in fields(GeneratedRows)
            }
        )

    def transformed(self, rows: GeneratedRows) -> Tensor:
        """The dense columns as log(x + 1), 0 for missing and negative; float32 ``[N, B]``."""
        values = _non_negative(rows.dense, rows.missing)
        return self.logs.index_select(0, values.view(-1)).view_as(values)

    def _rows(self, start: int, stop: int) -> GeneratedRows:
        rows = torch.arange(start, stop, device=self.device)
        dense, missing, ids = self._columns(rows)
        scores = self.label_model.score(_non_negative(dense, missing), ids, self._times(rows))
        bins = self.label_model.bins(scores)
        labels = self.label_model.labels(bins, mix(mix(rows ^ self.noise_key)))
        return GeneratedRows(labels=labels, dense=dense, missing=missing, ids=ids, bins=bins)

    def _times(self, rows: Tensor) -> Tensor:
        """The time of each row, from -1 for the first to 1 for the last, in fixed point."""
        span = torch.div(rows << (TIME_POINT + 1), self.row_count, rounding_mode="floor")
        return span - (1 << TIME_POINT)

    def _columns(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dense values ``[N, B]``, a mask of the missing ones ``[N, B]``, and ids ``[F, B]``."""
        uniform = self.permuted_uniforms.draw(rows)  # [S, B]
        missing = uniform.index_select(0, self.missing_stream) < self.missing_below
        values = invert(self.quantiles, uniform[: len(self.quantiles)])

        count = len(self.dense)
        dense, ids = values[:count].add_(self.lowest), values[count:]
        ids += (ids >= self.missing_rank) & self.has_missing  # "missing" has its own id
        ids += (self.missing_rank - ids).mul_(missing[count:])
        return dense, missing[:count], ids


def _non_negative(dense: Tensor, missing: Tensor) -> Tensor:
    """The values, 0 for missing and negative ones, as in the preprocessing of real data."""
    return dense.clamp(min=0).mul_(~missing)
