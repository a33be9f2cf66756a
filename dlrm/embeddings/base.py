"""The one contract of every embedding kind."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor

from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.packed import PacksRows
from dlrm.embeddings.common.row_caches import CachesHotRows
from dlrm.kernels import require_integers
from dlrm.kernels.lookup.pool import MODES, pool_bags_torch
from dlrm.utils.bags import Bags, check_weights


class Common(TypedDict, total=False):
    """The arguments that every kind passes on to :class:`Embedding`."""

    mode: str
    padding_idx: int | None
    sparse: bool
    check_ids: bool
    dtype: str | None


class Embedding(PacksRows, ABC):
    """A group of ``F`` tables looked up together, all of embedding dim ``D``.

    A kind is a subclass with one abstract method to fill, :meth:`vectors`. Its keyword-only
    constructor arguments are its options: their annotations, defaults and help texts become the
    ``--<kind>.<option>`` arguments of the command line.

    Args:
        num_embeddings: rows ``V`` of each table.
        embedding_dim: length ``D`` of a row.
        mode: how the rows of a bag become one vector: sum, mean or max.
        padding_idx: rows of this id do not take part in a bag and get no gradient.
        sparse: row gradients are sparse COO tensors, one entry per look-up, and no dense gradient
            of a table is made. Small parameters (TT cores, projections) have dense gradients.
        check_ids: raise on ids outside their table. Costs a pass over the ids; turn it off if they
            are checked elsewhere, as by the loader.
        dtype: ``int8`` or ``int4`` keeps packed rows (:mod:`dlrm.kernels.update.packed`), which
            take sparse gradients only; of int4 one row in eight, those of the first ids, has 8
            bits. None: parameters as ``torch`` has them.

    Raises:
        ValueError: an argument out of range, or packed rows of a kind that has none.
    """

    per_table: ClassVar[frozenset[str]] = frozenset()
    """Options that may be a list with a value for each table, so that tables which differ only in
    these form one group."""
    of_speed: ClassVar[frozenset[str]] = frozenset()
    """Options that change nothing but the speed: a run may be resumed with others."""
    captures_bags: bool = False
    """Whether a captured step can look up bags, padded ones included: ``LookupContext.padded``."""
    budget_by_counts: ClassVar[bool] = False
    """Whether :meth:`for_budget` uses how often each id occurs."""
    by_frequency: ClassVar[bool] = False
    """Whether a row depends on the order of the ids, which must be of falling frequency."""
    trains_from_fit: ClassVar[bool] = True
    """Whether tables that :meth:`load_dense` fitted learn as much as new ones in an epoch. Where
    the fit loses much they do not (``benchmarks/fine_tuning_sample.json``)."""
    any_ids: ClassVar[bool] = False
    """Whether ids may be any integers, of which nobody knows how many there are."""
    grows: ClassVar[bool] = False
    """Whether every id has a row of its own, so that rows can be added and the others stay."""

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        mode: str = "sum",
        padding_idx: int | None = None,
        sparse: bool = True,
        check_ids: bool = True,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        if not num_embeddings or min(num_embeddings) < 1:
            raise ValueError(f"every table needs at least one row, got {list(num_embeddings)}")
        if embedding_dim < 1:
            raise ValueError(f"embedding_dim must be at least 1, got {embedding_dim}")
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, it must be one of {', '.join(MODES)}")
        self._set_dtype(dtype, sparse)
        self.num_embeddings = tuple(int(rows) for rows in num_embeddings)
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.padding_idx = padding_idx
        self.sparse = sparse
        self.check_ids = check_ids
        self.register_buffer("_sizes", torch.tensor(self.num_embeddings)[:, None], persistent=False)
        self.register_buffer("_tables", torch.arange(len(self.num_embeddings)), persistent=False)
        self._sizes: Tensor  # [F, 1]
        self._tables: Tensor  # [F]

    # What a kind fills in ---------------------------------------------------------------------

    @abstractmethod
    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        """Look up one row per id, without pooling.

        Args:
            tables: table of each id, an integer tensor that broadcasts against ``ids``.
            ids: any integer tensor ``[...]``; every id is inside its table.
            context: what a training step prepared for its look-ups; ops get its ``sorter``.

        Returns:
            The rows, ``[..., D]``.
        """

    @abstractmethod
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Fit the parameters to dense tables, each ``[V, D]``, as well as the kind allows.

        Raises:
            ValueError: the tables have other shapes than this group's.
        """

    @abstractmethod
    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table by part (weights, codes, cache, index), nothing left out."""

    @classmethod
    def for_budget(cls, budget: Budget) -> list[dict[str, Any] | None]:
        """Choose the options that come closest to a budget from below.

        Returns:
            For each table the options of this kind, or None if the table should stay dense.

        Raises:
            ValueError: no options of this kind fit into the budget.
        """
        raise ValueError(
            f"--emb {cls.kind()} takes no budget; --emb drop keeps as many rows as fit into one"
        )

    @classmethod
    def options_on_this_machine(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of trained tables with the devices of this machine."""
        return dict(options)

    # What every kind has ----------------------------------------------------------------------

    @classmethod
    def kind(cls) -> str:
        """The value of ``--emb``: the name of the file that defines the kind."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The kind's own options: its keyword-only arguments that the contract does not have."""
        common = inspect.signature(Embedding.__init__).parameters
        own = inspect.signature(cls.__init__).parameters
        return {
            name: parameter
            for name, parameter in own.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in common
        }

    @classmethod
    def from_dense(cls, weights: Sequence[Tensor], **options: Any) -> Self:
        """Compress trained tables: a group of this kind fitted to ``weights``, each ``[V, D]``,
        with the device and dtype of the first.
        """
        group = cls([len(w) for w in weights], weights[0].shape[1], **options)
        group.to(weights[0]).load_dense(weights)
        return group

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        meta = self._sizes.is_meta
        super()._apply(fn, recurse)
        if meta and not self._sizes.is_meta:  # by to_empty: no state dict has these buffers
            raise ValueError(
                "tables from the meta device lack their index: create them on a real device"
            )
        return self

    @property
    def num_tables(self) -> int:
        """Number of tables F."""
        return len(self.num_embeddings)

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Materialise rows of one table: ``ids [...]`` to ``[..., D]``.

        Raises:
            IndexError: an id is outside the table.
        """
        tables = self._tables[table]
        self._check(tables, ids)
        return self.vectors(tables, ids.long())  # of all tables together there may be 2^31 rows

    @torch.no_grad()
    def to_dense(self, table: int = 0, *, chunk: int = 1 << 16) -> Tensor:
        """One table in full, ``[V, D]``, made ``chunk`` rows at a time."""
        rows = self.num_embeddings[table]
        like = self.vectors(self._tables[table], self._tables[:1] * 0)
        out = like.new_empty(rows, self.embedding_dim)
        for start in range(0, rows, chunk):
            ids = torch.arange(start, min(start + chunk, rows), device=out.device)
            out[start : start + chunk] = self.vectors(self._tables[table], ids)
        return out

    def forward(
        self,
        ids: Tensor | Bags,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        context: LookupContext = NO_CONTEXT,
    ) -> Tensor:
        """Look up and pool.

        Args:
            ids: ``[F, B]``, one id per table and sample; or, with ``offsets``, ``[nnz]``: the ids
                of all bags, table by table; or :class:`~dlrm.utils.bags.Bags`, which have all
                three.
            offsets: ``[F * B + 1]``, where each bag begins in ``ids``.
            per_sample_weights: a factor per id, of the shape of ``ids``; mode sum only.
            context: what a training step prepared for these look-ups.

        Returns:
            ``[B, F, D]``, zeros for an empty bag.

        Raises:
            ValueError: wrong shapes, or weights with mean or max, or offsets that do not rise from
                0 to nnz (with ``check_ids``).
            IndexError: an id is outside its table (with ``check_ids``).
        """
        if torch.compiler.is_dynamo_compiling():  # which can't trace how kernels are launched
            plain = torch.compiler.disable(self.forward)
            return plain(ids, offsets, per_sample_weights, context=context)
        if isinstance(ids, Bags):
            return self.forward(ids.ids, ids.offsets, ids.weights, context=context)
        check_weights(per_sample_weights, ids, self.mode)

        if offsets is not None:
            return self._bags(Bags(ids, offsets, per_sample_weights), context)
        if ids.dim() != 2 or ids.shape[0] != self.num_tables:
            raise ValueError(
                f"ids have shape {tuple(ids.shape)}, without offsets they must be "
                f"[{self.num_tables}, B]: one row per table"
            )
        if self.padding_idx is not None:
            return self._bags(Bags.one_each(ids, per_sample_weights), context)
        return self._one_hot(ids, per_sample_weights, context)

    def _one_hot(self, ids: Tensor, weights: Tensor | None, context: LookupContext) -> Tensor:
        if self.check_ids:
            self._check(self._tables[:, None], ids)
        self._observe(ids, context)
        out = self.lookup(ids, context)  # [B, F, D]
        return out if weights is None else out * weights.t()[..., None]

    def _bags(self, bags: Bags, context: LookupContext) -> Tensor:
        ids, offsets, count = bags.ids, bags.offsets, bags.count
        if ids.dim() != 1 or offsets.dim() != 1 or count < 0 or count % self.num_tables:
            raise ValueError(
                f"with offsets, ids must be [nnz] and offsets [{self.num_tables} * B + 1]; got "
                f"{tuple(ids.shape)} and {tuple(offsets.shape)}"
            )
        if self.check_ids:
            require_integers(self._sizes, offsets=offsets)
            bags.check_offsets()
            self._check(bags.tables(self.num_tables), ids)

        if self.padding_idx is not None:
            bags = bags.without(self.padding_idx)
        self._observe(bags, context)
        return self.lookup_bags(bags, context)

    def _observe(self, ids: Tensor | Bags, context: LookupContext) -> None:
        """Count the ids of a training batch over all processes, if this kind counts them."""
        if self.training and isinstance(self, CachesHotRows) and self.has_cache:
            tables = self._tables[:, None]
            if isinstance(ids, Bags):
                tables, ids = ids.tables(self.num_tables), ids.ids
            if context.gather_ids is not None:
                tables, ids, _ = context.gather_ids(tables, ids)
            self.observe(tables, ids)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        """One row per table and sample: ``ids [F, B]``, checked, to ``[B, F, D]``."""
        return self.vectors(self._tables, ids.t(), context)

    def lookup_bags(self, bags: Bags, context: LookupContext = NO_CONTEXT) -> Tensor:
        """Pool the rows of bags, whose ids are checked, to ``[B, F, D]``."""
        own_type = replace(context, dtype=None)  # rows are summed before they are rounded
        vectors = self.vectors(bags.tables(self.num_tables), bags.ids, own_type)
        return pool_bags_torch(vectors, bags, self.num_tables, self.mode)

    def _check(self, tables: Tensor, ids: Tensor) -> None:
        """Raise on ids outside their table; on a GPU the check stays asynchronous."""
        require_integers(self._sizes, ids=ids)
        bad = (ids < 0) | (ids >= self._sizes[tables, 0])
        if bad.is_cuda:
            torch._assert_async(~bad.any())
        elif bad.any():
            table = int(tables.expand_as(ids)[bad][0])
            raise IndexError(
                f"id {int(ids[bad][0])} of table {table} is outside "
                f"[0, {self.num_embeddings[table]})"
            )

    def _check_dense(self, weights: Sequence[Tensor]) -> None:
        """Raise unless there is one dense table of the right shape for every table."""
        given = [tuple(weight.shape) for weight in weights]
        expected = [(rows, self.embedding_dim) for rows in self.num_embeddings]
        if given != expected:
            raise ValueError(f"dense tables have shapes {given}, they must have {expected}")

    def extra_repr(self) -> str:
        """Tables, rows and dim for ``print(model)``."""
        return (
            f"tables={self.num_tables}, rows={sum(self.num_embeddings)}, dim={self.embedding_dim}"
        )
