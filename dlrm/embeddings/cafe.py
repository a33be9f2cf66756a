"""CAFE: hot ids, found by a sketch, have rows of their own; all others share hashed rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, highest_level, row_bytes, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.fitting import fit_shared
from dlrm.embeddings.common.hot_rows import PopulateReport
from dlrm.embeddings.common.row_caches import CachesHotRows
from dlrm.kernels.lookup.hashing import hash32, hashed_offsets
from dlrm.kernels.lookup.tables import lookup
from dlrm.kernels.update.packed import (
    chunks_to_write,
    read_rows,
    record_bytes,
    storage,
    write_rows,
)
from dlrm.utils.offsets import row_offsets

HOT, RIVALS = 8, 4  # slots of a bucket: with a row, and without one yet
SLOTS = HOT + RIVALS
SLOT_BYTES = 8  # key and score of a slot
COUNTER_BYTES = 16  # hits and look-ups
HOT_FRACTION = 0.3  # of the memory
MAX_SCORE = 2**30  # which leaves room for a batch in 32 bits


class Cafe(CachesHotRows, Embedding):
    """The hottest ids have their own rows, all others share pieces of rows as in ``robe``.

    Which ids are hot is learned during training, so ids may be in any order. Each id of each table
    belongs to one bucket of a sketch. A bucket has 8 slots with a row each and 4 more for rivals; a
    slot holds an id and its score, the number of its look-ups in training (in the paper: the sum of
    the norms of its gradients, which a look-up does not have yet). An id without a slot replaces
    the weakest rival, of score ``s``, with probability ``1 / (s + 1)`` and starts at ``s + 1``, so
    that scores are right on average and the many rare ids do not drive out the frequent ones.
    Owners of rows change in :meth:`cache_populate` only: rivals whose score exceeds that of owners
    replace them and start from the row that they shared before.

    Args:
        rows: the memory to use, in rows per table; the sketch counts too.
        hot: fraction of the memory for the sketch and the rows of hot ids.
        pieces: how many pieces a shared row has, each of them shared with other ids; a divisor of
            the embedding dim, by default 4 if possible.
        decay: factor on the scores at each renewal.

    Reference:
        Zhang et al., "CAFE: Towards Compact, Adaptive, and Fast Embedding for Large-scale
        Recommendation Models", SIGMOD 2024, arXiv 2312.03256. Admission: Ben Basat et al.,
        "Randomized Admission Policy for Efficient Top-k and Frequency Estimation", INFOCOM 2017.
    """

    trains_from_fit = False
    packs_rows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rows: int = 10_000,
        hot: float = HOT_FRACTION,
        pieces: int | None = None,
        decay: float = 0.9,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)

        if rows < 1:
            raise ValueError(f"cafe rows is {rows}; set --cafe.rows to 1 or more")
        if not 0 <= hot <= 1:
            raise ValueError(f"cafe hot is {hot}, it must be between 0 and 1; set --cafe.hot")
        if not 0 <= decay <= 1:
            raise ValueError(f"cafe decay is {decay}, it must be between 0 and 1; set --cafe.decay")
        pieces = gcd(4, embedding_dim) if pieces is None else pieces
        if pieces < 1 or embedding_dim % pieces:
            raise ValueError(
                f"cafe pieces is {pieces}; set --cafe.pieces to a divisor of the embedding "
                f"dim, {embedding_dim}"
            )
        self.decay = decay
        self.pieces = pieces

        buckets, shared = _sizes(rows, hot, embedding_dim)
        self.buckets = buckets * self.num_tables
        kept = [min(table, shared) for table in self.num_embeddings]
        self.hot_rows, self.shared_rows = self.buckets * HOT, sum(kept)
        num_pieces = (self.hot_rows + self.shared_rows) * pieces
        # The rows of hot ids come first: of int4 they have 8 bits.
        wide = self.hot_rows * pieces
        self.weight = self._new_rows(num_pieces, embedding_dim // pieces, wide)

        keys = torch.int32 if sum(self.num_embeddings) < 2**31 else torch.int64
        self.empty = torch.iinfo(keys).max  # the key of a slot without owner
        self.register_buffer("_keys", torch.full((self.buckets, SLOTS), self.empty, dtype=keys))
        self.register_buffer("_scores", torch.zeros_like(self._keys, dtype=torch.int32))
        self.register_buffer("_traffic", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("_starts", row_offsets(self.num_embeddings), persistent=False)
        self.register_buffer("_first", pieces * row_offsets(kept), persistent=False)
        self._keys: Tensor  # [buckets, SLOTS], hot ids first; a key numbers the ids of all tables
        self._scores: Tensor  # [buckets, SLOTS]
        self._traffic: Tensor  # [2], hits and look-ups since the last renewal
        self._starts: Tensor  # [F], the first key of each table
        self._first: Tensor  # [F], the first shared piece of each table
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the shared rows, U(-1/sqrt(V), 1/sqrt(V)) for tables of V ids on average."""
        self._clear()
        bound = (self.num_tables / sum(self.num_embeddings)) ** 0.5
        for _, part in chunks_to_write(self.weight, self.hot_rows * self.pieces, len(self.weight)):
            nn.init.uniform_(part, -bound, bound)

    def _clear(self) -> None:
        self._keys.fill_(self.empty)
        self._scores.zero_()
        self._traffic.zero_()
        for _, part in chunks_to_write(self.weight, 0, self.hot_rows * self.pieces):
            part.zero_()

    def _own(self, rows: Tensor) -> Tensor:
        """The pieces of hot rows, ``[..., pieces]``."""
        return rows[..., None] * self.pieces + torch.arange(self.pieces, device=rows.device)

    def _shared(self, tables: Tensor, ids: Tensor) -> Tensor:
        """The pieces that an id without a row of its own shares, ``[..., pieces]``."""
        size = self.shared_rows * self.pieces
        return self.hot_rows * self.pieces + hashed_offsets(
            self._first[tables], ids, self.pieces, size
        )

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        keys = ids + self._starts[tables]
        bucket = hash32(keys) % self.buckets
        match = self._keys[bucket, :HOT] == keys[..., None]  # [..., HOT]
        own = self._own(bucket * HOT + match.int().argmax(-1))
        places = torch.where(match.any(-1, keepdim=True), own, self._shared(tables, ids))
        return lookup(self.weight, places, sparse=self.sparse, context=context).flatten(-2)

    @torch.no_grad()
    def observe(self, tables: Tensor, ids: Tensor) -> None:
        keys = (ids + self._starts[tables]).reshape(-1)
        if not len(keys):
            return
        bucket = hash32(keys) % self.buckets
        match = self._keys[bucket] == keys[:, None]  # [n, SLOTS]
        known = match.any(1)
        place = bucket * SLOTS + match.int().argmax(1)
        scores = self._scores.view(-1)
        counted = known & (scores[place] < MAX_SCORE)
        scores.index_add_(0, place, counted.int())

        self._admit(keys, bucket, known)
        self._traffic[0] += match[:, :HOT].sum()
        self._traffic[1] += len(keys)

    def _admit(self, keys: Tensor, bucket: Tensor, known: Tensor) -> None:
        """Let one unknown id of each bucket try to replace the weakest rival."""
        turn = hash32(self._traffic[1])  # the only source of randomness

        # The challenger: the unknown id of the bucket that comes last in a shifted order.
        unknown = torch.zeros_like(self._scores[:, 0]).index_add_(0, bucket, (~known).int())
        shift = turn % len(keys)
        order = (torch.arange(len(keys), device=keys.device) + shift) % len(keys)
        last = torch.full_like(unknown, -1, dtype=torch.int64)
        last.scatter_reduce_(0, bucket, torch.where(known, -1, order), "amax")
        challenger = keys[(last - shift) % len(keys)].to(self._keys.dtype)

        score, weakest = self._scores[:, HOT:].min(1, keepdim=True)
        weakest += HOT
        draw = hash32(torch.arange(self.buckets, device=keys.device) ^ turn) / 2**32
        admitted = draw[:, None] * (score + 1) < unknown[:, None]
        incumbent = self._keys.gather(1, weakest)
        self._keys.scatter_(1, weakest, torch.where(admitted, challenger[:, None], incumbent))
        self._scores.scatter_(1, weakest, score + admitted)

    def cache_stats(self) -> dict[str, int]:
        """Training look-ups of hot ids, and of all, since the last renewal."""
        hits, lookups = self._traffic.tolist()
        return {"hits": hits, "lookups": lookups}

    @torch.no_grad()
    def cache_populate(self) -> PopulateReport:
        """Give the rows of each bucket to the ids with the highest scores; call it between steps.

        Owners that stay keep their row and its value. A new owner starts from the row that it
        shared before, and the caller must copy the optimizer state of ``report.sources`` to
        ``report.reset``: with fresh state its first steps would be large and undo the copy.
        """
        stats = self.cache_stats()
        score = 2 * self._scores.long()  # at equal scores an owner stays
        score[:, :HOT] += self._keys[:, :HOT] != self.empty
        best = score.sort(dim=1, descending=True, stable=True).indices[:, :HOT]
        chosen = torch.zeros_like(self._keys, dtype=torch.bool).scatter_(1, best, True)

        # As many enter a bucket as leave it, so the two lists match.
        bucket, leaving = (~chosen[:, :HOT]).nonzero(as_tuple=True)
        entering = HOT + chosen[:, HOT:].nonzero(as_tuple=True)[1]
        for slots in (self._keys, self._scores):
            out, into = slots[bucket, leaving], slots[bucket, entering]
            slots[bucket, leaving], slots[bucket, entering] = into, out

        # New owners start from the pieces that they shared.
        entered = self._keys[bucket, leaving] != self.empty
        rows = (bucket * HOT + leaving)[entered]
        keys = self._keys[bucket, leaving][entered].long()
        tables = torch.bucketize(keys, self._starts, right=True) - 1
        own = self._own(rows).view(-1)
        shared = self._shared(tables, keys - self._starts[tables]).view(-1)
        write_rows(self.weight, own, read_rows(self.weight, shared))
        self.weight.grad = None  # it may be that of former owners

        evicted = self._keys[bucket, entering] != self.empty
        self._scores.copy_((self._scores * self.decay).clamp(max=MAX_SCORE))
        self._traffic.zero_()
        return PopulateReport(
            **stats,
            resident=int((self._keys[:, :HOT] != self.empty).sum()),
            admitted=len(rows),
            evicted=int(evicted.sum()),
            residual=0.0,
            reset={"weight": own},
            sources={"weight": shared},
        )

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit to dense tables, each ``[V, D]``.

        The longest rows, which training has moved most, are kept exactly; shared pieces become the
        mean of the others.
        """
        self._check_dense(weights)
        self._clear()

        length = torch.cat([weight.float().norm(dim=1) for weight in weights])
        order = length.sort(descending=True, stable=True).indices
        bucket = hash32(order) % self.buckets
        bucket, by_bucket = bucket.sort(stable=True)
        order = order[by_bucket]
        begins = torch.searchsorted(bucket, torch.arange(self.buckets, device=bucket.device))
        slot = torch.arange(len(order), device=bucket.device) - begins[bucket]

        # Each bucket keeps its longest rows.
        keep = slot < HOT
        bucket, slot, order = bucket[keep], slot[keep], order[keep]
        self._keys[bucket, slot] = order.to(self._keys.dtype)
        rows = bucket * HOT + slot

        for start, weight in zip(self._starts.tolist(), weights, strict=True):
            of_table = (order >= start) & (order < start + len(weight))
            pieces = weight[order[of_table] - start].unflatten(1, (self.pieces, -1))
            write_rows(self.weight, self._own(rows[of_table]).view(-1), pieces.flatten(0, 1))
        fit_shared(
            self.weight,
            weights,
            lambda table, ids: self._shared(self._tables[table], ids),
            without=[order - start for start in self._starts],
        )

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table; rows and sketch are divided in proportion to the tables' rows."""
        sketch = self._keys.nbytes + self._scores.nbytes + self._traffic.nbytes
        rows = storage(self.weight)[0].nbytes
        parts = [split_by_rows(size, self.num_embeddings) for size in (rows, sketch)]
        return [{"weights": own, "sketch": share} for own, share in zip(*parts, strict=True)]

    @classmethod
    def for_budget(
        cls, budget: Budget, *, hot: float = HOT_FRACTION, pieces: int | None = None
    ) -> list[dict[str, Any] | None]:
        """The largest ``rows``, the same for all tables, that fits."""
        row, num_embeddings, dim = budget.row_bytes, budget.num_embeddings, budget.embedding_dim
        pieces = max(1, gcd(4, dim) if pieces is None else pieces)
        hot_row = shared_row = pieces * row_bytes(dim // pieces, budget.dtype)
        if budget.dtype == "int4":
            hot_row, shared_row = (pieces * record_bytes(dim // pieces, bits) for bits in (8, 4))

        def size(table: int, rows: int) -> int:
            buckets, shared = _sizes(max(rows, 1), hot, budget.embedding_dim)
            sketch = buckets * SLOTS * SLOT_BYTES + COUNTER_BYTES
            return buckets * HOT * hot_row + min(table, shared) * shared_row + sketch

        def cost(rows: int) -> int:
            return sum(min(table * row, size(table, rows)) for table in num_embeddings)

        highest = int(2 * max(num_embeddings) / max(1 - hot, 0.01)) + 100
        rows = highest_level(cost, highest, budget.size, cls.kind())
        return [
            None if table * row <= size(table, rows) else {"rows": max(rows, 1)}
            for table in num_embeddings
        ]


def _sizes(rows: int, hot: float, embedding_dim: int) -> tuple[int, int]:
    """Buckets and shared rows per table in the memory of ``rows`` fp32 rows, at least 1 each."""
    row = 4 * embedding_dim
    buckets = max(1, int(hot * rows * row) // (HOT * row + SLOTS * SLOT_BYTES))
    return buckets, max(1, int((1 - hot) * rows))
