"""Dense tables in host memory, with a cache of their most used rows on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.embeddings.common.row_caches import Ids, PrefetchesRows
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables
from dlrm.kernels.offload.pinned_memory import empty_on_host
from dlrm.kernels.offload.row_cache import CachedParameter, CachedRows
from dlrm.utils.bags import Bags
from dlrm.utils.offsets import row_offsets

MAX_WINDOW = 32  # batches of a prefetch window
MAX_LOOKUPS = 1 << 24  # of a prefetch window: more would gain little and take more memory


class Offload(PrefetchesRows, Embedding):
    """Every row in full, in pinned host memory with its optimizer state; the GPU caches rows.

    The cache changes only the speed: results, checkpoints and initial rows are those of ``dense``.
    Rows of coming batches are fetched, and others written back, while earlier batches are computed
    (:mod:`dlrm.kernels.offload.row_cache`). With several processes, each of which has all tables,
    rows are fetched when they are looked up, since an update on one changes the rows of all.
    ``.to(device)`` leaves the rows in host memory and maps them for the device.

    Once there is an optimizer, call ``cached.release()`` before you write to the weight in place;
    otherwise the write is lost for rows in the cache. ``load_state_dict`` and :meth:`load_dense`
    do so.

    Args:
        cache_rows: rows in the GPU's cache, over all tables with the same options; 0 for none.
            Default: cache_share of the rows.
        cache_share: share of the rows in the GPU's cache, if cache_rows is not set.
        half_life: number of prefetch windows in which the LFU score of an unused row halves.
    """

    grows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        cache_rows: int | None = None,
        cache_share: float = 0.1,
        half_life: float = 1000.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        rows = sum(self.num_embeddings)

        if cache_rows is not None and cache_rows < 0:
            raise ValueError(f"cache_rows is {cache_rows}, it must not be negative")
        if not 0 <= cache_share <= 1:
            raise ValueError(f"cache_share is {cache_share}, it must be between 0 and 1")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}, it must be above 0")
        if rows >= 2**31:
            raise ValueError(
                f"the tables have {rows:,} rows together, offload takes up to 2^31 - 1: give some "
                "of them other options, so that they form another group"
            )

        capacity = round(cache_share * rows) if cache_rows is None else min(cache_rows, rows)
        self.weight = CachedParameter(
            empty_on_host(torch.empty(0), (rows, embedding_dim)),
            capacity=capacity,
            half_life=half_life,
        )
        self.cached = self.weight.cached

        self.register_buffer("_offsets", row_offsets(self.num_embeddings), persistent=False)
        self._offsets: Tensor  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows like those of dense tables."""
        self.cached.release()
        for rows in self.weight.split(self.num_embeddings):
            nn.init.uniform_(rows, -initial_bound(len(rows)), initial_bound(len(rows)))

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = ids + self._offsets[tables]
        source = self._source(rows.reshape(1, -1), None, context)
        return lookup(source, rows, sparse=self.sparse, sorter=context.sorter)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        source, tables = self._source(ids, self._offsets, context), TableRows(self._offsets)
        return lookup_tables(source, tables, ids, sparse=self.sparse, sorter=context.sorter)

    def _source(
        self, ids: Tensor, starts: Tensor | None, context: LookupContext
    ) -> Tensor | CachedRows:
        """The rows of a look-up: in the cache if there is one, and then prepared."""
        if not self.cached.active:
            return self.weight
        training = self.training and torch.is_grad_enabled() and self.weight.requires_grad
        self.cached.prepare(ids, starts, training=training, fetched=context.rows_fetched)
        return self.cached

    def window_size(self, lookups: int) -> int:
        """So large that two windows fit into the cache if an eighth of their ids are unique."""
        if not self.cached.capacity:
            return 0
        most = min(4 * self.cached.capacity, MAX_LOOKUPS)
        return max(1, min(MAX_WINDOW, most // max(lookups, 1)))

    @property
    def rows_ready(self) -> bool:
        """Whether the rows of the window are still where :meth:`begin_window` put them."""
        return self.cached.ready or not self.cached.moves

    def begin_window(self, now: Sequence[Ids], coming: Sequence[Ids]) -> None:
        """Fetch the rows of the next window while those of this one are computed."""
        batches = len(now) + len(coming)
        self.cached.begin_window(self._rows_of(now), self._rows_of(coming), batches=batches)

    def _rows_of(self, batches: Sequence[Ids]) -> tuple[Tensor, Tensor | None] | None:
        """The ids of several batches as of one, and where the tables begin."""
        if not batches:
            return None
        one_hot = [ids for ids in batches if isinstance(ids, Tensor)]
        if len(one_hot) == len(batches):
            return torch.cat(one_hot, dim=1), self._offsets

        rows = [
            ids.ids + self._offsets[ids.tables(self.num_tables)]
            if isinstance(ids, Bags)
            else (ids + self._offsets[:, None]).reshape(-1)
            for ids in batches
        ]
        return torch.cat(rows)[None], None

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the rows of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        self.cached.release()
        for rows, weight in zip(self.weight.split(self.num_embeddings), weights, strict=True):
            rows.copy_(weight)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table: ``host`` in host memory; on the GPU, once there is an optimizer,
        ``cache`` for cached rows with their state, and ``index`` for which rows these are.
        """
        row = self.embedding_dim * self.weight.element_size()
        tables = [{"host": rows * row} for rows in self.num_embeddings]
        if self.cached.active:
            for name, size in zip(("cache", "index"), self.cached.nbytes(), strict=True):
                split = split_by_rows(size, self.num_embeddings)
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

    # The rows stay in host memory, and the cache is no part of the state ----------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """For ``.to`` and the like: cast the rows, and map them for the device."""
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
        self.cached.release()  # the weight in a state dict may be written to
        super()._save_to_state_dict(destination, prefix, keep)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        self.cached.release()
        # Rows are copied, even with ``assign``: another parameter would not be the cached one.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *arguments)
