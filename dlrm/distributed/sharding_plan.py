"""How tables are spread over many processes: who holds what, and what travels.

:mod:`dlrm.distributed.planner` places the pieces, :mod:`dlrm.distributed.sharded_tables` looks
them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed.peer_memory import in_reach, one_host
from dlrm.distributed.planner import Shard, describe_shards, plan_shards
from dlrm.distributed.world import World
from dlrm.utils.messages import did_you_mean

EXCHANGES = ("auto", "peers", "collective")
# Numbers of a table from which sending rows to and fro pays, in place of summing the gradients of
# all: 12,000 rows of 128, 96,000 of 16. Measured on four H200: Terabyte from 12,000 rows 4.51 ms a
# step, from 50,000 4.86; Kaggle with `tt`, one table of 93,145 sent 1.74 ms, none 1.61.
LARGE = 1_536_000


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How the tables of a model are spread over processes."""

    world: World
    pieces: Sequence[Shard]
    """Of the tables of the model that are not replicated."""
    wire: torch.dtype | None = None
    """Type in which vectors and gradients travel, other than rows that peers read; None: theirs,
    and sums of gradients between peers in fp32 at least."""
    peers: bool = False
    """Whether processes read each other's rows where they lie and write gradients there."""
    text: str = ""
    """The plan, to be read."""


def make_sharding_plan(
    world: World,
    names: Sequence[str],
    spec: Mapping[str, Any],
    counts: Callable[[], Sequence[Tensor]] | None = None,
    rule: str = "sgd",
    *,
    by: str = "auto",
    tables: Mapping[str, str] | None = None,
    threshold: int | None = 0,
    comm_dtype: str = "fp32",
    exchange: str = "auto",
) -> ShardingPlan | None:
    """Decide which tables are held in pieces, and by whom.

    Args:
        world: the processes.
        names: of the features.
        spec: the arguments of the model. Its tables of kind paged, and dense ones, can be held
            in pieces.
        counts: gives how often each id of each table occurs in the data; asked for where there is
            something to place. If None, every table is looked up once a sample.
        rule: of the optimizer of the embeddings, one of ``dlrm.kernels.update.rules.RULES``.
        by: how tables are held, one of ``partition.WAYS``.
        tables: ways of tables by name.
        threshold: dense tables of fewer rows are replicated; None stands for as many rows as have
            ``LARGE`` numbers.
        comm_dtype: fp32 or bf16, see :class:`ShardingPlan`.
        exchange: peers, collective, or auto: peers where GPUs of one host reach each other.

    Returns:
        None where nothing is: with one process, or only replicated tables.

    Raises:
        ValueError: an unknown name, way or exchange, a table of a kind that is not held in pieces
            or whose columns the rule needs together, pages that have devices of their own, or
            peers that can't be.
    """
    num_embeddings, plan = spec["num_embeddings"], spec["plan"]
    _check_exchange(world, exchange)
    _check_devices(world, plan)
    dim = spec["embedding_dim"]
    ways = _ways(names, spec, by, tables or {}, sharded_from(threshold, dim))
    if world.size == 1 or set(ways) == {"replicate"}:
        return None
    whole_rows = rule == "rowwise_adagrad"  # its one sum of a row is of all columns
    if whole_rows and "column" in ways:
        raise ValueError(
            f"--sharding cuts {names[ways.index('column')]} by column, but --optim.embeddings "
            f"{rule} keeps one sum for a whole row: have it by row or table, or use "
            "--optim.embeddings adagrad"
        )
    page = min((o["page_size"] for _, o in plan if "page_size" in o), default=1)
    loads = [float(count.sum()) for count in counts()] if counts else [1.0] * len(names)
    narrow = torch.bfloat16 if comm_dtype == "bf16" else None
    peers = exchange == "peers" or (exchange == "auto" and in_reach(world))
    pieces = plan_shards(
        num_embeddings, dim, world.size, ways=ways, loads=loads,
        page=page, room=_room() if peers else 0, narrow=not whole_rows,
    )  # fmt: skip
    text = describe_shards(pieces, dict(enumerate(names)), loads)
    text += f"\nexchange by {'peers' if peers else 'collectives'}"
    return ShardingPlan(world=world, pieces=pieces, wire=narrow, peers=peers, text=text)


def sharded_from(threshold: int | None, dim: int) -> int:
    """Rows from which dense tables are sharded; see :func:`make_sharding_plan`."""
    return LARGE // dim if threshold is None else threshold


def _ways(
    names: Sequence[str],
    spec: Mapping[str, Any],
    by: str,
    tables: Mapping[str, str],
    threshold: int,
) -> list[str]:
    """How each table is held; arguments as of :func:`make_sharding_plan`."""
    for name in tables:
        if name not in names:
            raise ValueError(
                f"sharding.tables names table {name!r}; the data has {', '.join(names)}"
            )
    ways = []
    for name, rows, (kind, _) in zip(names, spec["num_embeddings"], spec["plan"], strict=True):
        large = kind == "paged" or (kind == "dense" and rows >= threshold)
        way = tables.get(name, by if large else "replicate")
        if way != "replicate" and kind not in ("dense", "paged"):
            raise ValueError(
                f"--sharding.tables has {name} by {way}, but it is of kind {kind}, which is "
                "replicated: drop it there"
            )
        ways.append(way)
    return ways


def _check_devices(world: World, plan: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if world.size > 1 and any(options.get("devices") for _, options in plan):
        raise ValueError(
            "--paged.devices places the pages of one process; under torchrun every process holds "
            "its share where it computes: drop --paged.devices, or start python train.py alone"
        )


def _room() -> int:
    """Weights that every GPU of this host holds in a third of its memory, beside what an optimizer
    keeps for them; whole tables are then quicker than balanced memory.
    """
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return min((gpu.total_memory // 12 for gpu in gpus), default=0)


def _check_exchange(world: World, exchange: str) -> None:
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}{did_you_mean(exchange, EXCHANGES)}")
    if exchange == "peers" and not one_host(world):
        raise ValueError(
            "--sharding.exchange peers needs all processes on one host, these are on several: use "
            "--sharding.exchange collective"
        )
    if exchange == "peers" and world.device.type == "cuda" and not in_reach(world):
        raise ValueError(
            "--sharding.exchange peers needs GPUs that read each other's memory, these can't: use "
            "--sharding.exchange collective"
        )
