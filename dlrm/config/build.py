"""A model and its optimizers, from a configuration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from dlrm.config.model_spec import ModelSpec
from dlrm.config.schema import OptimConfig, RunConfig
from dlrm.data.frequencies import Counts
from dlrm.data.schema import Meta
from dlrm.distributed.sharding_plan import ShardingPlan, make_sharding_plan
from dlrm.distributed.world import World
from dlrm.embeddings.common.budget import MANY_IDS
from dlrm.kernels.update.rules import OPTIONS, make_rule
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer

RATES = {
    "sgd": (0.1, 10.0),
    "adagrad": (0.015, 0.015),
    "rowwise_adagrad": (0.015, 0.015),
    "adam": (0.001, 0.003),
    "adamw": (0.001, 0.003),
    "rmsprop": (0.001, 0.003),
    "adamax": (0.015, 0.015),
    "adadelta": (1.0, 3.0),
}
"""Default learning rates of the dense part and of the embeddings by rule, good ones for an epoch of
real rows, where those of SGD are stable with momentum too."""

LARGE = 1 << 26
"""Numbers in the rows of all ids. To draw so many in host memory takes a quarter of a second."""


def build_model(
    config: RunConfig, spec: ModelSpec, meta: Meta, world: World, counts: Counts
) -> tuple[DLRM, ShardingPlan | None]:
    """The model of a run on the device of this process, and how its tables are sharded, if so.

    Args:
        config: of the run.
        spec: the arguments of the model.
        meta: of the data.
        world: the processes.
        counts: how often each id occurs, for shards of multi-hot tables.
    """
    rule, options = config.optim.embeddings, asdict(config.sharding)
    known = counts if meta.multi_hot and max(meta.cardinalities) < MANY_IDS else None
    sharding = make_sharding_plan(world, meta.tables, spec, known, rule, **options)

    # The same rows on any device; but large tables are drawn where they will be, unless GPUs of
    # several kinds would draw others in each process.
    device, large = world.device, sum(meta.cardinalities) * spec["embedding_dim"] > LARGE
    kinds = world.from_all(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    with device if large and len(set(kinds)) == 1 else torch.device("cpu"):
        model = DLRM(**spec, sharding=sharding, dropout=config.model.dropout)
    return model.to(device), sharding


def weight_odds(config: RunConfig, meta: Meta) -> float:
    """The odds of a positive by weight, divided by those by rows, if they are accounted for.

    Raises:
        ValueError: weights are to be accounted for, and there are none.
    """
    if config.true_odds and meta.weight is None:
        raise ValueError(
            f"--true_odds accounts for sample weights, but {config.data} has none: leave it out"
        )
    return (config.true_odds and meta.weight_ratio) or 1.0


def optimizer_specs(optim: OptimConfig) -> list[tuple[str, float, dict[str, Any]]]:
    """Rule, learning rate and options of the dense part, and of the embeddings.

    Raises:
        ValueError: an option that neither rule uses, or a value out of range.
    """
    given, rules = optim.rule_options, (optim.dense, optim.embeddings)
    idle = [name for name in given if not any(name in OPTIONS[rule] for rule in rules)]
    if idle:
        missing = f"is no option of {' or '.join(dict.fromkeys(rules))}"
        raise ValueError("; ".join(f"{name} is set, but it {missing}" for name in idle))
    specs = []
    for rule, lr in zip(rules, _learning_rates(optim), strict=True):
        options = {name: value for name, value in given.items() if name in OPTIONS[rule]}
        make_rule(rule, **options)
        specs.append((rule, lr, options))
    return specs


def _learning_rates(optim: OptimConfig) -> tuple[float, float]:
    """Those of the dense part and of the embeddings."""
    dense, embeddings = RATES[optim.dense][0], RATES[optim.embeddings][1]
    if optim.lr is not None:
        dense = embeddings = optim.lr
    return dense, embeddings if optim.embeddings_lr is None else optim.embeddings_lr


def build_optimizers(optim: OptimConfig, model: DLRM) -> list[RowOptimizer]:
    """The optimizers of the dense part and of the embeddings.

    Raises:
        ValueError: as for :func:`optimizer_specs`.
    """
    parts = model.dense_parameters(), model.sparse_arch.parameters()
    specs = zip(parts, optimizer_specs(optim), strict=True)
    return [RowOptimizer(part, rule, lr=lr, **options) for part, (rule, lr, options) in specs]
