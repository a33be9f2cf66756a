"""Look-ups of trained tables as modules of plain PyTorch operators.

Their shapes depend only on the shape of the ids, and they use no Triton, so ``torch.export`` and
the compilers behind it accept a dynamic batch.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.base import Embedding
from dlrm.embeddings.dynamic import Dynamic
from dlrm.embeddings.paged import Paged
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.embeddings.short import Short
from dlrm.embeddings.tt import TT
from dlrm.export.rows import FloatRows, store_rows
from dlrm.kernels.lookup.source import widen
from dlrm.utils.offsets import row_offsets

SMALL_SLICE = 512  # weights of a tensor-train slice, up to which it is copied


class RowLookup(nn.Module):
    """Tables with their rows in one weight: dense, hash, drop, block, paged and offload.

    Args:
        group: the trained tables.
        precision: see :func:`~dlrm.export.rows.store_rows`.
    """

    def __init__(self, group: SharedRows | Paged, precision: str) -> None:
        super().__init__()
        shared = group if isinstance(group, SharedRows) else None
        weight = shared.kept_rows() if shared else group.state_dict()["weight"]
        self.rows = store_rows(weight, precision)

        num_rows = shared.num_kept if shared else group.num_embeddings
        self.register_buffer("starts", row_offsets(num_rows).to(weight.device))
        self.register_buffer("modulo", shared._modulo if shared else None)
        self.register_buffer("overflow_row", shared._overflow_row if shared else None)
        projection = getattr(group, "projection", None)
        self.register_buffer("projection", None if projection is None else projection.detach())
        self.starts: Tensor  # [F]
        self.modulo: Tensor | None  # [F]
        self.overflow_row: Tensor | None  # [F]
        self.projection: Tensor | None  # [F, E, D]

    def forward(self, tables: Tensor, ids: Tensor) -> Tensor:
        """Look up ``ids [F, B]`` of ``tables [F, 1]``, or ``[n]`` of ``[1]``; adds a last dim D."""
        if self.modulo is not None:
            ids = ids % self.modulo[tables]
        if self.overflow_row is not None:
            ids = ids.minimum(self.overflow_row[tables])
        rows = self.rows(ids + self.starts[tables])
        if self.projection is None:
            return rows
        projected = rows @ self.projection[tables.reshape(-1)].float()
        return projected.reshape(*ids.shape, projected.shape[-1])


class ShortLookup(nn.Module):
    """Short rows, several of them stored as one.

    Args:
        group: the trained tables.
        precision: see :func:`~dlrm.export.rows.store_rows`.
    """

    def __init__(self, group: Short, precision: str) -> None:
        super().__init__()
        self.stored = RowLookup(group, precision)
        self.dim, self.embedding_dim, self.per_row = group.dim, group.embedding_dim, group.per_row
        self.scale = group.scale
        device = group.weight.device
        self.register_buffer("num_short", torch.tensor(group.num_short, device=device))
        self.num_short: Tensor  # [F]

    def forward(self, tables: Tensor, ids: Tensor) -> Tensor:
        """As in :class:`RowLookup`."""
        count = self.num_short[tables]
        index = (ids.minimum(count - 1) + 1) % count  # the row that rare ids share comes first
        stored = self.stored(tables, index // self.per_row)
        return widen(stored, index % self.per_row, self.dim, self.embedding_dim) * self.scale


class DynamicLookup(nn.Module):
    """Rows of the ids that had one at the end of training, and shared rows for all others.

    Args:
        group: the trained tables.
        precision: see :func:`~dlrm.export.rows.store_rows`.
    """

    def __init__(self, group: Dynamic, precision: str) -> None:
        super().__init__()
        self.stored = RowLookup(group, precision)
        self.group = group
        del group.weight  # its rows are stored above
        for name in ("_scores", "_sketch"):  # of training alone
            setattr(group, name, group.get_buffer(name).new_zeros(1))

    def forward(self, tables: Tensor, ids: Tensor) -> Tensor:
        """As in :class:`RowLookup`."""
        return self.stored(*self.group.stored_rows(tables, ids)).flatten(-2)


class TTLookup(nn.Module):
    """Tensor-train tables, with the row of every id computed on its own.

    Equal ids are computed several times. Training finds them first, but their number is known only
    at run time, so no compiler can plan for it.

    Args:
        group: the trained tables, with their cache of hot rows, if there is one.
        precision: number format of cached and exact rows. With ``bf16``, the cores are bf16 too;
            otherwise they stay as they are.
    """

    def __init__(self, group: TT, precision: str) -> None:
        super().__init__()
        self.q = group.q
        self.ranks = group.ranks
        of_cores = "bf16" if precision == "bf16" else "fp32"
        self.cores = nn.ModuleList(store_rows(core, of_cores) for core in group.cores)

        p = group._p
        self.register_buffer("p", p)
        self.register_buffer("place", p.flip(1).cumprod(1).flip(1) // p)
        self.register_buffer("starts", p.cumsum(0) - p)
        self.p: Tensor  # [F, d]
        self.place: Tensor  # [F, d] place values of the digits of an id
        self.starts: Tensor  # [F, d] the first slice of each table

        self.exact = None
        if group.exact is not None:
            self.exact = store_rows(group.exact.kept_rows(), precision)
            self.register_buffer("kept", group._kept)
            self.register_buffer("first_row", row_offsets(group.exact.num_kept).to(p.device))
            self.kept: Tensor  # [F] number of exact rows of each table
            self.first_row: Tensor  # [F]

        self.cached = None
        if group.cache is not None:
            self.cached = store_rows(group.cache.rows, precision)
            self.register_buffer("keys", group.cache._keys)
            self.register_buffer("slots", group.cache._slots.long())
            self.register_buffer("first_key", group._row_offsets)
            self.keys: Tensor  # [capacity], ascending
            self.slots: Tensor  # [capacity]
            self.first_key: Tensor  # [F]

    def forward(self, tables: Tensor, ids: Tensor) -> Tensor:
        """As in :class:`RowLookup`."""
        if self.exact is None:
            return self._products(tables, ids)
        kept = self.kept[tables]
        rows = self.exact(ids.minimum(kept) + self.first_row[tables])
        products = self._products(tables, (ids - kept).clamp(min=0))
        return rows + products.masked_fill((ids < kept)[..., None], 0.0)

    def _products(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The products of slices, or cached rows instead of them."""
        vectors = self._compressed(tables, ids)
        if self.cached is None:
            return vectors
        keys = (ids + self.first_key[tables]).to(self.keys.dtype)
        index = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        hits = self.keys[index] == keys
        return torch.where(hits[..., None], self.cached(self.slots[index]), vectors)

    def _compressed(self, tables: Tensor, ids: Tensor) -> Tensor:
        rows = ids.new_ones(1)
        for k, core in enumerate(self.cores):
            assert isinstance(core, FloatRows)
            digits = ids // self.place[tables, k] % self.p[tables, k]
            slices = (digits + self.starts[tables, k]).reshape(-1)  # [n]
            rank, width = self.ranks[k], self.q[k] * self.ranks[k + 1]
            if k == 0:
                rows = core(slices)
                continue
            left = rows.view(-1, prod(self.q[:k]), rank)
            if core.weight.dtype == torch.float32 and rank * width > SMALL_SLICE:
                rows = _multiply_in_place(left, core.weight.view(-1, width), slices)
            else:
                rows = left @ core(slices).view(-1, rank, width)
        return rows.reshape(*ids.shape, prod(self.q))


def _multiply_in_place(left: Tensor, weight: Tensor, slices: Tensor) -> Tensor:
    """``left [n, Q, r]`` times the matrices ``slices [n]`` of ``weight [slices * r, c]``.

    The rows of a matrix are a bag, weighted by ``left``, so no matrix is copied. At rank 32 on a
    CPU, this is 5 times as fast as a product with copies.
    """
    rank = left.shape[2]
    rows = slices[:, None, None] * rank + torch.arange(rank, device=slices.device)
    return functional.embedding_bag(
        rows.expand(left.shape).reshape(-1, rank),
        weight,
        per_sample_weights=left.reshape(-1, rank),
        mode="sum",
    )


class OwnLookup(nn.Module):
    """Tables with a look-up that is plain PyTorch on a CPU: qr, robe, cafe and basis.

    Args:
        group: the trained tables, on the CPU.
    """

    def __init__(self, group: Embedding) -> None:
        super().__init__()
        self.group = group

    def forward(self, tables: Tensor, ids: Tensor) -> Tensor:
        """As in :class:`RowLookup`."""
        return self.group.vectors(tables, ids).float()


def lookup_of(group: Embedding, precision: str | None) -> nn.Module:
    """The look-up of a group of trained tables, on the CPU.

    Args:
        group: the tables.
        precision: number format of rows, one of :data:`~dlrm.export.rows.PRECISIONS`. Kinds with
            other parameters than rows keep these in fp32 instead of int8 and int4. None: int8 or
            int4 for rows that were trained so, otherwise fp32.
    """
    if precision is None:
        precision = group.dtype or "fp32" if isinstance(group, SharedRows | TT) else "fp32"
    if isinstance(group, Dynamic):
        return DynamicLookup(group, precision)
    if isinstance(group, Short):
        return ShortLookup(group, precision)
    if isinstance(group, SharedRows | Paged):
        return RowLookup(group, precision)
    if isinstance(group, TT):
        return TTLookup(group, precision)
    group = group.unpack()
    return OwnLookup(group.to(torch.bfloat16) if precision == "bf16" else group)
