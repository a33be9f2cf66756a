"""Tensor-train tables: each row is a product of slices of a few small cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.budget import Budget, split_by_rows
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.factorization import factorize_dim, factorize_rows
from dlrm.embeddings.common.hot_rows import PopulateReport, RowCache, without_cache
from dlrm.embeddings.common.row_caches import CachesHotRows
from dlrm.embeddings.common.tt_budget import Planner, clip_ranks, slice_widths, tt_weights
from dlrm.embeddings.common.tt_svd import (
    fit_rows,
    match_dense_steps,
    mean_square,
    table_slices,
    tt_svd,
)
from dlrm.embeddings.drop import Drop
from dlrm.embeddings.shared_rows import num_kept_of
from dlrm.kernels.tt import TTShape, tt_bags, tt_vectors
from dlrm.kernels.update.rules import before_sgd
from dlrm.utils.bags import Bags
from dlrm.utils.offsets import row_offsets

DEFAULT_RANK = 32


class TT(CachesHotRows, Embedding):
    """Tables in tensor-train format.

    Id ``i`` has ``d`` digits ``i_1`` to ``i_d`` in the mixed base ``p``, the most significant one
    first. Row ``i`` is the product ``G_1[i_1] G_2[i_2] ... G_d[i_d]`` of one slice per core; slice
    ``i_k`` of core ``k`` is a matrix ``[r_{k-1}, q_k r_k]``, and ``r_0 = r_d = 1``. ``prod(p)`` is
    at least the number of rows, and ``prod(q)`` is the dim. All tables of a group have the same
    ``q`` and ranks. Core ``k`` of all tables is one parameter ``cores.k`` of shape
    ``[sum(p_k), r_{k-1} q_k r_k]``: one row per slice, table after table.

    With ``keep``, the first ids of a table, which are the most frequent ones, have exact rows. The
    rows of the other ids are the sum of one shared row and a product. With ``dtype`` int8 or int4,
    exact and shared rows are packed, and cores are in bf16.

    Args:
        rank: TT rank, the size of the dimension that two neighboring cores share. A larger rank
            comes closer to a dense table, but the number of weights grows with its square. A rank
            that no table of the group can use is reduced.
        d: number of cores.
        q: factors of the embedding dim, such as ``2 2 4`` for 16; by default the most balanced
            ones.
        p: factors of the number of rows in the train, the same for every table of the group; their
            product is at least that number. By default balanced ones for each table.
        keep: number of ids of a table with an exact row; 0 for a train of all rows, as in the
            paper. By default 0, or with a budget the ids that are most frequent in all tables
            together. In code it may be a list with one number for each table.
        cache_rows: number of rows, in all tables of the group together, that are also kept and
            trained uncompressed: the most used ones; 0 for no cache. They are chosen when the cache
            is populated, by cache_populate or --populate_every.
        cache_first: number of ids of a table, the first ones without an exact row, that are cached
            from the start; at most cache_rows for all tables together. By default 0, or with a
            budget the ids that are most frequent in all tables together. In code it may be a list.
        cache_window: number of the last training look-ups that are counted when the cache is
            populated; by default 4 per cached row.
        cache_decay: factor on older counts each time that the cache is populated.

    Raises:
        ValueError: factors do not fit, or an option is outside its range.

    Reference: Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning
        Recommendation Models", MLSys 2021, arXiv 2101.11714.
    """

    per_table = frozenset({"keep", "cache_first"})
    budget_by_counts = True
    packs_rows = True

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        rank: int = DEFAULT_RANK,
        d: int = 3,
        q: list[int] | None = None,
        p: list[int] | None = None,
        keep: int | list[int] | None = None,
        cache_rows: int = 0,
        cache_first: int | list[int] | None = None,
        cache_window: int | None = None,
        cache_decay: float = 0.8,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}: set --tt.rank 32")
        if d < 2:
            raise ValueError(f"a tensor train has at least 2 cores, got d {d}: set --tt.d 3")
        if d > 63:  # an id has 63 bits, and a core with one slice is useless
            raise ValueError(f"a tensor train has at most 63 cores, got d {d}: set --tt.d 3")
        if cache_rows < 0:
            raise ValueError(f"cache_rows is {cache_rows}: set --tt.cache_rows 0 for no cache")

        # The rows of each table, exact and in the train, and the factors of the latter.
        num_kept = num_kept_of(num_embeddings, keep or 0, self.kind())  # with the shared row
        self.kept = tuple(kept - 1 for kept in num_kept)
        self.in_train = [n - kept for n, kept in zip(self.num_embeddings, self.kept, strict=True)]
        self.q = tuple(q) if q else factorize_dim(embedding_dim, d)
        self.p = [tuple(p) if p else factorize_rows(rows, d) for rows in self.in_train]
        self._check_factors(d)
        self.ranks = clip_ranks(rank, self.p, self.q)

        widths = slice_widths(self.q, self.ranks)
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(sum(slices), width))
            for slices, width in zip(zip(*self.p, strict=True), widths, strict=True)
        )
        self.register_buffer("_p", torch.tensor(self.p), persistent=False)
        self.register_buffer("_row_offsets", row_offsets(self.in_train), persistent=False)
        self.register_buffer("_kept", torch.tensor(self.kept), persistent=False)
        self._p: Tensor  # [F, d]
        self._row_offsets: Tensor  # [F] first key of each table in the cache
        self._kept: Tensor  # [F] number of exact rows, after which the shared one is stored

        self.exact = None
        if any(self.kept):
            common = Common(sparse=self.sparse, check_ids=False, dtype=self.dtype)
            self.exact = Drop(num_embeddings, embedding_dim, keep=[*self.kept], **common)
        self.cache = None
        if cache_rows:
            sizes = sum(self.in_train), cache_rows, embedding_dim
            window = cache_window
            self.cache = RowCache(*sizes, decay=cache_decay, window=window, sparse=self.sparse)
        self._cache_first = self._check_cache_first(cache_first or 0, cache_rows)
        self._mark_cores()

        self.reset_parameters()
        for module in (self.cores, self.cache) if self.dtype else ():
            if module is not None:
                module.bfloat16()

    def _check_factors(self, d: int) -> None:
        for name, factors in (("q", self.q), ("p", self.p[0])):
            if len(factors) != d or min(factors) < 1:
                raise ValueError(
                    f"{name} is {list(factors)}, it must have d = {d} factors of at least 1: "
                    f"change --tt.{name} or --tt.d"
                )
        if prod(self.q) != self.embedding_dim:
            valid = " ".join(map(str, factorize_dim(self.embedding_dim, d)))
            raise ValueError(
                f"q is {list(self.q)}, whose product is {prod(self.q)}; it must be the dim, "
                f"{self.embedding_dim}: set --tt.q {valid}"
            )
        for rows, p in zip(self.in_train, self.p, strict=True):
            if prod(p) < rows:
                valid = " ".join(map(str, factorize_rows(rows, d)))
                raise ValueError(
                    f"p is {list(p)}, whose product is {prod(p)}; it must be at least the rows of "
                    f"the table, {rows}: set --tt.p {valid}"
                )

    def _check_cache_first(self, first: int | list[int], cache_rows: int) -> list[int]:
        """The number of ids of each table that are cached from the start."""
        each = [first] * self.num_tables if isinstance(first, int) else first
        if len(each) != self.num_tables or min(each) < 0 or sum(each) > cache_rows:
            raise ValueError(
                f"cache_first is {first}: set --tt.cache_first to a number of ids, 0 or more, that "
                f"comes to at most the {cache_rows} --tt.cache_rows in all {self.num_tables} tables"
            )
        return [min(own, rows) for own, rows in zip(each, self.in_train, strict=True)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the cores, such that the rows of a table have a standard deviation of 1 / sqrt(3 V).

        This is the deviation of U(-1/sqrt(V), 1/sqrt(V)), as of the reference DLRM's tables. As in
        the paper, no entry is near zero: entries are normal, given that ``|x| >= 2``. Slices get
        equal norms, so rows with the same first digit deviate like all rows. Then the cores are
        scaled by the mean square of the product, which :func:`mean_square` computes exactly for any
        rank. Exact and cached rows start like dense ones, and shared ones at zero.
        """
        if self.cores[0].is_meta:  # it has sizes, but no values
            return

        wide = torch.promote_types(self.cores[0].dtype, torch.float32)  # else unsupported
        for core in self.cores:
            tail = torch.rand_like(core, dtype=wide).neg_().add_(1)
            sign = torch.randint_like(tail, 2).mul_(2).sub_(1)
            drawn = torch.special.ndtri(tail.mul_(0.0227501)).mul_(sign)  # P(x < -2) is 0.02275
            core.copy_(drawn.div_(drawn.square().mean(1, keepdim=True).sqrt_()))

        for table, rows in enumerate(self.num_embeddings):
            slices = table_slices([*self.cores], self._shape, table)
            scale = (1 / (3 * rows) / mean_square(slices)) ** (0.5 / len(slices))
            for core in slices:
                core.mul_(scale)

        if self.exact is not None:
            self.exact.reset_parameters()
            for table, kept in enumerate(self.kept):
                for _, shared in self.exact.rows_to_write(table, kept):
                    shared.zero_()
        for rows, cached in zip(self.num_embeddings, self._first_cached(), strict=False):
            cached.uniform_(-(rows**-0.5), rows**-0.5)

    def _mark_cores(self) -> None:
        """Have an optimizer with plain SGD move rows as far as those of dense tables.

        Other rules work best with the equal scales of :meth:`reset_parameters`.
        """
        before_sgd(self.cores[0], partial(match_dense_steps, [*self.cores][1:], self._shape))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_cores()  # copies of parameters are not marked

    def _first_cached(self) -> Sequence[Tensor]:
        """Fill the cache with the ids that it has at first.

        Returns:
            Their rows by table; nothing without a cache.
        """
        if self.cache is None:
            return []
        starts = row_offsets(self.in_train).tolist()
        each = zip(starts, self._cache_first, strict=True)
        keys = torch.cat([start + torch.arange(count) for start, count in each])
        return self.cache.fill(keys).split(self._cache_first)

    @property
    def _shape(self) -> TTShape:
        """The shape of the tables, for the ops."""
        return TTShape(self._p, self.q, self.ranks)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.exact is None:
            return self._products(tables, ids, context)
        kept = self._kept[tables]
        exact = self.exact.vectors(tables, ids, context)
        return exact + self._products(tables, (ids - kept).clamp(min=0), context, ids < kept)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        tables, kept = self._tables[:, None], self._kept[:, None]
        if self.exact is None:
            return self._products(tables, ids, context).transpose(0, 1)
        rest = self._products(tables, (ids - kept).clamp(min=0), context, ids < kept)
        return self.exact.lookup(ids, context) + rest.transpose(0, 1)

    def _products(
        self, tables: Tensor, ids: Tensor, context: LookupContext, skip: Tensor | None = None
    ) -> Tensor:
        """Rows of the trains, or cached ones; zeros where ``skip`` is set."""
        cores, shape = list(self.cores), self._shape
        if self.cache is None:
            return tt_vectors(cores, shape, tables, ids, skip=skip, dtype=context.dtype)

        slots = self.cache.find(ids + self._row_offsets[tables])
        hits = slots < self.cache.capacity
        skipped = hits if skip is None else hits | skip
        rest = tt_vectors(cores, shape, tables, ids, skip=skipped)
        hits = hits if skip is None else hits & ~skip
        return torch.where(hits[..., None], self.cache.look_up(slots), rest)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        if self.cache is not None or self.exact is not None or self.mode == "max":
            return super().lookup_bags(bags, context)
        found = tt_bags(list(self.cores), self._shape, bags, mode=self.mode, dtype=context.dtype)
        return found.transpose(0, 1)

    @property
    def has_cache(self) -> bool:
        return self.cache is not None

    def observe(self, tables: Tensor, ids: Tensor) -> None:
        if self.cache is not None:
            rest = ids - self._kept[tables]
            counted = None if self.exact is None else rest >= 0
            self.cache.observe(rest.clamp(min=0) + self._row_offsets[tables], counted)

    def cache_stats(self) -> dict[str, int]:
        """Hits and look-ups in training since the last population of the cache, if there is one."""
        return {} if self.cache is None else self.cache.stats()

    @torch.no_grad()
    def cache_populate(self) -> PopulateReport | None:
        """Populate the cache, if there is one, with the rows that are now used most.

        Rows that remain do not change. Evicted rows are written back into the cores by a least
        squares fit, and new rows start with the products of the cores. Call it between two steps,
        and reset the optimizer state of ``report.reset``.
        """
        if self.cache is None:
            return None

        def tables_and_ids(keys: Tensor) -> tuple[Tensor, Tensor]:
            tables = torch.bucketize(keys, self._row_offsets, right=True) - 1
            return tables, keys - self._row_offsets[tables]

        def write(keys: Tensor, rows: Tensor) -> float:
            return fit_rows(list(self.cores), self._shape, *tables_and_ids(keys), rows)

        def read(keys: Tensor) -> Tensor:
            return tt_vectors(list(self.cores), self._shape, *tables_and_ids(keys))

        report = self.cache.populate(read, write)
        reset = {f"cache.{name}": rows for name, rows in report.reset.items()}
        return replace(report, reset=reset)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Decompose dense tables, each ``[V, D]``, by TT-SVD; exact if the rank suffices.

        The shared row becomes the mean of the rows that are not kept, and the train approximates
        the differences. The cache has the same ids as at the start. This takes three times the
        memory of a table.
        """
        self._check_dense(weights)
        cached = self._first_cached()
        if self.exact is not None:
            self.exact.load_dense(weights)

        for table, weight in enumerate(weights):
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            if self.exact is not None:
                shared = self.exact.rows(table, self._sizes[table] - 1)
                wide = wide[self.kept[table] :] - shared.to(wide)
            if cached:
                cached[table].copy_(wide[: len(cached[table])])
            fitted = tt_svd(wide, self.p[table], self.q, self.ranks)
            slices = table_slices([*self.cores], self._shape, table)
            for core, new in zip(slices, fitted, strict=True):
                core.copy_(new)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table; the bytes of the cache are shared in proportion to the rows."""
        size = self.cores[0].element_size()
        parts = [{"weights": tt_weights(p, self.q, self.ranks) * size} for p in self.p]
        for part, exact in zip(parts, self.exact.footprint() if self.exact else (), strict=False):
            part["exact"] = exact["weights"]
        if self.cache is not None:
            shares = split_by_rows(self.cache.nbytes(), self.num_embeddings)
            for part, share in zip(parts, shares, strict=True):
                part["cache"] = share
        return parts

    @classmethod
    def for_budget(
        cls,
        budget: Budget,
        *,
        d: int = 3,
        q: list[int] | None = None,
        p: list[int] | None = None,
        keep: int | None = None,
        cache_rows: int = 0,
        cache_first: int | None = None,
        cache_window: int | None = None,
        cache_decay: float = 0.8,
    ) -> list[dict[str, Any] | None]:
        """Options within a budget: exact rows for the ids that are most frequent in all tables
        together, and trains for the others, in a fixed proportion of bytes.
        """
        left = budget.size
        if cache_rows:
            rows = sum(budget.num_embeddings), cache_rows, budget.embedding_dim
            with torch.device("meta"):
                cache = RowCache(*rows, decay=cache_decay, window=cache_window, sparse=True)
            left = without_cache(left, cache if budget.dtype == "fp32" else cache.bfloat16())

        # The exact rows and the rank.
        qs = tuple(q) if q else factorize_dim(budget.embedding_dim, d)
        planner = Planner(budget, left, d, qs, p)
        if keep is None:
            found = planner.best()
        else:
            exact = num_kept_of(budget.num_embeddings, keep, cls.kind())
            found = planner.fit([kept - 1 for kept in exact])

        options: list[dict[str, Any] | None] = [None] * len(budget.num_embeddings)
        for table in found.compressed:
            options[table] = {"rank": found.rank, "keep": found.keep[table]}
        if cache_rows:
            first = planner.next_frequent(found, cache_rows)
            for option, number in zip(options, first, strict=True):
                if option is not None:
                    option["cache_first"] = number if cache_first is None else cache_first
        return options

    def extra_repr(self) -> str:
        """Also the ranks and factors."""
        return f"{super().extra_repr()}, ranks={list(self.ranks)}, q={list(self.q)}, p={self.p}"
