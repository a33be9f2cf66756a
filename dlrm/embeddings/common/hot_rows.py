"""The most used rows of compressed tables, kept uncompressed and trained as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class PopulateReport:
    """The changes by one call of ``cache_populate``."""

    hits: int
    """Training look-ups since the last call that the cache answered."""
    lookups: int
    """Training look-ups since the last call."""
    resident: int
    """Rows in the cache now."""
    admitted: int
    """Rows that entered the cache."""
    evicted: int
    """Rows that left the cache and were written back."""
    residual: float
    """Norm of the error with which the evicted rows were written back, relative to their norm."""
    reset: dict[str, Tensor]
    """By parameter name, the rows that now belong to other ids: their optimizer state is void."""

    def values(self) -> dict[str, float]:
        """The numbers to log."""
        values = {name: value for name, value in vars(self).items() if name != "reset"}
        return {**values, "hit_rate": self.hits / max(self.lookups, 1)}


class RowCache(nn.Module):
    """A cache of the most frequently used rows of a group of tables: LFU with decayed counts.

    The key of a row is its index among the rows of all tables. The cached rows change only in
    :meth:`populate`, so that between two calls everything has a static shape and nothing waits for
    the device: a look-up searches the sorted keys, and training look-ups are written to a
    ring buffer of the last ``window`` keys. :meth:`populate` counts these into a table of the
    ``capacity`` most used keys, whose older counts decay. Nothing grows with the number of rows of
    the tables. Next to a row there are 16 bytes and its share of the window.

    Args:
        num_rows: rows of all tables together.
        capacity: rows that are cached, at most all of them.
        dim: length of a row.
        decay: factor on the older counts at each :meth:`populate`, in [0, 1].
        window: look-ups that are remembered until they are counted; by default 4 per cached row.
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
        window: int | None,
        sparse: bool,
    ) -> None:
        super().__init__()
        window = 4 * capacity if window is None else window
        if window < 1:
            raise ValueError(f"cache_window is {window}, it must be at least 1")
        if not 0 <= decay <= 1:
            raise ValueError(f"cache_decay is {decay}, it must be between 0 and 1")
        self.capacity = capacity = min(capacity, num_rows)
        self.decay = decay
        self.sparse = sparse

        # The last row belongs to no key: it is the slot of look-ups that miss.
        self.rows = nn.Parameter(torch.zeros(capacity + 1, dim))

        keys = torch.int32 if num_rows < 2**31 else torch.int64
        self.empty = torch.iinfo(keys).max  # the key of an empty slot
        self.register_buffer("_keys", torch.full((capacity,), self.empty, dtype=keys))
        self.register_buffer("_slots", torch.arange(capacity, dtype=torch.int32))
        self.register_buffer("_tracked", torch.full((capacity,), self.empty, dtype=keys))
        self.register_buffer("_counts", torch.zeros(capacity))
        self.register_buffer("_ring", torch.full((window,), self.empty, dtype=keys))
        self.register_buffer("_position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_traffic", torch.zeros(2, dtype=torch.int64))
        self._keys: Tensor  # [capacity], cached keys in ascending order
        self._slots: Tensor  # [capacity], the slot of each
        self._tracked: Tensor  # [capacity], the most used keys
        self._counts: Tensor  # [capacity], their counts
        self._ring: Tensor  # [window], keys that are not counted yet
        self._position: Tensor  # [], where the next one is written
        self._traffic: Tensor  # [2], hits and look-ups since the last populate

    def find(self, keys: Tensor) -> Tensor:
        """The slot of each key, ``capacity`` where it is not cached; the shape of ``keys``."""
        keys = keys.to(self._keys.dtype)
        place = torch.searchsorted(self._keys, keys).clamp_(max=self.capacity - 1)
        return torch.where(self._keys[place] == keys, self._slots[place], self.capacity)

    def look_up(self, slots: Tensor) -> Tensor:
        """The rows in ``slots [...]``, ``[..., D]``; zeros for the slot of no key."""
        return functional.embedding(slots, self.rows, sparse=self.sparse)

    @torch.no_grad()
    def observe(self, keys: Tensor, counted: Tensor | None = None) -> None:
        """Remember a batch of training look-ups, ``[F, B]`` or ``[nnz]``, to be counted.

        Args:
            keys: of the look-ups.
            counted: which of them count, bool of their shape; by default all.
        """
        hits = self.find(keys) < self.capacity
        self._traffic[0] += (hits if counted is None else hits & counted).sum()
        self._traffic[1] += keys.numel() if counted is None else counted.sum()

        keys = keys.reshape(-1).to(self._ring.dtype)
        n, window = len(keys), len(self._ring)
        if counted is None:
            index = torch.arange(min(n, window), device=keys.device)
            place = (index + self._position) % window
            self._ring.index_copy_(0, place, keys[index * _even_stride(n) % max(n, 1)])
            self._position.add_(len(index))
            return

        index = torch.arange(n, device=keys.device) * _even_stride(n) % max(n, 1)
        keys, counted = keys[index], counted.reshape(-1)[index]
        rank = counted.cumsum(0)
        counted = counted & (rank < window)
        # All others write what is at the place after the last one.
        number = counted.sum()
        place = (torch.where(counted, rank - 1, number) + self._position) % window
        self._ring.index_copy_(0, place, torch.where(counted, keys, self._ring[place]))
        self._position.add_(number)

    def stats(self) -> dict[str, int]:
        """Hits and look-ups in training since the last populate; waits for the device."""
        hits, lookups = self._traffic.tolist()
        return {"hits": hits, "lookups": lookups}

    @torch.no_grad()
    def populate(
        self,
        read: Callable[[Tensor], Tensor],
        write: Callable[[Tensor, Tensor], float],
    ) -> PopulateReport:
        """Cache the most used rows from now on.

        Rows that stay keep their slot and value. A row is replaced only by one that was counted at
        least once more. Gradients that an optimizer has not applied yet are dropped, since they may
        belong to rows that leave.

        Args:
            read: returns the compressed rows ``[n, D]`` of ``keys [n]``; new rows start from these.
            write: takes keys and rows that leave, writes them back into the compressed tables and
                returns the relative residual.
        """
        stats = self.stats()
        order = self._slots.argsort()
        cached = self._keys[order]  # by slot
        chosen = self._most_used(cached)
        stays = torch.isin(cached, chosen)
        evicted = (~stays & (cached != self.empty)).nonzero()[:, 0]

        residual = 0.0
        if len(evicted):
            residual = write(cached[evicted].long(), self.rows[evicted])

        admitted = chosen[~torch.isin(chosen, cached)]
        slots = (~stays).nonzero()[: len(admitted), 0]
        if len(admitted):
            self.rows[slots] = read(admitted.long())
        self.rows.grad = None

        # Slots keep their rows; the keys are sorted again.
        cached[~stays] = self.empty
        cached[slots] = admitted
        keys, order = cached.sort()
        self._keys.copy_(keys)
        self._slots.copy_(order)
        self._traffic.zero_()
        return PopulateReport(
            hits=stats["hits"],
            lookups=stats["lookups"],
            resident=len(chosen),
            admitted=len(admitted),
            evicted=len(evicted),
            residual=residual,
            reset={"rows": slots},
        )

    def _most_used(self, cached: Tensor) -> Tensor:
        """Count the keys in the ring buffer, empty it, and return the keys to cache from now on."""
        seen, times = self._ring.unique(return_counts=True)
        keys = torch.cat([cached, self._tracked, seen])
        counts = torch.cat([torch.zeros_like(self._counts), self._counts, times])
        counts[: len(keys) - len(seen)] *= self.decay
        keys, inverse = keys.unique(return_inverse=True)
        counts = torch.zeros_like(keys, dtype=counts.dtype).index_add_(0, inverse, counts)
        if keys[-1] == self.empty:
            keys, counts = keys[:-1], counts[:-1]
        top = counts.sort(descending=True, stable=True).indices[: len(self._tracked)]
        self._tracked.fill_(self.empty)[: len(top)] = keys[top]
        self._counts.zero_()[: len(top)] = counts[top]
        self._ring.fill_(self.empty)
        score = counts + torch.isin(keys, cached)  # of two with equal counts the cached one stays
        return keys[score.sort(descending=True, stable=True).indices[: self.capacity]]

    @torch.no_grad()
    def fill(self, keys: Tensor) -> Tensor:
        """Empty the cache, then cache some keys, as the most used ones so far.

        They count as if the last look-ups, for as long as counts last, had all been of them.

        Args:
            keys: ascending, at most ``capacity``.

        Returns:
            Their rows, ``[n, D]``, to be written.
        """
        for tensor in (self._keys, self._tracked, self._ring):
            tensor.fill_(self.empty)
        for tensor in (self.rows, self._counts, self._position, self._traffic):
            tensor.zero_()
        number = len(keys)
        self._keys[:number] = keys.to(self._keys)
        self._slots.copy_(torch.arange(self.capacity))
        self._tracked[:number] = self._keys[:number]
        self._counts[:number] = len(self._ring) / self.capacity / max(1 - self.decay, 0.05)
        return self.rows[:number]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the cache; counts stay in fp32, since bf16 cannot count beyond 256."""
        counts = self._counts
        super()._apply(fn, recurse)
        if self._counts.dtype != counts.dtype:
            self._counts = counts.to(self._counts.device)
        return self

    def nbytes(self) -> int:
        """Bytes of the rows, keys, counts and everything else."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())


def _even_stride(n: int) -> int:
    """A stride through ``n`` entries that visits each once and spreads every part of them evenly.

    Whichever part of a batch is left out or overwritten, no table loses more than others.
    """
    stride = max(round(0.618 * n), 1)
    while gcd(stride, n) > 1:
        stride += 1
    return stride


def without_cache(budget: int, cache: RowCache) -> int:
    """The bytes of a budget that the cache leaves for the cores."""
    left = budget - cache.nbytes()
    if left <= 0:
        raise ValueError(
            f"a budget of {budget} bytes is used up by the cache of {cache.capacity} rows "
            f"({cache.nbytes()} bytes): set fewer --tt.cache_rows or a smaller "
            "--tt.cache_window, or raise the budget"
        )
    return left
