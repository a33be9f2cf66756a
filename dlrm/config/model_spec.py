"""The arguments of a model, from a configuration and the data it is for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dlrm.config.schema import RunConfig
from dlrm.data.frequencies import read_frequencies
from dlrm.data.schema import Meta
from dlrm.model import WEIGHT_BYTES
from dlrm.sparse_arch.table_plan import make_table_plan


def model_spec(config: RunConfig, meta: Meta) -> dict[str, Any]:
    """The arguments of the model, as the checkpoint keeps them."""
    tables = asdict(config.tables)
    dtype = tables.pop("dtype")
    return {
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
            weight_bytes=WEIGHT_BYTES[dtype],
        ),
        **asdict(config.model),
    }
