"""Rows of small integers: 8 or 4 bits a weight, and a scale for each row.

A packed row is one record: the integers, then the scale in bf16. A look-up reads both together and
an update writes both back; no copy of the rows in floating point exists anywhere. A table may keep
its first rows, those of the most frequent ids, in 8 bits and the others in 4.

An update adds its step in fp32 and rounds the sum stochastically: steps far below the scale count
on average. Each rounding adds noise that grows with the scale. A row that is updated ten thousand
times collects ten thousand roundings, a rare one only a few, so frequent rows need more bits. A new
scale rounds all weights of a row, even those without a step. So a row keeps its scale until its
largest weight no longer fits, or needs less than a third of it.

Reference: Li et al., "Adaptive Low-Precision Training for Embeddings in Click-Through Rate
Prediction", AAAI 2023, arXiv 2212.05735.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlrm.kernels.update.rounding import round_stochastic
from dlrm.kernels.update.rules import Rule, foreach_update

BITS = {"int8": 8, "int4": 4}
"""Bits of a weight by the name of the type."""
CHUNK = 1 << 18  # rows that are packed at a time
SHRINK = 3.0  # a row takes a smaller scale once it needs less than a third of its own
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of the largest weight that a scale may fit


def value_bytes(dim: int, bits: int) -> int:
    """Bytes of the integers of a row, an even number so that scales are aligned."""
    return (dim * bits + 15) // 16 * 2


def record_bytes(dim: int, bits: int) -> int:
    """Bytes of a packed row with its scale."""
    return value_bytes(dim, bits) + 2


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The packed rows of a table ``[V, D]``."""

    data: Tensor
    """The records, one after another, uint8."""
    num_rows: int
    dim: int
    wide: int
    """The number of rows in 8 bits, which come first; the others have 4."""

    @classmethod
    def empty(cls, num_rows: int, dim: int, wide: int, device: Any = None) -> Self:
        """Zeros, on a device or the default one."""
        size = wide * record_bytes(dim, 8) + (num_rows - wide) * record_bytes(dim, 4)
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls(data=data, num_rows=num_rows, dim=dim, wide=wide)

    @property
    def format(self) -> int:
        """Bits of a weight, 8 or 4, or 12 if there are both: kernels are compiled for it."""
        return {self.num_rows: 8, 0: 4}.get(self.wide, 12)

    @property
    def records(self) -> Tensor:
        """The records of rows of one width, ``[V, bytes / 2]`` int16."""
        return self.data.view(torch.int16).view(self.num_rows, -1)

    def of_records(self, records: Tensor) -> Self:
        """Other rows of this width, by their :attr:`records` ``[n, bytes / 2]``."""
        rows, data = len(records), records.reshape(-1).view(torch.uint8)
        return replace(self, data=data, num_rows=rows, wide=rows if self.wide else 0)

    def _parts(self, rows: Tensor) -> Iterator[tuple[int, Tensor, tuple[Any, Tensor]]]:
        """Divide ``rows`` by their width, 8 or 4 bits.

        Yields:
            Of each width that occurs: its bits; its records ``[N, bytes]``; and the rows that have
            it, as their positions in ``rows`` and their numbers among the records.
        """
        if self.format != 12:
            yield self.format, self.data.view(self.num_rows, -1), (slice(None), rows)
            return
        split = self.wide * record_bytes(self.dim, 8)
        for bits, first, data in (8, 0, self.data[:split]), (4, self.wide, self.data[split:]):
            at = ((rows < self.wide) == (bits == 8)).nonzero()[:, 0]
            records = data.view(-1, record_bytes(self.dim, bits))
            yield bits, records, (at, rows[at] - first)

    def read(self, rows: Tensor) -> Tensor:
        """Rows ``[n]`` in fp32, ``[n, D]``."""
        values, scale = self.read_packed(rows)
        return values * scale[:, None]

    def read_packed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The integers of rows, ``[n, D]``, and their scales, ``[n]``, both in fp32."""
        values = self.data.new_empty(len(rows), self.dim, dtype=torch.float32)
        scale = values.new_empty(len(rows))
        for bits, records, (at, index) in self._parts(rows):
            found, split = records[index], value_bytes(self.dim, bits)
            scale[at] = found[:, split:].contiguous().view(torch.bfloat16)[:, 0].float()
            values[at] = _unpack(found[:, :split], self.dim, bits)
        return values, scale

    def write_packed(self, rows: Tensor, values: Tensor, scale: Tensor) -> None:
        """Store integers and scales as :meth:`read_packed` returns them; no row twice."""
        for bits, records, (at, index) in self._parts(rows):
            scales = scale[at, None].bfloat16().view(torch.uint8)
            records[index] = torch.cat([_pack(values[at], bits), scales], 1)

    def highest(self, rows: Tensor) -> Tensor:
        """The largest integer of each row, 127 or 7, ``[n, 1]`` fp32."""
        return torch.where(rows < self.wide, 127.0, 7.0)[:, None]

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Round rows ``[n, D]`` to nearest, each with the scale that gives the least error."""
        highest = self.highest(rows)
        values = values.float()
        largest = values.abs().amax(1, keepdim=True)
        best = scale = torch.full_like(largest, torch.inf)
        for clip in CLIPS:
            tried = _round_up(largest * clip / highest)
            error = (_quantize(values, tried, highest) * tried - values).square().sum(1, True)
            better = error < best  # never for NaN
            best, scale = error.where(better, best), tried.where(better, scale)
        scale = scale.where(largest.isfinite(), torch.nan)
        self.write_packed(rows, _quantize(values, scale, highest), scale[:, 0])

    def update(self, rows: Tensor, values: Tensor, *, stochastic: bool) -> None:
        """Store updated rows ``[n, D]``, rounded stochastically or to nearest; no row twice.

        A row keeps its scale while that fits. Rows with infinities or NaN become NaN.
        """
        highest, values = self.highest(rows), values.float()
        largest = values.abs().amax(1, keepdim=True)  # NaN if one is
        scale = self.read_packed(rows)[1][:, None]
        reach = scale * highest  # exact, which a quotient is not
        fits = (reach >= largest) & (reach <= SHRINK * largest)
        scale = torch.where(fits, scale, _round_up(largest / highest))
        scale = scale.where(largest.isfinite(), torch.nan)
        self.write_packed(rows, _quantize(values, scale, highest, stochastic), scale[:, 0])


def _quantize(values: Tensor, scale: Tensor, highest: Tensor, stochastic: bool = False) -> Tensor:
    """The integers that represent ``values [n, D]`` at scales ``[n, 1]``, in fp32."""
    chance = torch.rand_like(values) if stochastic else 0.5
    steps = (values / scale.where(scale > 0, 1.0) + chance).floor_()
    return steps.nan_to_num_(0.0).clamp_(-highest, highest)


def _round_up(scale: Tensor) -> Tensor:
    """The next bf16 number that is not below, as fp32; below 1e-30 zero."""
    bits = (scale.contiguous().view(torch.int32) + 0xFFFF) & -65536
    return bits.view(torch.float32).where(scale > 1e-30, 0.0)


def _unpack(data: Tensor, dim: int, bits: int) -> Tensor:
    if bits == 4:
        data = torch.stack([data & 15, data >> 4], -1).flatten(1)
    return data[:, :dim].float() - 2.0 ** (bits - 1)


def _pack(values: Tensor, bits: int) -> Tensor:
    data = (values + 2.0 ** (bits - 1)).to(torch.uint8)
    width = value_bytes(values.shape[1], bits) * 8 // bits
    data = torch.nn.functional.pad(data, (0, width - data.shape[1]))
    return data if bits == 8 else data[:, ::2] | data[:, 1::2] << 4


class PackedParameter(nn.Parameter):
    """A table ``[V, D]`` of packed rows.

    To autograd and to optimizers it is a parameter in fp32, but there are no such numbers in
    memory: all its elements are one zero. Only the look-ups of this library read its rows, its
    gradients are sparse, and only ``RowOptimizer`` updates it; in-place operations of PyTorch
    raise.

    Args:
        packed: the rows.
        requires_grad: see ``nn.Parameter``.
    """

    packed: PackedRows

    def __new__(cls, packed: PackedRows, requires_grad: bool = True) -> Self:
        parameter = super().__new__(cls, _stand_in(packed), requires_grad)
        parameter.packed = packed
        return parameter

    def moved(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """This parameter after ``fn`` moved its records; a new one between meta and others."""
        data = fn(self.packed.data)
        if data.dtype != torch.uint8:
            raise ValueError(f"packed rows can't become {data.dtype}")
        new = replace(self.packed, data=data)
        if data.is_meta != self.is_meta:
            return type(self)(new, *self.settings)
        self.packed, self.data = new, _stand_in(new)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            copied = replace(self.packed, data=self._copied_data())
            memo[id(self)] = type(self)(copied, *self.settings)
        found: Self = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self.packed, *self.settings)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Arguments for a copy, besides its rows."""
        return (self.requires_grad,)

    def _copied_data(self) -> Tensor:
        return self.packed.data.clone()


def _stand_in(packed: PackedRows) -> Tensor:
    """A tensor ``[V, D]`` of one element."""
    zero = torch.zeros((), device=packed.data.device)
    return zero.expand(packed.num_rows, packed.dim)


def packed_rows(weight: Tensor) -> PackedRows | None:
    """The packed rows of a parameter; None if its rows are not packed."""
    return weight.packed if isinstance(weight, PackedParameter) else None


def storage(weight: Tensor) -> tuple[Tensor, int, int]:
    """The memory of a table, its number of rows with 8 bits, and its :attr:`PackedRows.format`; the
    weight itself, 0 and 0 if its rows are not packed.
    """
    packed = packed_rows(weight)
    return (weight, 0, 0) if packed is None else (packed.data, packed.wide, packed.format)


def stored_rows(weight: Tensor) -> Tensor:
    """The memory of a table, ``[V, columns]``; of packed rows :attr:`PackedRows.records`."""
    packed = packed_rows(weight)
    return weight if packed is None else packed.records


def stored_values(weight: Tensor, values: Tensor) -> Tensor:
    """Rows ``values [n, D]`` as :func:`stored_rows` holds them, rounded to nearest."""
    packed = packed_rows(weight)
    if packed is None:
        return values.to(weight.dtype)
    rows = packed.of_records(packed.records.new_empty(len(values), packed.records.shape[1]))
    rows.write(torch.arange(len(values), device=values.device), values)
    return rows.records


@torch.no_grad()
def clear_rows(weight: Tensor, rows: Tensor, columns: int | None = None) -> None:
    """Set rows of a table to zero, or their first ``columns``.

    Raises:
        ValueError: they have 4 bits.
    """
    data, _, bits = storage(weight)
    if bits not in (0, 8):
        raise ValueError("rows of int4 can't be kept at zero: set shared, or --tables.dtype int8")
    columns = weight.shape[1] if columns is None else columns
    data.view(len(weight), -1)[:, :columns].index_fill_(0, rows, 128 if bits else 0)


@torch.no_grad()
def chunks_to_write(weight: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Write rows of a table, one chunk at a time.

    Yields:
        The number of the first row of a chunk, and memory ``[n, D]`` to fill, which is stored
        before the next chunk. Rows that are not packed are one chunk, filled in place.
    """
    packed = packed_rows(weight)
    if packed is None:
        yield start, weight[start:stop]
    elif not packed.data.is_meta:
        for first in range(start, stop, CHUNK):
            rows = torch.arange(first, min(first + CHUNK, stop), device=packed.data.device)
            values = torch.zeros(len(rows), packed.dim, device=packed.data.device)
            yield first, values
            packed.write(rows, values)


@torch.no_grad()
def read_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[n]`` of a table, ``[n, D]``, without a gradient; fp32 if they are packed."""
    packed = packed_rows(weight)
    return weight[rows] if packed is None else packed.read(rows)


@torch.no_grad()
def write_rows(weight: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set rows ``[n]`` of a table to ``values [n, D]``, rounded to nearest if they are packed."""
    packed = packed_rows(weight)
    if packed is None:
        weight[rows] = values.to(weight.dtype)
        return
    for part, some in zip(rows.split(CHUNK), values.split(CHUNK), strict=True):
        packed.write(part, some)


@torch.no_grad()
def update_packed_torch(
    rule: Rule,
    packed: PackedRows,
    rows: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    lr: Tensor,
    seed: Tensor | None,
) -> None:
    """Update packed rows, each listed once, in PyTorch.

    Args:
        rule, states, lr, seed: as of :func:`dlrm.kernels.update.sparse.update_rows`.
        packed: the table.
        rows: rows to update, ``[n]`` int64.
        grad: the summed gradient of each, ``[n, D]``.
    """
    value, stochastic = packed.read(rows), seed is not None
    state = [own.view(len(own), -1).index_select(0, rows).to(grad.dtype) for own in states]
    foreach_update(rule, [value], [grad], [state], lr)
    packed.update(rows, value, stochastic=stochastic)
    for own, new in zip(states, state, strict=True):
        if stochastic and own.dtype == torch.bfloat16:
            new = round_stochastic(new)
        own.view(len(own), -1).index_copy_(0, rows, new.to(own.dtype))
