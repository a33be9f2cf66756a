"""Tables whose rows may be in host memory, with a cache of them on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlrm.embeddings.common.budget import split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.row_caches import Ids, PrefetchesRows
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.kernels.lookup.source import RowSource
from dlrm.kernels.offload.pinned_memory import empty_on_host
from dlrm.kernels.offload.row_cache import (
    CachedPackedParameter,
    CachedParameter,
    CachedRows,
    cached_rows,
)
from dlrm.kernels.update.packed import PackedRows, record_bytes
from dlrm.utils.bags import Bags

MAX_WINDOW = 32  # batches of a prefetch window
MAX_SMALL_WINDOW = 96  # if steps are so short that launches set the pace
SMALL_WINDOW = 1 << 23  # look-ups of such a window
SMALL_TABLE = 1 << 17  # rows of a table that stays in the cache, so that windows do not list them
MAX_LOOKUPS = 1 << 25  # of a prefetch window: more would gain little and take more memory


class HostRows(PrefetchesRows, SharedRows):
    """Base of tables whose rows may be in pinned host memory with their optimizer state.

    Rows of coming batches are fetched, and others written back, while earlier batches are computed
    (:mod:`dlrm.kernels.offload.row_cache`). With several processes, each of which has all tables,
    these are the rows that any of them looks up, since an update changes the rows of all.
    ``.to(device)`` leaves the rows in host memory and maps them for the device.

    Args:
        cache_rows: rows in the GPU's cache, over all tables; 0 for none. Default: cache_share of
            the rows.
        cache_share: share of the rows in the GPU's cache. If neither is set, all rows are in GPU
            memory.
        half_life: number of prefetch windows in which the LFU score of an unused row halves.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        num_kept: Sequence[int],
        *,
        cache_rows: int | None = None,
        cache_share: float | None = None,
        half_life: float = 1000.0,
        **common: Any,
    ) -> None:
        if cache_rows is not None and cache_rows < 0:
            raise ValueError(f"cache_rows is {cache_rows}, it must not be negative")
        if not 0 <= (cache_share or 0) <= 1:
            raise ValueError(f"cache_share is {cache_share}, it must be between 0 and 1")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}, it must be above 0")

        on_host = not (cache_rows is None and cache_share is None)
        if on_host and common.get("dtype") == "int4":
            raise ValueError("rows in host memory have no int4: set --tables.dtype int8")

        rows, capacity = sum(num_kept), cache_rows
        if capacity is None and cache_share is not None:
            capacity = round(cache_share * rows)
        if capacity is not None and rows >= 2**31:
            raise ValueError(
                f"the tables have {rows:,} rows together, {self.kind()} takes up to 2^31 - 1 in "
                "host memory: give some of them other options, so that they form another group"
            )
        self._capacity = None if capacity is None else min(capacity, rows)
        self._half_life = half_life
        super().__init__(num_embeddings, embedding_dim, num_kept, **common)

    def _new_rows(self, count: int, dim: int, wide: int = 0) -> nn.Parameter:
        if self._capacity is None:
            return super()._new_rows(count, dim, wide)
        if self.dtype is None:
            rows = empty_on_host(torch.empty(0), (count, dim))
            return CachedParameter(rows, capacity=self._capacity, half_life=self._half_life)
        data = torch.empty(0, dtype=torch.uint8)
        data = empty_on_host(data, (count * record_bytes(dim, 8),)).zero_()
        packed = PackedRows(data=data, num_rows=count, dim=dim, wide=count)
        return CachedPackedParameter(packed, capacity=self._capacity, half_life=self._half_life)

    @property
    def on_host(self) -> bool:
        """Whether the rows are in host memory."""
        weight = self._parameters.get("weight")
        return weight is not None and cached_rows(weight) is not None

    @property
    def cached(self) -> CachedRows:
        """The cache; that of rows in GPU memory has no slots."""
        return cached_rows(self.weight) or CachedRows(self.weight, 0)

    # Looking up -------------------------------------------------------------------------------

    @property
    def _source(self) -> RowSource:
        return self.cached if self.cached.active else super()._source

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self._unprepared(context):
            self._prepare(ids + self._offsets[tables])
        return super().vectors(tables, ids, context)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self._unprepared(context):
            self._prepare(ids + self._offsets[:, None])
        return super().lookup(ids, context)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self._unprepared(context):
            ids = bags.ids
            if context.padded:  # any ids lie beyond the last bag
                index = torch.arange(len(ids), device=ids.device)
                ids = ids.where(index < bags.offsets[-1], 0)
            self._prepare(ids + self._offsets[bags.tables(len(self.num_kept))])
        return super().lookup_bags(bags, context)

    def _unprepared(self, context: LookupContext) -> bool:
        """Whether rows must be brought to where a look-up expects them."""
        return self.cached.active and not context.rows_fetched

    def _prepare(self, rows: Tensor) -> None:
        training = self.training and torch.is_grad_enabled() and self.weight.requires_grad
        self.cached.prepare(rows.reshape(1, -1), training=training)

    def window_size(self, lookups: int) -> int:
        """So large that the rows of two windows take most of the cache."""
        if not self._capacity:
            return 0
        most = min(self.cached.window_lookups, MAX_LOOKUPS)
        lookups = max(lookups, 1)
        longest = max(MAX_WINDOW, min(MAX_SMALL_WINDOW, SMALL_WINDOW // lookups))
        return max(1, min(longest, most // lookups))

    @property
    def rows_ready(self) -> bool:
        """Whether the rows of the window are still where :meth:`begin_window` put them."""
        return self.cached.ready or not self.cached.moves

    def begin_window(self, now: Sequence[Ids], coming: Sequence[Ids]) -> None:
        """Fetch the rows of the next window while those of this one are computed."""
        if not self.cached.moves:
            return
        self.cached.wait()
        if self.cached.empty:
            self._keep_small_tables()
        rows = self._rows_of(now)
        with self.cached.side.fork():
            next_rows = self._rows_of(coming)
        ids = [
            part for b in coming for part in ((b.ids, b.offsets) if isinstance(b, Bags) else (b,))
        ]
        self.cached.side.keep([*ids, *self.buffers()])  # all of these may be dropped meanwhile
        self.cached.begin_window(rows, next_rows, batches=len(now) + len(coming))

    def _keep_small_tables(self) -> None:
        """Keep the tables in the cache that nearly every window would use as a whole."""
        room, kept = len(self.cached.index.slot_to_row) // 4, []
        for table in sorted(range(len(self.num_kept)), key=self.num_kept.__getitem__):
            room -= self.num_kept[table]
            if room < 0 or self.num_kept[table] > SMALL_TABLE:
                break
            kept.append(table)
        self.cached.keep(kept, self._offsets, self.num_kept)

    def _rows_of(self, batches: Sequence[Ids]) -> tuple[Tensor, Tensor | None] | None:
        """The ids of several batches as of one, and where the tables begin."""
        if not batches:
            return None
        one_hot = [ids for ids in batches if isinstance(ids, Tensor)]
        if len(one_hot) == len(batches):
            starts = self.cached.starts
            return torch.cat(one_hot, dim=1), self._offsets if starts is None else starts

        rows = [
            ids.ids + self._offsets[ids.tables(len(self.num_kept))]
            if isinstance(ids, Bags)
            else (ids + self._offsets[:, None]).reshape(-1)
            for ids in batches
        ]
        return torch.cat(rows)[None], None

    # The tables as a whole --------------------------------------------------------------------

    def rows_to_write(
        self, table: int, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        self.cached.release()
        yield from super().rows_to_write(table, begin, end)

    def kept_rows(self) -> Tensor:
        self.cached.release()
        return super().kept_rows()

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table: of rows in host memory ``host``; on the GPU, once there is an
        optimizer, ``cache`` for cached rows with their state, and ``index`` for which rows these
        are.
        """
        tables = super().footprint()
        if not self.on_host:
            return tables
        tables = [{"host": table["weights"]} for table in tables]
        if self.cached.active:
            for name, size in zip(("cache", "index"), self.cached.nbytes(), strict=True):
                split = split_by_rows(size, self.num_kept)
                for table, part in zip(tables, split, strict=True):
                    table[name] = part
        return tables

    def cache_stats(self) -> Mapping[str, float]:
        """Look-ups so far, ``hits`` on rows that were cached before their window was fetched,
        batches as ``steps``, and bytes moved from the host and back.
        """
        if not self.cached.active:
            return {}
        lookups, hits, fetched, written, batches = self.cached.index.traffic.tolist()
        size = sum(host.shape[1] * host.element_size() for host, _ in self.cached.tensors)
        moved = {"bytes_in": fetched * size, "bytes_out": written * size}
        return {"lookups": lookups, "hits": hits, "steps": batches, **moved}

    # Rows stay in host memory, and the cache is no part of the state ---------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """For ``.to`` and the like: cast the rows, and map them for the device."""
        if not isinstance(self.weight, CachedParameter):  # packed rows do so themselves
            return super()._apply(fn, recurse)
        weight = self._parameters.pop("weight")
        assert weight is not None
        super()._apply(fn, recurse)
        self._parameters["weight"] = weight
        like = fn(weight.data[:0])
        if (like.device, like.dtype) != (weight.device, weight.dtype):
            self.cached.stop()
            weight.data = empty_on_host(like, weight.shape).copy_(weight.data)
            weight.grad = None if weight.grad is None else fn(weight.grad)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep: bool) -> None:
        if self.on_host:  # the weight in a state dict may be written to
            self.cached.release()
        super()._save_to_state_dict(destination, prefix, keep)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        if self.on_host:  # rows are copied even with ``assign``: another parameter has no cache
            self.cached.release()
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
