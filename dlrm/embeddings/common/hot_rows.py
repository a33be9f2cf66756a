"""The most used rows of compressed tables, kept uncompressed and trained as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class PopulateReport:
    """What one renewal of a cache did."""

    hits: int
    """Training look-ups since the last renewal that the cache answered."""
    lookups: int
    """Training look-ups since the last renewal."""
    resident: int
    """Rows in the cache now."""
    admitted: int
    """Rows that came into the cache."""
    evicted: int
    """Rows that left the cache and were written back."""
    residual: float
    """Of the evicted rows: norm of what the write-back missed, by the norm of the rows."""
    reset: dict[str, Tensor]
    """Rows of parameters that changed owner, by parameter name: their optimizer state is void."""
    sources: dict[str, Tensor] = field(default_factory=dict)
    """Where these rows are copies of others of the same parameter, those others."""

    def values(self) -> dict[str, float]:
        """The numbers, to be logged."""
        values = {
            name: value for name, value in vars(self).items() if name not in ("reset", "sources")
        }
        return {**values, "hit_rate": self.hits / max(self.lookups, 1)}


class RowCache(nn.Module):
    """Rows of a group of tables by key, the key being the row's place in the joint row space.

    Which rows are cached changes in :meth:`populate` only, so between two renewals everything has
    a static shape and nothing waits for the device: a look-up searches the sorted keys, and an
    observation goes into a ring of the last ``window`` look-ups. At a renewal these are counted
    into a table of the ``2 * capacity`` most used keys, whose older counts decay. Nothing grows
    with the number of rows of the tables.

    Args:
        num_rows: rows of all tables together.
        capacity: rows that are cached, at most all of them.
        dim: length of a row.
        decay: factor on the counts at each renewal, in [0, 1].
        window: look-ups remembered for the next renewal.
        sparse: the gradient of the cached rows is a sparse COO tensor, one entry per look-up.

    Raises:
        ValueError: a window or decay outside its range.
    """

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        dim: int,
        *,
        decay: float,
        window: int,
        sparse: bool,
    ) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"cache_window is {window}, it must be at least 1")
        if not 0 <= decay <= 1:
            raise ValueError(f"cache_decay is {decay}, it must be between 0 and 1")
        self.capacity = capacity = min(capacity, num_rows)
        self.decay = decay
        self.sparse = sparse
        # The last row belongs to no key: look-ups that miss have it as their slot.
        self.rows = nn.Parameter(torch.zeros(capacity + 1, dim))
        keys = torch.int32 if num_rows < 2**31 else torch.int64
        self.empty = torch.iinfo(keys).max  # the key of a slot without owner
        self.register_buffer("_keys", torch.full((capacity,), self.empty, dtype=keys))
        self.register_buffer("_slots", torch.arange(capacity, dtype=torch.int32))
        self.register_buffer("_tracked", torch.full((2 * capacity,), self.empty, dtype=keys))
        self.register_buffer("_counts", torch.zeros(2 * capacity))
        self.register_buffer("_ring", torch.full((window,), self.empty, dtype=keys))
        self.register_buffer("_position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_traffic", torch.zeros(2, dtype=torch.int64))
        self._keys: Tensor  # [capacity], owners in ascending order
        self._slots: Tensor  # [capacity], the slot of each owner
        self._tracked: Tensor  # [2 * capacity]
        self._counts: Tensor  # [2 * capacity]
        self._ring: Tensor  # [window]
        self._position: Tensor  # [], where the ring goes on
        self._traffic: Tensor  # [2], hits and look-ups since the last renewal

    def find(self, keys: Tensor) -> Tensor:
        """The slot of each key, ``capacity`` where it is not cached; the shape of ``keys``."""
        keys = keys.to(self._keys.dtype)
        place = torch.searchsorted(self._keys, keys).clamp_(max=self.capacity - 1)
        return torch.where(self._keys[place] == keys, self._slots[place], self.capacity)

    def look_up(self, slots: Tensor) -> Tensor:
        """The rows in ``slots [...]``, ``[..., D]``; zeros for the slot of no key."""
        return functional.embedding(slots, self.rows, sparse=self.sparse)

    @torch.no_grad()
    def observe(self, keys: Tensor) -> None:
        """Count a batch of training look-ups, ``[F, B]`` or ``[nnz]``."""
        self._traffic[0] += (self.find(keys) < self.capacity).sum()
        self._traffic[1] += keys.numel()
        keys = keys.reshape(-1).to(self._ring.dtype)
        n, window = len(keys), len(self._ring)
        index = torch.arange(min(n, window), device=keys.device)
        place = (index + self._position) % window
        self._ring.index_copy_(0, place, keys[index * _even_stride(n) % max(n, 1)])
        self._position.add_(len(index))

    def stats(self) -> dict[str, int]:
        """Hits and look-ups in training since the last renewal; waits for the device."""
        hits, lookups = self._traffic.tolist()
        return {"hits": hits, "lookups": lookups}

    @torch.no_grad()
    def populate(
        self,
        read: Callable[[Tensor], Tensor],
        write: Callable[[Tensor, Tensor], float],
    ) -> PopulateReport:
        """Renew the cache: the most used rows are in it from now on.

        Rows that stay keep slot and value. A row is replaced only by one that was counted at
        least once more. Gradients that wait for an optimizer are dropped, since they may belong
        to former owners.

        Args:
            read: gives the compressed rows ``[n, D]`` of ``keys [n]``; new rows start from these.
            write: takes keys and rows that leave, writes them back into the compressed tables and
                returns the relative residual.
        """
        stats = self.stats()
        order = self._slots.argsort()
        owners = self._keys[order]  # by slot
        chosen = self._most_used(owners)
        stays = torch.isin(owners, chosen)
        leaves = (~stays & (owners != self.empty)).nonzero()[:, 0]
        residual = 0.0
        if len(leaves):
            residual = write(owners[leaves].long(), self.rows[leaves])
        admitted = chosen[~torch.isin(chosen, owners)]
        slots = (~stays).nonzero()[: len(admitted), 0]
        if len(admitted):
            self.rows[slots] = read(admitted.long())
        self.rows.grad = None
        owners[~stays] = self.empty
        owners[slots] = admitted
        keys, order = owners.sort()
        self._keys.copy_(keys)
        self._slots.copy_(order)
        self._traffic.zero_()
        return PopulateReport(
            hits=stats["hits"],
            lookups=stats["lookups"],
            resident=len(chosen),
            admitted=len(admitted),
            evicted=len(leaves),
            residual=residual,
            reset={"rows": slots},
        )

    def _most_used(self, owners: Tensor) -> Tensor:
        """Count what the ring holds, empty it, and give the keys to be cached from now on."""
        seen, times = self._ring.unique(return_counts=True)
        keys = torch.cat([owners, self._tracked, seen])
        counts = torch.cat([torch.zeros_like(self._counts[: self.capacity]), self._counts, times])
        counts[: len(keys) - len(seen)] *= self.decay
        keys, inverse = keys.unique(return_inverse=True)
        counts = torch.zeros_like(keys, dtype=counts.dtype).index_add_(0, inverse, counts)
        if keys[-1] == self.empty:
            keys, counts = keys[:-1], counts[:-1]
        top = counts.sort(descending=True, stable=True).indices[: len(self._tracked)]
        self._tracked.fill_(self.empty)[: len(top)] = keys[top]
        self._counts.zero_()[: len(top)] = counts[top]
        self._ring.fill_(self.empty)
        score = counts + torch.isin(keys, owners)
        return keys[score.sort(descending=True, stable=True).indices[: self.capacity]]

    @torch.no_grad()
    def clear(self) -> None:
        """Empty the cache and forget all counts."""
        self._keys.fill_(self.empty)
        self._tracked.fill_(self.empty)
        self._ring.fill_(self.empty)
        for tensor in (self.rows, self._counts, self._position, self._traffic):
            tensor.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert; counts stay in fp32: bf16 would not count beyond 256."""
        counts = self._counts
        super()._apply(fn, recurse)
        if self._counts.dtype != counts.dtype:
            self._counts = counts.to(self._counts.device)
        return self

    def nbytes(self) -> int:
        """Bytes of rows, keys, counts and all else."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())


def _even_stride(n: int) -> int:
    """A stride through ``n`` entries that meets each once, every stretch of it spread evenly.

    So whichever part of a batch is left out or overwritten, no table is favoured.
    """
    stride = max(round(0.618 * n), 1)
    while gcd(stride, n) > 1:
        stride += 1
    return stride
