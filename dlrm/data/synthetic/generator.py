"""Generate any range of rows of a synthetic data set, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Interval
from torch import Tensor

from dlrm.data.prepare.splitting import split_by_days, split_by_shares
from dlrm.data.synthetic.distributions import (
    UNIFORM_BITS,
    Distribution,
    PermutedUniforms,
    hashed,
    invert,
    mix,
)
from dlrm.data.synthetic.label_model import TIME_POINT, LabelModel
from dlrm.utils.cpus import cpu_count
from dlrm.utils.validation import Whole

DEMO_ROWS, DEMO_FRACTIONS = 300_000, (0.8, 0.1, 0.1)
MAX_DRIFT = 8  # up to this, the sum of the slopes of a row is exact in float32
PILOT_ROWS = 1 << 16
CPU_ROWS = 1 << 14  # rows generated at a time on a CPU: [S, B] fits into its caches


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

    @property
    def generated_on(self) -> torch.device:
        """The device that generates the rows."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

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


@dataclass(frozen=True, kw_only=True)
class GeneratedRows:
    """``B`` consecutive rows as raw values, feature-major."""

    labels: Tensor  # [B] uint8
    dense: Tensor  # [N, B] int64; undefined for missing values
    missing: Tensor  # [N, B] bool
    ids: Tensor  # [F, B] int64
    bins: Tensor  # [B] int64 index of the true probability of label 1


class Generator:
    """Generates any range of rows of a data set, the same on all devices."""

    def __init__(
        self, dense: Sequence[Distribution], categorical: Sequence[Distribution], recipe: Recipe
    ) -> None:
        rows, seed, device = recipe.rows, recipe.seed, recipe.generated_on
        self.recipe = recipe
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
        self.label_model = LabelModel(
            dense, categorical, seed=seed, device=device, drift=recipe.drift
        )

        # Columns are permutations, so the first rows are a random sample of all rows. Their times
        # are spread over the whole data set.
        pilot = torch.arange(min(rows, PILOT_ROWS)).to(device)
        dense_values, missing, ids = self._columns(pilot)
        times = self._times(pilot * (rows // len(pilot)))
        scores = self.label_model.score(_non_negative(dense_values, missing), ids, times)
        self.label_model.fit(scores, auc=recipe.auc, positives=recipe.positives)

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
        span = torch.div(rows << (TIME_POINT + 1), self.recipe.rows, rounding_mode="floor")
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
