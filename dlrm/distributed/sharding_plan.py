"""The sharding of a model over processes: the shards of each, and how rows are exchanged.

:mod:`dlrm.distributed.planner` assigns the shards, :mod:`dlrm.distributed.sharded_tables` looks
them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed.peer_memory import is_linked, on_one_host, peers_accessible
from dlrm.distributed.planner import Shard, describe_shards, plan_shards
from dlrm.distributed.world import World
from dlrm.embeddings.common.dynamic_sizes import index_bytes, shared_rows, slots_of
from dlrm.embeddings.drop import KEEP
from dlrm.embeddings.shared_rows import num_kept_of
from dlrm.kernels.update.packed import BITS
from dlrm.kernels.update.rules import Rule

# Tables are sharded by default from so many weights, 12,000 rows of dim 128 or 96,000 of dim 16;
# where GPUs read each other's memory, from so many rows if these are fewer. Measured on two H200
# with 16,384 and 65,536 samples each: a step of the Kaggle model (dim 16) with auto takes 0.47 and
# 1.25 ms if tables are sharded from 96,000 rows, 0.43 and 1.22 from 20,000, and 0.42 and 1.22 from
# 4,000. A step of the Terabyte model (dim 128) with 65,536 takes 4.23 ms from 2,500 rows; it took
# 4.03 from 12,000, with look-ups sorted ahead.
LARGE, LONG_AT_PEERS = 1_536_000, 20_000
SHARDED = ("dense", "drop", "dynamic", "paged")
WHOLE_ROWS = "rowwise_adagrad"  # the rule with one sum for a row


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The shards of a model's tables, and how processes exchange rows."""

    world: World
    shards: Sequence[Shard]
    """The shards of all tables that are not replicated."""
    comm_dtype: torch.dtype | None = None
    """Type in which vectors and gradients are sent, except rows that peers read. None: their own
    type, but at least fp32 for sums of gradients between peers."""
    peers: bool = False
    """Processes read and write rows in each other's memory."""
    linked: bool = False
    """Processes copy what they exchange to each other's memory."""
    text: str = ""
    """The plan as text."""


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
    """Decide which tables are sharded, and which process holds which shard.

    Args:
        world: the processes.
        names: names of the features.
        spec: the arguments of the model. Tables of the kinds ``SHARDED`` can be sharded.
        counts: returns the number of occurrences of each id of each table; called only if tables
            are sharded. None if every table is looked up once per sample.
        rule: rule of the optimizer of the embeddings, one of ``dlrm.kernels.update.rules.RULES``.
        by: sharding type: auto, replicate, table, row or column.
        tables: sharding types of single tables by name.
        threshold: replicate tables with fewer rows, unless they are paged; None: see
            :func:`sharded_from`.
        comm_dtype: fp32 or bf16, see :class:`ShardingPlan`.
        exchange: peers, collective, or auto: peers if GPUs of one host can access each other. With
            ``counts``, bags are exchanged by collectives.

    Returns:
        None if nothing is sharded: with one process, or if all tables are replicated.

    Raises:
        ValueError: the name of a table is unknown; a table's kind, optimizer rule or
            type does not allow its sharding type; pages have devices; or processes can't access
            each other.
    """
    plan, dim = spec["plan"], spec["embedding_dim"]
    _check_exchange(world, exchange)
    _check_devices(world, plan)
    num_rows, slots = _stored_rows(spec)
    linked = is_linked(world, exchange)
    at_least = sharded_from(threshold, dim, bags=counts is not None, linked=linked)
    given = by, tables or {}, at_least
    types = _sharding_types(names, num_rows, spec, *given)
    if world.size == 1 or set(types) == {"replicate"}:
        return None

    # How processes exchange rows; bags are summed by the holders of their rows.
    narrow = torch.bfloat16 if comm_dtype == "bf16" else None
    peers = linked and counts is None

    # The shards.
    _require_whole_rows(names, types, spec, rule)
    sharded = [own for (_, own), t in zip(plan, types, strict=True) if t != "replicate"]
    packed = any(_dtype_of(own, spec) in BITS for own in sharded)
    page = min((own["page_size"] for _, own in plan if "page_size" in own), default=1)
    known = None if counts is None else counts()
    loads = [1.0] * len(names) if known is None else [float(count.sum()) for count in known]
    shards = plan_shards(
        num_rows, dim, world.size, sharding_types=types, loads=loads, counts=known, page=page,
        room=_room(rule) if linked else 0, column_wise=rule != WHOLE_ROWS and not packed,
    )  # fmt: skip

    text = describe_shards(shards, dict(enumerate(names)), loads, world.size)
    if index := sum(map(index_bytes, slots)):
        text += f"\nevery rank: {index * 1e-6:,.1f} MB, the index of dynamic tables"
    ways = {(False, False): "collectives", (True, False): "copies to peers", (True, True): "peers"}
    text += f"\nexchange by {ways[linked, peers]}"
    return ShardingPlan(
        world=world, shards=shards, comm_dtype=narrow, peers=peers, linked=linked, text=text
    )


def _stored_rows(spec: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The rows that each table stores, and the slots of those that have an index."""
    num_rows = list(spec["num_embeddings"])
    slots = [0] * len(num_rows)
    for table, (kind, options) in enumerate(spec["plan"]):
        if kind == "dynamic":
            (slots[table],) = slots_of([num_rows[table]], options.get("rows"))
            num_rows[table] = slots[table] + shared_rows(slots[table], options.get("shared"))
        elif kind == "drop":
            (num_rows[table],) = num_kept_of([num_rows[table]], options.get("keep", KEEP), kind)
    return num_rows, slots


def _require_whole_rows(
    names: Sequence[str], types: Sequence[str], spec: Mapping[str, Any], rule: str
) -> None:
    """Raise for tables that can't be split by column: their rows have one sum or one scale each."""
    for name, sharding_type, (kind, options) in zip(names, types, spec["plan"], strict=True):
        if sharding_type != "column":
            continue
        start = f"--sharding shards {name} by column, but"
        if rule == WHOLE_ROWS:
            raise ValueError(
                f"{start} --optim.embeddings {rule} keeps one sum for a whole row: shard it by row "
                "or table, or use --optim.embeddings adagrad"
            )
        if kind == "dynamic":
            raise ValueError(
                f"{start} a row of --emb dynamic is made and reset as a whole: shard it by row or "
                "table"
            )
        if _dtype_of(options, spec) in BITS:
            raise ValueError(
                f"{start} its packed rows have one scale each: shard it by row or table, or use "
                "--tables.dtype bf16"
            )


def _room(rule: str) -> int:
    """Bytes of weights up to which whole tables are faster than balanced memory: with optimizer
    state, up to two thirds of each GPU's.
    """
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    memory = min((gpu.total_memory for gpu in gpus), default=0)
    states = sum(not of_row for of_row in Rule(name=rule).states.values())
    return memory // (6 * (1 + states))


def sharded_from(threshold: int | None, dim: int, *, bags: bool = False, linked: bool) -> int:
    """Number of rows from which dense tables are sharded.

    A bag crosses a link as one vector, however few rows its table has, while replicas need a
    gradient for every look-up: by default, all tables of bags are sharded.

    Args:
        threshold: the number, if it is given.
        dim: length of a row.
        bags: ids come in bags.
        linked: processes address each other's memory.
    """
    if threshold is not None:
        return threshold
    rows = LARGE // dim
    return 0 if bags else min(rows, LONG_AT_PEERS) if linked else rows


def _sharding_types(
    names: Sequence[str],
    num_rows: Sequence[int],
    spec: Mapping[str, Any],
    by: str,
    tables: Mapping[str, str],
    threshold: int,
) -> list[str]:
    """The sharding type of each table; other arguments as in :func:`make_sharding_plan`."""
    for name in tables:
        if name not in names:
            raise ValueError(
                f"sharding.tables names table {name!r}; the data has {', '.join(names)}"
            )

    types, plan = [], spec["plan"]
    shared = {options["with"] for _, options in plan if "with" in options}
    for table, (name, rows, (kind, options)) in enumerate(zip(names, num_rows, plan, strict=True)):
        elsewhere = options.get("cache_share") is not None or bool(options.get("pieces"))
        whole = ""  # what can't be sharded
        if kind not in SHARDED:
            whole = f"tables of kind {kind}"
        elif _dtype_of(options, spec) == "int4":  # 8-bit rows of all would have to be stored first
            whole = "tables in int4"
        elif table in shared or "mode" in options or elsewhere:
            whole = "tables that features share, and those with pooling mean or max, rows in "
            whole += "pieces or in host memory,"

        # Small tables, and those that can't be sharded, are replicated.
        large = not whole and (kind == "paged" or rows >= threshold)
        sharding_type = tables.get(name, by if large else "replicate")
        if sharding_type == "auto" and kind == "dynamic":
            sharding_type = "row"  # a hash spreads ids evenly over the rows
        if sharding_type != "replicate" and whole:
            raise ValueError(
                f"--sharding.tables shards {name} by {sharding_type}, but {whole} are replicated: "
                "remove it there"
            )
        types.append(sharding_type)
    return types


def _dtype_of(options: Mapping[str, Any], spec: Mapping[str, Any]) -> str | None:
    """The type of a table with these options."""
    return options.get("dtype", spec.get("tables_dtype"))


def _check_devices(world: World, plan: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if world.size > 1 and any(options.get("devices") for _, options in plan):
        raise ValueError(
            "--paged.devices places the pages of one process; under torchrun every process holds "
            "its shards on its own device: remove --paged.devices, or run python train.py alone"
        )


def _check_exchange(world: World, exchange: str) -> None:
    if exchange == "peers" and not on_one_host(world):
        raise ValueError(
            "--sharding.exchange peers needs all processes on one host, these are on several: use "
            "--sharding.exchange collective"
        )
    if exchange == "peers" and world.device.type == "cuda" and not peers_accessible(world):
        raise ValueError(
            "--sharding.exchange peers needs GPUs that read each other's memory, these can't: use "
            "--sharding.exchange collective"
        )
