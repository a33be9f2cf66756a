"""The arguments of a model, from a configuration and the data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypedDict, cast

from dlrm.config.schema import RunConfig
from dlrm.data.frequencies import IdStatistics
from dlrm.data.schema import Meta
from dlrm.sparse_arch.auto import expected_loss
from dlrm.sparse_arch.table_plan import AUTO, TablePlan, make_table_plan, owners_of, with_pooling


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


def model_spec(config: RunConfig, meta: Meta, ids: IdStatistics) -> ModelSpec:
    """The arguments of the model that a configuration describes, for the tables of the data.

    Args:
        config: of the run.
        meta: of its data.
        ids: how often ids occur and what they say about the label, if a budget depends on it.
    """
    tables = asdict(config.tables)
    tables.pop("dtype")
    pooling, share = tables.pop("pooling"), tables.pop("share")
    dtype = config.tables_dtype

    # Which kind each table has, and its size.
    plan = make_table_plan(
        meta.tables,
        meta.cardinalities,
        config.model.embedding_dim,
        config.emb,
        options=config.methods,
        **tables,
        budget=config.budget,
        counts=ids.counts,
        effects=ids.effects,
        dtype=dtype,
        ordered=not meta.extends,
        trained=config.init_from is not None,
        owners=meta.owners if share else None,
    )
    lists = [column.name for column in meta.categorical if column.multi_hot]
    plan = with_pooling(plan, meta.tables, lists, pooling)

    shape = asdict(config.model)
    shape.pop("dropout")  # of training alone
    spec = {
        "num_dense": len(meta.dense),
        "num_embeddings": list(meta.cardinalities),
        "tables_dtype": dtype,
        "plan": plan,
        **shape,
    }
    return cast(ModelSpec, spec)


def auto_plan(config: RunConfig, spec: ModelSpec, tables: str, ids: IdStatistics) -> str:
    """The text that ``--emb auto`` prints: its plan, and the loss that it expects; empty for
    other kinds.

    Args:
        config: of the run.
        spec: of its model.
        tables: the plan as text.
        ids: how often ids occur and what they say about the label.
    """
    if config.emb != AUTO:
        return ""
    dim, dtype = spec["embedding_dim"], spec["tables_dtype"]
    plan = [spec["plan"][table] for table in owners_of(spec["plan"])]
    lost = expected_loss(plan, spec["num_embeddings"], dim, ids.counts(), ids.effects(), dtype)
    text = (
        f"{tables}\nauto expects a log loss {lost:.4f} higher than that of full tables, by how "
        "often their ids occur and what they say about the label"
    )
    if not ids.meta.effects:
        text += (
            f"\n{config.data} does not have what its ids say: it was estimated from training rows; "
            "data that is prepared again has it"
        )
    return text
