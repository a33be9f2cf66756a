"""The arguments of a model, from a configuration and the data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict, cast

from dlrm.config.schema import RunConfig
from dlrm.data.frequencies import read_frequencies
from dlrm.data.schema import Meta
from dlrm.sparse_arch.table_plan import TablePlan, make_table_plan


class ModelSpec(TypedDict):
    """The arguments of :class:`dlrm.model.DLRM`, as a checkpoint stores them."""

    num_dense: int
    num_embeddings: list[int]
    tables_dtype: str
    plan: TablePlan
    embedding_dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    interaction: str
    cross_layers: int
    cross_rank: int


def model_spec(config: RunConfig, meta: Meta) -> ModelSpec:
    """The arguments of the model that a configuration describes, for the tables of the data."""
    tables = asdict(config.tables)
    dtype = tables.pop("dtype")
    spec = {
        "num_dense": len(meta.dense),
        "num_embeddings": list(meta.cardinalities),
        "tables_dtype": dtype,
        "plan": make_table_plan(
            meta.tables,
            meta.cardinalities,
            config.model.embedding_dim,
            config.emb,
            options=config.methods,
            **tables,
            budget=config.budget,
            counts=lambda: read_frequencies(config.data, meta),
            dtype=dtype,
        ),
        **asdict(config.model),
    }
    return cast(ModelSpec, spec)
