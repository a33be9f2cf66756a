"""The sizes of a model that a manifest describes, compared with what its files hold.

A manifest that asks for a million layers costs as much as it likes once they are built, so their
number is compared with the number of stored tensors before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from dlrm.training.checkpoint.manifest import Count, StoredTensor
from dlrm.utils.validation import validate

Size = Annotated[Count, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The arguments of :class:`dlrm.model.DLRM` that are sizes, and its plan."""

    num_dense: Count
    num_embeddings: tuple[Size, ...]
    embedding_dim: Size
    plan: tuple[tuple[str, dict[str, Any]], ...]
    bottom_mlp: tuple[Size, ...]
    top_mlp: tuple[Size, ...]
    interaction: str = "dot"
    cross_layers: Count = 0
    cross_rank: Count = 0


def require_stored(spec: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a model with other layers than those that are stored, or more tables than numbers.

    Args:
        spec: the arguments of the model.
        tensors: what is stored, by name.

    Raises:
        ValueError: an argument is of a wrong type, or too few or too many tensors are stored.
    """
    sizes = validate(ModelSizes, spec)
    stored = Counter(name.split(".")[1] for name in tensors if name.startswith("model."))
    described = {
        "bottom_mlp": 2 * (len(sizes.bottom_mlp) + 1),  # a weight and a bias each
        "top_mlp": 2 * (len(sizes.top_mlp) + 1),
        "interaction": 3 * sizes.cross_layers if sizes.interaction == "dcn" else 0,
    }
    for part, count in described.items():
        if count != stored[part]:
            raise ValueError(f"its {part} has {count:,} tensors, its files {stored[part]:,}")

    shapes = [t.shape for name, t in tensors.items() if name.startswith("model.sparse_arch.")]
    numbers, tables = sum(map(math.prod, shapes)), len(sizes.num_embeddings)
    if tables > numbers:
        raise ValueError(f"it has {tables:,} tables, its files {numbers:,} numbers of them")
