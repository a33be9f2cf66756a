"""Tables whose rows are weights as they stand: ids have rows of their own, or share those kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.bags import row_offsets
from dlrm.kernels.lookup.bags import lookup_bags
from dlrm.kernels.lookup.tables import lookup, lookup_tables


class SharedRows(Embedding):
    """The kept rows of all tables behind one another in one weight ``[sum(kept), D]``.

    A kind says how many rows a table keeps, which row an id has, and what becomes of a dense table.

    Args:
        kept: rows of each table.
        shared: ids have the row of their remainder by ``kept`` (modulo), or all from the last row
            on share that (last); None: each has its own.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        kept: Sequence[int],
        *,
        shared: Literal["modulo", "last"] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        self.kept_rows = tuple(kept)
        self.weight = nn.Parameter(torch.empty(sum(self.kept_rows), embedding_dim))
        rows = torch.tensor(self.kept_rows)
        self.register_buffer("_offsets", row_offsets(self.kept_rows), persistent=False)
        self.register_buffer("_modulo", rows if shared == "modulo" else None, persistent=False)
        self.register_buffer("_last", rows - 1 if shared == "last" else None, persistent=False)
        self._offsets: Tensor  # [F]
        self._modulo: Tensor | None  # [F]
        self._last: Tensor | None  # [F]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew, U(-1/sqrt(V), 1/sqrt(V)) for a table of V ids."""
        for table, rows in zip(self.num_embeddings, self.weight.split(self.kept_rows), strict=True):
            nn.init.uniform_(rows, -(table**-0.5), table**-0.5)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        if self._modulo is not None:
            ids = ids % self._modulo[tables]
        if self._last is not None:
            ids = ids.minimum(self._last[tables])
        return lookup(self.weight, ids + self._offsets[tables], sparse=self.sparse)

    def lookup(self, ids: Tensor) -> Tensor:
        return lookup_tables(
            self.weight,
            self._offsets,
            ids,
            modulo=self._modulo,
            last=self._last,
            sparse=self.sparse,
        )

    def lookup_bags(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        if self.mode == "max" and not self.weight.is_cuda:
            # PyTorch's embedding_bag would make a dense gradient of the table.
            return super().lookup_bags(ids, offsets, weights)
        return lookup_bags(
            self.weight,
            self._offsets,
            ids,
            offsets,
            per_sample_weights=weights,
            mode=self.mode,
            modulo=self._modulo,
            last=self._last,
            sparse=self.sparse,
        )

    def footprint(self) -> list[dict[str, int]]:
        row = self.embedding_dim * self.weight.element_size()
        return [{"weights": rows * row} for rows in self.kept_rows]


def kept_rows(
    num_embeddings: Sequence[int], keep: int | Sequence[int] | None, kind: str
) -> tuple[int, ...]:
    """Rows of each table of which only the first ``keep`` ids have their own, the others one.

    Args:
        num_embeddings: ids of each table.
        keep: for all tables or for each; None keeps all.
        kind: the embedding kind, for the message.

    Raises:
        ValueError: a negative number, or not one for each table.
    """
    if keep is None:
        return tuple(num_embeddings)
    each = [keep] * len(num_embeddings) if isinstance(keep, int) else keep
    valid = all(isinstance(own, int) and own >= 0 for own in each)
    if not valid or len(each) != len(num_embeddings):
        raise ValueError(
            f"{kind} keep is {keep}: set --{kind}.keep to a number of ids, 0 or more; in code it "
            f"may be a list of one for each of the {len(num_embeddings)} tables"
        )
    return tuple(min(table, own + 1) for table, own in zip(num_embeddings, each, strict=True))
