"""Where the rows of a look-up are, and the device function that loads them.

Rows may be one tensor, packed (:mod:`dlrm.kernels.update.packed`), short ones of which several are
stored as one, in pages
(:mod:`dlrm.kernels.lookup.paged`), or in host memory with a cache on the GPU
(:mod:`dlrm.kernels.offload.row_cache`). A kernel is compiled for the :class:`SourceKind`, and so
contains the code of that kind alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.update._packed import load_packed
from dlrm.kernels.update.cached_slots import place_of
from dlrm.kernels.update.packed import read_rows, storage
from dlrm.kernels.update.row_sort import RowSorter


class KernelSource(NamedTuple):
    """The arguments of a kernel that say where rows are; those of other kinds are None."""

    data: Tensor
    """The rows; of packed ones the records; of paged ones any tensor of their type."""
    num_wide: int | None = None
    """Packed: how many rows have 8 bits, if both widths occur."""
    slots: Tensor | None = None
    """Of rows in host memory: the slot of each in a cache, ``[V]``; negative for none."""
    to_cache: int | None = None
    """The row of ``data`` at which the cache would begin: see ``CachedSlots``."""
    addresses: Tensor | None = None
    """Paged: the address of each page, ``[replicas, pages]`` int64."""
    pages: int | None = None
    """Paged: how many pages there are."""
    group: Tensor | None = None
    """Paged: the group of blocks that holds each page, ``[pages]``."""
    first: Tensor | None = None
    """Paged: the row of these blocks at which each page begins, ``[pages]``."""
    scale: float | None = None
    """Short: factor on the weights of a row."""


class SourceKind(NamedTuple):
    """How rows are stored: kernels are compiled for it."""

    name: Literal["plain", "packed", "paged"]
    bits: int = 0
    """Packed: bits of a weight, 8 or 4, or 12 if there are both."""
    page_size: int = 0
    replicas: int = 0
    groups: int = 0
    alignment: int = 0
    """Paged: alignment of every row in bytes."""
    short: int = 0
    """Short: weights of a row, of which ``per_row`` are stored as one."""
    per_row: int = 1


@triton.jit
def current_place(source, row, live):
    """Where the current values of rows are: in a cache, if they have a slot."""
    if source.slots is not None:
        row = place_of(row, tl.load(source.slots + row, mask=live, other=-1), source.to_cache)
    return row


@triton.jit
def load_rows(source, row, lookup, live, column, D: tl.constexpr, KIND: tl.constexpr):
    """Load rows ``[K]`` where ``live [K]``, as ``[K, B]``; packed ones in fp32.

    ``lookup [K]`` numbers the look-ups, which replicas of a page share.
    """
    mask = live[:, None] & (column < D)
    STORED: tl.constexpr = KIND.short * KIND.per_row if KIND.short > 0 else D
    if KIND.short > 0:  # a part of a stored row
        mask = mask & (column < KIND.short)
        column = column + (row % KIND.per_row)[:, None] * KIND.short
        row = row // KIND.per_row
    row = current_place(source, row, live)

    if KIND.name == "packed":
        steps, scale = load_packed(
            source.data, row, source.num_wide, live, column, STORED, KIND.bits
        )
        value = steps * scale[:, None]

    elif KIND.name == "paged":  # by the address of the page
        page = row // KIND.page_size
        line = source.addresses + (lookup % KIND.replicas).to(tl.int64) * source.pages
        begin = tl.load(line + page, mask=live, other=0)
        size: tl.constexpr = source.data.dtype.element_ty.primitive_bitwidth // 8
        within = (row - page * KIND.page_size) * (D * size)
        ALIGN: tl.constexpr = KIND.alignment
        at = tl.multiple_of((begin + within).to(source.data.dtype), ALIGN)
        value = tl.load(at[:, None] + column, mask=mask, other=0.0)

    else:
        value = tl.load(source.data + row[:, None] * STORED + column, mask=mask, other=0.0)
    if KIND.short > 0:
        value = tl.where(mask, value.to(tl.float32) * source.scale, 0.0)
    return value


@triton.jit
def store_flat(flat, source, row, lookup, inside, n, KIND: tl.constexpr):
    """Store the row of each look-up in its weight: ``flat [n]``.

    Pages may be in several weights. ``flat [groups, n]`` then gets the row in that of its own
    group, and -1 in the others. For short rows, ``flat [2, n]`` gets the stored row and the place
    in it.
    """
    if KIND.name == "paged":
        page = row // KIND.page_size
        local = tl.load(source.first + page, mask=inside, other=0) + row - page * KIND.page_size
        own = tl.load(source.group + page, mask=inside, other=-1)
        GROUPS: tl.constexpr = KIND.groups
        for index in tl.static_range(GROUPS):
            to = flat + tl.full((), index, tl.int64) * n + lookup
            tl.store(to, tl.where(own == index, local, -1), mask=inside)
    elif KIND.short > 0:
        tl.store(flat + lookup, row // KIND.per_row, mask=inside)
        tl.store(flat + n + lookup, row % KIND.per_row, mask=inside)
    else:
        tl.store(flat + lookup, row, mask=inside)


class RowSource(ABC):
    """Where the rows of a look-up are, with a gradient for each of its weights."""

    tile: ClassVar[int | None] = None
    """Elements of a tile of a look-up; None for the usual number."""
    renumbers: ClassVar[bool] = False
    """Whether a row has another number in its weight than in the table."""
    updates_in_backward: ClassVar[bool] = False
    """Whether the backward pass may update the rows of bags: each is a row of the one weight, with
    the gradient of its vector."""

    @property
    @abstractmethod
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients, ``[rows, D]`` each."""

    @property
    def like(self) -> Tensor:
        """A tensor of the rows' type on the device that reads them."""
        return self.weights[0]

    @property
    def width(self) -> int:
        """Length of a row that is looked up."""
        return self.weights[0].shape[1]

    @abstractmethod
    def for_kernel(self) -> tuple[KernelSource, SourceKind]:
        """The arguments of a kernel, and what it is compiled for."""

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor:
        """Rows ``[n]`` in PyTorch, ``[n, D]``, without a gradient."""

    def runs_triton(self, ids: Tensor, impl: str | None) -> bool:
        """Whether a look-up of ``ids`` runs as a kernel."""
        return use_triton(ids, impl)

    def new_flat(self, shape: tuple[int, int], sparse: bool) -> Tensor | None:
        """Memory for the row of each look-up ``[B, F]`` in its weight, see :func:`store_flat`; None
        if :meth:`gradients` computes these rows.
        """
        return torch.empty(shape, dtype=torch.int64, device=self.like.device)

    def entries(self, rows: Tensor) -> Tensor:
        """The numbers that :func:`store_flat` stores for rows."""
        return rows

    def submit(self, sorter: RowSorter, flat: Tensor, owners: Tensor | None = None) -> None:
        """Have the rows that will have a gradient sorted ahead; see :meth:`RowSorter.submit`."""
        sorter.submit(self.weights[0], flat, owners)

    def gradients(self, rows: Tensor, grad: Tensor, *, sparse: bool, flat: bool) -> list[Tensor]:
        """The gradient of each weight.

        Args:
            rows: of the look-ups, ``[n]``; or, if ``flat``, what :func:`store_flat` stored.
            grad: that of the look-ups, ``[n, D]``.
            sparse: whether gradients are uncoalesced COO tensors or dense ones.
            flat: see ``rows``.
        """
        return [row_gradient(self.weights[0], *self.spread(rows, grad, flat=flat), sparse)]

    def spread(self, rows: Tensor, grad: Tensor, *, flat: bool) -> tuple[Tensor, Tensor]:
        """The rows of a single weight that get a gradient, and their gradients; arguments as of
        :meth:`gradients`.
        """
        return rows.view(-1), grad


class Weight(RowSource):
    """The rows of one tensor ``[V, D]``, packed or not."""

    updates_in_backward = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def for_kernel(self) -> tuple[KernelSource, SourceKind]:
        data, num_wide, bits = storage(self.weight)
        if not bits:
            return KernelSource(data), SourceKind("plain")
        return KernelSource(data, num_wide=num_wide), SourceKind("packed", bits)

    def read(self, rows: Tensor) -> Tensor:
        return read_rows(self.weight, rows)


class ShortRows(Weight):
    """Rows of ``dim`` weights and zeros up to ``embedding_dim``.

    Rows ``r per_row`` to ``(r + 1) per_row - 1`` are stored as row r of the weight, which has the
    gradients of all of them.
    """

    renumbers = True
    updates_in_backward = False

    def __init__(self, weight: Tensor, dim: int, embedding_dim: int, scale: float) -> None:
        super().__init__(weight)
        self.dim = dim
        self.embedding_dim = embedding_dim
        self.scale = scale
        self.per_row = weight.shape[1] // dim

    @property
    def width(self) -> int:
        return self.embedding_dim

    def for_kernel(self) -> tuple[KernelSource, SourceKind]:
        source, kind = super().for_kernel()
        return source._replace(scale=self.scale), kind._replace(
            short=self.dim, per_row=self.per_row
        )

    def read(self, rows: Tensor) -> Tensor:
        stored, place = self.entries(rows)
        return widen(super().read(stored), place, self.dim, self.embedding_dim) * self.scale

    def new_flat(self, shape: tuple[int, int], sparse: bool) -> Tensor:
        return torch.empty(2, *shape, dtype=torch.int64, device=self.like.device)

    def entries(self, rows: Tensor) -> Tensor:
        """The stored row, and the place in it."""
        return torch.stack([rows // self.per_row, rows % self.per_row])

    def submit(self, sorter: RowSorter, flat: Tensor, owners: Tensor | None = None) -> None:
        sorter.submit(self.weight, flat[0], owners)

    def spread(self, rows: Tensor, grad: Tensor, *, flat: bool) -> tuple[Tensor, Tensor]:
        stored, place = (rows if flat else self.entries(rows)).view(2, -1)
        parts = grad.new_zeros(len(grad), self.per_row, self.dim)
        index = place[:, None, None].expand(-1, 1, self.dim)
        parts.scatter_(1, index, (grad[:, : self.dim] * self.scale)[:, None])
        return stored, parts.flatten(1)


def widen(stored: Tensor, place: Tensor, dim: int, embedding_dim: int) -> Tensor:
    """The ``dim`` weights at a ``place [...]`` of stored rows ``[..., k * dim]``, then zeros."""
    parts = stored.unflatten(-1, (-1, dim))
    index = place[..., None, None].expand(*place.shape, 1, dim)
    return functional.pad(parts.gather(-2, index).squeeze(-2), (0, embedding_dim - dim))


def row_gradient(weight: Tensor, flat: Tensor, values: Tensor, sparse: bool) -> Tensor:
    """The gradient of ``weight [V, D]`` from rows ``flat [n]`` and their ``values [n, D]``; those
    of row -1 are left out.
    """
    if not sparse:
        table = weight.new_zeros(len(weight) + 1, weight.shape[1])
        return table.index_add_(0, flat + 1, values)[1:]
    if not len(flat):  # accumulation writes to the memory of an empty gradient: give it its own
        flat, values = torch.empty_like(flat), torch.empty_like(values)
    with torch.sparse.check_sparse_tensor_invariants(False):  # they hold, and it would synchronize
        # Autograd would copy what is not contiguous, and with it the rows that were sorted ahead.
        # A single row cut from a longer one counts as contiguous, but keeps its stride, which
        # PyTorch takes for the row length where it sums rows, past the end of their memory.
        values = values.contiguous().as_strided(values.shape, (values.shape[1], 1))
        return torch.sparse_coo_tensor(flat[None], values, weight.shape)
