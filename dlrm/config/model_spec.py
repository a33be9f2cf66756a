"""The arguments of a model, from a configuration and the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TypedDict, cast

import torch

from dlrm.config.schema import RunConfig
from dlrm.data.frequencies import IdStatistics
from dlrm.data.schema import Meta
from dlrm.embeddings.common.budget import MANY_IDS, row_bytes
from dlrm.kernels.update.rules import OPTIONS
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import (
    AUTO,
    KnownIds,
    TablePlan,
    make_table_plan,
    parse_bytes,
    with_pooling,
)
from dlrm.utils.messages import print_error

WIDE = 512  # tables; the top MLP would have a weight or more for each pair and unit: gigabytes

UNCOMPRESSED = ("dense", "paged", "offload")
"""Kinds that store tables as they are."""


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
    # Three of the options are no arguments of a table plan.
    tables = asdict(config.tables)
    tables.pop("dtype")
    pooling, share = tables.pop("pooling"), tables.pop("share")
    dtype = config.tables_dtype

    # Which kind each table has, and its size.
    make_plan = partial(
        make_table_plan,
        meta.tables,
        meta.cardinalities,
        config.model.embedding_dim,
        config.emb,
        options=config.methods,
        **tables,
        dtype=dtype,
        ids=KnownIds(
            counts=ids.counts,
            effects=ids.effects,
            values=[column.values for column in meta.categorical],
            ordered=not meta.extends,
            owners=meta.owners if share else None,
        ),
        trained=config.init_from is not None,
    )
    if config.budget is not None and config.budget_counts == "training":
        plan = _plan_with_state(config, meta, config.budget, make_plan)
    else:
        plan = make_plan(budget=config.budget)

    # How lists are pooled.
    lists = [column.name for column in meta.categorical if column.multi_hot]
    plan = with_pooling(plan, meta.tables, lists, pooling)

    # The MLPs and the interaction.
    shape = asdict(config.model)
    shape.pop("dropout")  # of training alone
    wide = len(meta.tables) > WIDE
    shape["interaction"] = config.model.interaction or ("dcn" if wide else "dot")
    shape["cross_rank"] = config.model.cross_rank or (64 if wide else 512)
    spec = {
        "num_dense": len(meta.dense),
        "num_embeddings": list(meta.cardinalities),
        "tables_dtype": dtype,
        "plan": plan,
        **shape,
    }
    return cast(ModelSpec, spec)


def _plan_with_state(
    config: RunConfig, meta: Meta, budget: str, make_plan: Callable[..., TablePlan]
) -> TablePlan:
    """The plan of tables that fit into a budget together with the state of their optimizer."""
    rule, dim = config.optim.embeddings, config.model.embedding_dim
    options = {name: v for name, v in config.optim.rule_options.items() if name in OPTIONS[rule]}

    def trained_bytes(plan: TablePlan, dtype: str) -> int:
        with torch.device("meta"):
            arch = SparseArch(meta.cardinalities, dim, plan, dtype=dtype)
            state = RowOptimizer(arch.parameters(), rule, lr=0.0, **options)
        rows = sum(sum(table.values()) for table in arch.footprint())
        return rows + state.state_bytes(arch.parameters())

    limit = parse_bytes(budget, trained_bytes([("dense", {})] * len(meta.tables), "fp32"))
    served = limit
    while True:
        plan = make_plan(budget=str(served))
        needed = trained_bytes(plan, config.tables_dtype)
        if needed <= limit:
            return plan
        served = int(0.999 * served * limit / needed)


def auto_plan(config: RunConfig, meta: Meta, tables: str) -> str:
    """The text that ``--emb auto`` prints; empty for other kinds.

    Args:
        config: of the run.
        meta: of its data.
        tables: the plan as text.
    """
    if config.emb != AUTO:
        return ""
    if meta.effects:
        return tables
    return (
        f"{tables}\n{config.data} does not have what its ids say: it was estimated from training "
        "rows; data that is prepared again has it"
    )


def note_plan(config: RunConfig, spec: ModelSpec, compression: float) -> None:
    """Print what may be unexpected in a model and its table plan.

    These are options of the kind that have no effect, because a budget sets them; a kind that
    compresses nothing on this data; and an interaction that many tables choose.

    Args:
        config: of the run.
        spec: of its model.
        compression: how many times larger dense tables in fp32 are.
    """
    of_kind = [options for kind, options in spec["plan"] if kind == config.emb]
    for name, value in config.methods.get(config.emb, {}).items():
        if config.budget and of_kind and all(options.get(name) != value for options in of_kind):
            option = f"--{config.emb}.{name}"
            print_error(f"note: {option} has no effect, --budget sets it")

    # Nobody knows how many rows dense tables of hashed ids would have.
    dim = spec["embedding_dim"]
    without = 4 * dim / row_bytes(dim, config.tables_dtype)
    bounded = max(spec["num_embeddings"]) < MANY_IDS
    if config.emb not in UNCOMPRESSED and bounded and compression <= without:
        why = "its tables are no smaller than dense ones; try --budget 10x"
        if config.budget:
            why = "dense tables fit into --budget; lower it"
        elif not of_kind:
            largest = max(spec["num_embeddings"])
            why = f"no table is of that kind, as the largest has {largest:,} rows; lower "
            why += "--tables.threshold, or try --budget 10x"
        print_error(f"note: --emb {config.emb} compresses nothing here: {why}")

    if config.model.interaction is None and spec["interaction"] == "dcn":
        print_error(
            f"note: {len(spec['plan']):,} tables interact by a cross network of rank "
            f"{spec['cross_rank']}, as the dot products of all pairs would take most of the memory "
            "(--model.interaction dot, --model.cross_rank)"
        )
