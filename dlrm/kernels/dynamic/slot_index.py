"""The tensors of an index from ids of 64 bits to slots, see :mod:`dlrm.kernels.dynamic.index`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dlrm.kernels.dynamic import _find as kernels
from dlrm.kernels.dynamic.hashing import mix
from dlrm.kernels.dynamic.scores import Eviction, Now

LANES, EMPTY = kernels.LANES.value, kernels.EMPTY.value
ROUNDS = 5  # of a step: if many new ids come to a table at once, 1 in 10,000 finds no room at 0.85
NAMES = ("found", "inserted", "evicted", "waiting", "not_placed")
"""Counters of an index: look-ups of ids with a slot; ids that came, and that left; look-ups of ids
that wait for admission, and of ids for which there was no slot."""


class Admission(NamedTuple):
    """Which new ids get a slot."""

    after: int = 1
    """From which occurrence on, counting look-ups."""
    chance: float = 1.0
    """And with which probability in each step."""

    @property
    def limit(self) -> int:
        """The chance as a limit on 32 random bits."""
        return round(self.chance * 2**32)


class SlotIndex(NamedTuple):
    """The ids of the slots of several tables; all tensors are changed in place."""

    ids: Tensor
    """Id of each slot, ``[slots]`` int64; :data:`EMPTY` for none."""
    scores: Tensor
    """``[slots]`` int32; 0 for empty ones, -1 beyond the last slot of a table."""
    columns: Tensor | None
    """Number of the table whose id a slot has, ``[slots]``, of tables that share them; else None.
    """
    salts: Tensor | None
    """And what their ids are combined with, so that those of different tables differ, ``[F]``."""
    first: Tensor
    """First bucket of each table, ``[F]`` int64."""
    buckets: Tensor
    """Number of its buckets, ``[F]`` int64."""
    time: Tensor
    """Number of the step, from 1; the clock; and its ticks for each step, ``[3]`` int64."""
    sketch: Tensor
    """Counts of ids without a slot, ``[cells]`` int32, a power of two."""
    counts: Tensor
    """Of :data:`NAMES`, ``[5]`` int64."""
    eviction: Eviction
    admission: Admission

    @classmethod
    def empty(
        cls,
        slots: Sequence[int],
        eviction: Eviction | None = None,
        admission: Admission | None = None,
        device: torch.device | None = None,
        *,
        sharing: int = 0,
    ) -> Self:
        """An index of tables with so many ``slots`` each.

        Args:
            slots: of each table, 1 or more; they take whole buckets.
            eviction, admission: by default that of each class.
            device: of the tensors; by default that of PyTorch.
            sharing: number of tables that share the slots of a single one; 0: none do.
        """
        admission = admission or Admission()
        buckets = [buckets_for(own) for own in slots]
        total = LANES * sum(buckets)
        cells = 1 << (total.bit_length() - 1) if admission.after > 1 else 2
        sizes = torch.tensor(buckets, device=device)

        # Slots at the end of a bucket that no table has are never free.
        scores = torch.zeros(total, dtype=torch.int32, device=device)
        for end, own in zip(accumulate(buckets), slots, strict=True):
            scores[LANES * end - -own % LANES : LANES * end] = -1

        columns, salts, first = None, None, sizes.cumsum(0) - sizes
        if sharing:
            number = torch.uint8 if sharing <= 256 else torch.int16
            columns = torch.zeros(total, dtype=number, device=device)
            salts = mix(torch.arange(sharing, device=device) + 1)
            first, sizes = first.repeat(sharing), sizes.repeat(sharing)
        return cls(
            ids=torch.full((total,), EMPTY, device=device),
            scores=scores,
            columns=columns,
            salts=salts,
            first=first,
            buckets=sizes,
            time=torch.tensor([0, 0, 1], device=device),
            sketch=torch.zeros(cells, dtype=torch.int32, device=device),
            counts=torch.zeros(len(NAMES), dtype=torch.int64, device=device),
            eviction=eviction or Eviction(),
            admission=admission,
        )

    def keys(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The ids in slots that stand for ids of tables, which broadcast against them."""
        return ids if self.salts is None else ids ^ self.salts[tables]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that a checkpoint keeps; the sizes of the tables give the others."""
        kept = self.ids, self.scores, self.columns, self.time, self.sketch, self.counts
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @property
    def now(self) -> Now:
        """The time of the current step."""
        return Now(self.time[0], self.time[1])


class Placed(NamedTuple):
    """The rows of look-ups, and which of them stand for ids that had no slot before."""

    rows: Tensor
    """Row of each look-up within its table, of the shape of the ids, int64. The first rows of a
    table are the shared ones."""
    missing: Tensor
    """One look-up of each of these ids, int32; what lies beyond ``number`` is undefined. Ids
    that got a slot have rows beyond the shared ones."""
    number: Tensor
    """How many these are, ``[1]`` int32."""


def buckets_for(slots: int) -> int:
    """Number of buckets with at least so many slots."""
    return -(-slots // LANES)


def begin_step(index: SlotIndex) -> None:
    """Advance the step and the clock, and halve a part of the counts of ids without a slot."""
    index.time[0] += 1
    index.time[1] += index.time[2]
    age_sketch(index)


def age_sketch(index: SlotIndex) -> None:
    """Halve a part of the counts of ids without a slot: each once in a half-life."""
    if index.admission.after > 1:
        cells = len(index.sketch)
        part = -(-cells // index.eviction.half_life)
        at = torch.arange(part, device=index.sketch.device) + index.time[0] * part
        at &= cells - 1
        index.sketch[at] = index.sketch[at] >> 1
