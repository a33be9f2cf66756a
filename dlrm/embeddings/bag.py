"""A drop-in for ``torch.nn.EmbeddingBag`` whose table is of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, nn

from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.dense import Dense
from dlrm.embeddings.registry import build
from dlrm.kernels.update.packed import BITS
from dlrm.utils.bags import check_weights


class EmbeddingBag(nn.Module):
    """A drop-in for ``torch.nn.EmbeddingBag`` whose table is of any kind.

    ``EmbeddingBag(V, D)`` behaves like ``nn.EmbeddingBag(V, D)``;
    ``EmbeddingBag(V, D, kind="tt", rank=32)`` does the same with a table in tensor-train format.
    Both load the ``state_dict`` of an ``nn.EmbeddingBag`` and fit their table to its rows.

    Args:
        num_embeddings: rows ``V``.
        embedding_dim: length ``D`` of a row.
        mode, sparse, include_last_offset, padding_idx: as in ``nn.EmbeddingBag``.
        kind: the embedding kind, one of ``dlrm.embeddings.available()``.
        device, dtype: of the parameters; with ``sparse``, dtype may also be ``"int8"`` or
            ``"int4"``, see :mod:`dlrm.kernels.update.packed`.
        options: the options of the kind, such as ``rank`` of tt.

    Raises:
        ValueError: an option that the kind does not have, or ``max_norm`` or
            ``scale_grad_by_freq``, which no kind supports.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        kind: str = "dense",
        **options: Any,
    ) -> None:
        super().__init__()
        if max_norm is not None or scale_grad_by_freq:
            raise ValueError("max_norm and scale_grad_by_freq are not supported by any kind")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(f"padding_idx {padding_idx} is outside {num_embeddings} rows")
            padding_idx %= num_embeddings

        packed = str(dtype).removeprefix("torch.") in BITS  # not every PyTorch has torch.int4
        common: dict[str, Any] = {"mode": mode, "sparse": sparse, "padding_idx": padding_idx}
        common["dtype"] = str(dtype).removeprefix("torch.") if packed else None
        self.embedding = build(kind, [num_embeddings], embedding_dim, **common, **options)

        if _weight is not None:
            self.embedding.to(_weight).load_dense([_weight])
        elif padding_idx is not None and isinstance(self.embedding, Dense):  # others share rows
            with torch.no_grad():
                for _, row in self.embedding.rows_to_write(0, padding_idx, padding_idx + 1):
                    row.zero_()
        floating = dtype if isinstance(dtype, torch.dtype) and not packed else None
        self.embedding.to(device=device, dtype=floating)

        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, *, kind: str = "dense", **options: Any
    ) -> Self:
        """An embedding of any kind that starts from the rows of ``embeddings [V, D]``.

        Raises:
            ValueError: ``embeddings`` is not a matrix.
        """
        if embeddings.dim() != 2:
            raise ValueError(f"embeddings have {embeddings.dim()} dimensions, they must be [V, D]")
        rows, dim = embeddings.shape
        bag = cls(rows, dim, _weight=embeddings, kind=kind, **options)
        return bag.requires_grad_(not freeze)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        context: LookupContext = NO_CONTEXT,
    ) -> Tensor:
        """Look up and pool bags.

        Args:
            input: ids, ``[B, L]`` (bags of equal length) or ``[nnz]`` with ``offsets``.
            offsets: start of each bag, ``[B]``, or ``[B + 1]`` with ``include_last_offset``.
            per_sample_weights: a factor for each id, shaped like ``input``; mode sum only.
            context: what a training step prepared for these look-ups.

        Returns:
            ``[B, D]``.

        Raises:
            ValueError: offsets or weights do not match the ids.
            IndexError: an id is outside the table.
        """
        check_weights(per_sample_weights, input, self.mode)
        if per_sample_weights is not None:
            # A replica made by nn.DataParallel has plain tensors in place of parameters. Cores of
            # tensor trains are in bf16 next to packed rows, and the sum of both is in fp32.
            dtypes = [parameter.dtype for parameter in self.embedding.parameters()]
            dtype = reduce(torch.promote_types, dtypes or [per_sample_weights.dtype])
            if per_sample_weights.dtype != dtype:
                raise ValueError(
                    f"per_sample_weights are {per_sample_weights.dtype}, they must be {dtype} like "
                    "the rows"
                )

        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None for 2-D input: its rows are the bags")
            offsets = input.shape[1] * torch.arange(len(input) + 1, device=input.device)
            input = input.reshape(-1)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(-1)
        elif input.dim() == 1:
            offsets = self._with_last(input, offsets)
        else:
            raise ValueError(f"input has {input.dim()} dimensions, it must have 1 or 2")

        return self.embedding(input, offsets, per_sample_weights, context=context)[:, 0]

    def _with_last(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """The offsets, the end of the last bag included."""
        if offsets is None or offsets.dim() != 1:
            raise ValueError("1-D input needs 1-D offsets: the start of each bag")
        if self.include_last_offset and not offsets.numel():
            raise ValueError("with include_last_offset, offsets need at least the last offset")
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([input.numel()])])
        return offsets

    @property
    def weight(self) -> Tensor:
        """The full table, ``[V, D]``: the parameter of the dense kind, a copy for other kinds and
        packed rows.
        """
        dense = self.embedding.kind() == "dense" and self.embedding.dtype is None
        return self.embedding.get_parameter("weight") if dense else self.embedding.to_dense()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        """Also loads the full table that ``nn.EmbeddingBag`` saves as ``weight``."""
        if (weight := state_dict.pop(f"{prefix}weight", None)) is not None:
            own = next(self.embedding.parameters())
            if own.is_meta:
                raise ValueError(
                    f"{prefix}weight can't be fitted to a table on the meta device: create the "
                    "EmbeddingBag on a real device"
                )
            self.embedding.load_dense([weight.to(own)])
            state_dict.update(self.embedding.state_dict(prefix=f"{prefix}embedding."))
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    def footprint(self) -> Mapping[str, int]:
        """Bytes by part."""
        return self.embedding.footprint()[0]
