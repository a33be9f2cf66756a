"""Run by ``torchrun`` in test_processes.py: one process of several, checked against one alone.

With the argument ``gpus``, each process has a GPU, and steps are captured: with ``dynamic`` tables,
with other ``exchanges`` of these, with ``bags`` of ids, or with ``drop`` and rows in host memory.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from dlrm.data.batch import Batch
from dlrm.distributed import shardings
from dlrm.distributed.planner import plan_shards, shard_rows
from dlrm.distributed.sharded_kinds import ShardedDense
from dlrm.distributed.sharding_plan import ShardingPlan, make_sharding_plan
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.embeddings.dense import Dense
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.step import TrainStep

SIZES = [50, 1200, 7, 900, 333]
BAG_SIZES = (2, 5, 1, 0, 3)
NAMES = ["a", "b", "c", "d", "e"]
OPTIONS = {
    "tt": {"rank": 4, "cache_rows": 30},
    "hash": {"rows": 8},
    "drop": {"keep": 40},
    "block": {"dim": 2},
    "qr": {"collisions": 9},
    "paged": {"page_size": 100},
    "robe": {"rows": 64},
    "cafe": {"rows": 64},
}
TOTALS = [64, 64, 61, 64, 3, 64]  # uneven ones too, and fewer samples than ranks
TOLERANCE = 2e-6  # of losses: sums in another order


def batches(seed=1, multi_hot=False, totals=TOTALS):
    """Whole batches, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for total in totals:
        ids = torch.stack(
            [(torch.rand(total, generator=generator) ** 3 * rows).long() for rows in SIZES]
        )
        labels = (torch.rand(total, generator=generator) < 0.3).float()
        dense = torch.randn(4, total, generator=generator)
        if not multi_hot:
            yield Batch(dense, ids.int(), labels)
            continue
        lengths = torch.randint(0, 4, (len(SIZES) * total,), generator=generator)
        if multi_hot == "fixed":
            lengths = torch.tensor(BAG_SIZES).repeat_interleave(total)
        elif total < 4:
            lengths[total : 4 * total] = 0  # nobody looks up anything in the tables of a kind
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        rows = torch.tensor(SIZES).repeat_interleave(lengths.view(len(SIZES), total).sum(1))
        flat = (torch.rand(len(rows), generator=generator) * rows).long()
        fixed = BAG_SIZES if multi_hot == "fixed" else None
        yield Batch(dense, flat, labels, offsets, bag_sizes=fixed)


def share_of(batch, world):
    """What the loader gives a rank."""
    share, extra = divmod(batch.size, world.size)
    first = world.rank * share + min(world.rank, extra)
    mine = slice(first, first + share + (world.rank < extra))
    if batch.offsets is None:
        total = batch.size
        return Batch(batch.dense[:, mine], batch.ids[:, mine], batch.labels[mine], total=total)
    bags = [
        batch.ids[batch.offsets[f * batch.size + b] : batch.offsets[f * batch.size + b + 1]]
        for f in range(len(SIZES))
        for b in range(batch.size)[mine]
    ]
    lengths = torch.tensor([0, *(len(bag) for bag in bags)])
    ids = torch.cat([batch.ids[:0], *bags])
    offsets = lengths.cumsum(0)
    return Batch(
        batch.dense[:, mine], ids, batch.labels[mine], offsets,
        total=batch.size, bag_sizes=batch.bag_sizes,
    )  # fmt: skip


def train(
    world,
    kind,
    *,
    own=None,
    rule="adagrad",
    multi_hot=False,
    clip_norm=None,
    dtype="fp32",
    precision="fp32",
    totals=TOTALS,
    mode="auto",
    interaction="dot",
    **sharding,
):
    """Losses and gradient norms of a few steps, and the model."""
    plan = [("dense", {})] + [(kind, own or OPTIONS.get(kind, {}))] * 3 + [("dense", {})]
    recipe = {"num_dense": 4, "num_embeddings": SIZES, "embedding_dim": 8, "plan": plan}
    recipe |= {"tables_dtype": dtype, "interaction": interaction, "cross_rank": 4}
    torch.manual_seed(0)
    spreading = make_sharding_plan(world, NAMES, recipe, rule=rule, **sharding)
    with world.device:
        model = DLRM(**recipe, bottom_mlp=[8], top_mlp=[8], sharding=spreading)
    optimizers = [
        RowOptimizer(model.dense_parameters(), rule, lr=0.05),
        # Stochastic rounding draws other numbers for shards than for a whole table.
        RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.05, stochastic=dtype != "int8"),
    ]
    reducer = GradientReducer.of(model, optimizers[1], world)
    options = {"precision": precision, "clip_norm": clip_norm, "mode": mode}
    step = TrainStep(model, optimizers, **options, reducer=reducer)
    if world.size > 1:
        ahead = step.prefetcher.look_ahead(8)
        assert (ahead > 0) == bool(model.sparse_arch.window_size(1))
    values = []
    whole = batches(multi_hot=multi_hot, totals=totals)
    shares = [share_of(batch, world).to(world.device) for batch in whole]
    prepared = itertools.chain(shares[:1], step.prefetcher(shares[1:]))  # by itself, and ahead
    for index, mine in enumerate(prepared):
        values += [float(v) for v in step(mine, norms=True).values()]
        if index == 2:
            model.sparse_arch.renew_caches(optimizers[1])
    return values, model


def check_training(world, name, kind, **options):
    """The losses of one process, and equal replicas."""
    alone = World(device=world.device)
    one, whole = train(alone, kind, **{k: v for k, v in options.items() if k in COMMON})
    many, model = train(world, kind, **options)
    exact = "bf16" not in (options.get("comm_dtype"), options.get("precision"))
    if not exact:
        one, many = one[::3], many[::3]  # losses alone
    worst = max(abs(a - b) for a, b in zip(one, many, strict=True))
    assert worst <= (TOLERANCE if exact else 1e-2), f"{name}: off by {worst}: {one} {many}"
    if kind == "dynamic":
        assert model.sparse_arch.id_counts() == whole.sparse_arch.id_counts(), name
    tables = model.sparse_arch.to_dense()
    for tensor in (*model.dense_parameters(), *tables):
        copies = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(copies, tensor.detach().contiguous())
        assert all(torch.equal(copies[0], copy) for copy in copies), f"{name}: replicas differ"
    if exact and "rule" not in options:  # Adam magnifies what rounding leaves of a gradient
        # What is left of a sum may round an int8 weight up instead of down, and Adagrad's first
        # step magnifies it where gradients nearly cancel.
        noise = 1e-2 if options.get("dtype") == "int8" else 1e-3
        for found, expected in zip(tables, whole.sparse_arch.to_dense(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=noise, msg=name)


COMMON = {"own", "rule", "multi_hot", "clip_norm", "dtype", "precision", "totals", "mode"}
COMMON |= {"interaction"}


FEW = {"rows": 64, "half_life": 2}  # so that ids are evicted
DYNAMIC = {
    "all fit": {},
    "evicted": {"own": FEW, "rule": "adam"},
    "waiting": {"own": {**FEW, "admit": 2}},
    "int8": {"own": FEW, "dtype": "int8", "threshold": 1, "exchange": "collective"},
    "bags": {"own": FEW, "multi_hot": True},
    "fixed bags": {
        "own": {"rows": 1, "shared": 1},
        "multi_hot": "fixed",
        "rule": "rowwise_adagrad",
    },
}


DROP = {
    "by row, peers": {"by": "row", "exchange": "peers"},
    "zeros": {"by": "row", "exchange": "peers", "own": {"keep": 40, "shared": False}},
    "by column": {"by": "column", "rule": "adam"},
    "bags by row": {"by": "row", "multi_hot": True},
    "fixed bags": {"multi_hot": "fixed", "tables": {"b": "replicate"}},
    "int8": {"by": "table", "dtype": "int8"},
}


def check_a_bag_is_sent_as_one_vector(world):
    """Bags of 100 ids: no more is exchanged than ids and one vector a bag."""
    batch, sizes, dim, length = 4, [50, 60], 8, 100
    sent, real = [], shardings.exchange

    def exchange(x, *args):
        sent.append((x.numel(), x.is_floating_point()))
        return real(x, *args)

    ids = torch.randint(50, (len(sizes) * batch * length,))
    offsets = torch.arange(0, len(ids) + 1, length)
    for by in ("table", "row"):
        shards = plan_shards(sizes, dim, world.size, sharding_types=[by] * 2)
        group = ShardedDense(sizes, dim, ShardingPlan(world=world, shards=shards))
        sent.clear()
        with mock.patch.object(shardings, "exchange", exchange):
            group(ids, offsets)
        vectors = sum(numel for numel, is_vector in sent if is_vector)
        assert vectors <= world.size * batch * len(sizes) * dim, (by, sent)
        assert max(numel for numel, _ in sent) <= len(ids) * (world.size if by == "row" else 1)


def check_pages(world):
    """Bags of ids at every page boundary, equal to the last bit but for the order of sums."""
    sizes, page = [23, 10, 5], 4
    ways = {
        "row": [
            shard for t, v in enumerate(sizes) for shard in shard_rows(t, v, 8, world.size, page)
        ],
        "counted": plan_shards(
            sizes,
            8,
            world.size,
            sharding_types=["row"] * 3,
            page=page,
            counts=[1 / torch.arange(1, 24), torch.ones(1), torch.ones(1)],
        ),
        "column": plan_shards(sizes, 8, world.size, sharding_types=["column"] * 3),
        "table": plan_shards(sizes, 8, world.size, sharding_types=["table"] * 3),
        "mixed": plan_shards(
            sizes, 8, world.size, sharding_types=["row", "column", "replicate"], page=page
        ),
    }
    edges = [[i for p in range(0, v, page) for i in (p, min(p + page, v) - 1)] for v in sizes]
    nested = [bag for own in edges for bag in (own, own[:1], [], own[::-1] * 2)]
    ids = torch.tensor([i for bag in nested for i in bag])
    offsets = torch.tensor([0, *(len(bag) for bag in nested)]).cumsum(0)
    for name, shards in ways.items():
        for mode in ("sum", "mean", "max"):
            torch.manual_seed(3)
            dense = Dense(sizes, 8, mode=mode)
            torch.manual_seed(3)
            group = ShardedDense(sizes, 8, ShardingPlan(world=world, shards=shards), mode=mode)
            expected, found = dense(ids, offsets), group(ids, offsets)
            # Holders add up the rows that they have of a bag, in another order than one process.
            split = name in ("row", "counted", "mixed") and mode != "max"
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if split else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found, expected, msg=f"{name}, {mode}", **tolerance)
            for table, rows in enumerate(sizes):
                assert torch.equal(
                    group.rows(table, torch.arange(rows)), dense.rows(table, torch.arange(rows))
                )
            up = torch.randn(found.shape) * (1 + world.rank)
            found.backward(up)
            dense(ids, offsets).backward(up / (1 + world.rank) * sum(range(1, world.size + 1)))
            full = torch.zeros(sum(sizes), 8)
            named = dict(group.named_parameters())
            if "replicated" in named:  # no entry for other tables' ids: Adam would move its row
                own = len(ids) - offsets[len(offsets) // 3 * 2]
                assert named["replicated"].grad._nnz() == own, (name, mode)
            for table in range(len(sizes)):
                for parameter, chunk in group.chunks(table):
                    grad = named[parameter].grad.to_dense()
                    height = chunk.rows[1] - chunk.rows[0]
                    at = sum(sizes[:table]) + chunk.rows[0]
                    to = full[at : at + height, slice(*chunk.columns)]
                    to += grad[chunk.at : chunk.at + height]
            dist.all_reduce(full)
            torch.testing.assert_close(full, dense.weight.grad.to_dense(), rtol=1e-5, atol=1e-5)


def check_copies(world, **given):
    """Ids, sums of bags, and gradients of shards are copied between processes."""
    for by in ("table", "row", "column"):
        options = {"by": by, "multi_hot": "fixed", "interaction": "dcn", "exchange": "peers"}
        check_training(world, f"copies, by {by}", "dense", **options, **given)
    for by in ("table", "row"):
        options = {"by": by, "dtype": "int8", "exchange": "peers"}
        check_training(world, f"int8 rows at peers, by {by}", "dense", **options, **given)


def check_gpus(world, part):
    """What is captured: dynamic tables, whose ids are placed and evicted, and copies to peers."""
    even = {"mode": "graph", "totals": [64] * 8}
    if part in ("dynamic", "exchanges"):
        ways = [("row", "peers", name) for name in DYNAMIC]
        if part == "exchanges":
            others = ("row", "collective"), ("table", "peers")
            ways = [(*way, name) for way in others for name in ("evicted", "fixed bags")]
        for by, exchange, name in ways:
            options = {"threshold": 40, "by": by, "exchange": exchange, **DYNAMIC[name]}
            options |= {} if options.get("multi_hot") is True else even
            check_training(world, f"dynamic, {name}, by {by}, {exchange}", "dynamic", **options)
    elif part == "bags":
        check_training(world, "cross layers", "dense", interaction="dcn", by="row", threshold=300)
        check_copies(world, **even)
    else:
        for name, options in DROP.items():
            options = options | ({} if options.get("multi_hot") is True else even)
            check_training(world, f"drop, {name}", "drop", **options)
        options = {"own": {"cache_rows": 90}, "by": "replicate", **even, "totals": [64] * 12}
        check_training(world, "rows in host memory", "offload", **options)


def main():
    """Check all that there is, or on GPUs what has other kernels there."""
    world = World.from_environment()
    if "gpus" in sys.argv:
        world.join(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        check_gpus(world, sys.argv[-1])
        return finish(world)
    world.join(torch.device("cpu"))
    check_pages(world)
    check_a_bag_is_sent_as_one_vector(world)
    for kind in sorted(available()):
        check_training(world, kind, kind, threshold=300)
    for by in ("table", "row", "column"):
        check_training(world, by, "paged" if by == "row" else "dense", by=by)
        check_training(world, f"{by}, peers", "dense", by=by, exchange="peers")
    for by in ("table", "row", "column"):
        for exchange in ("peers", "collective"):
            name = f"multi-hot by {by}, {exchange}"
            for bags in (True, "fixed"):
                options = {"multi_hot": bags, "by": by, "exchange": exchange}
                check_training(world, f"{name}, {bags}", "dense", **options)
    for by in ("table", "row"):
        for bags in (False, True):
            options = {"by": by, "multi_hot": bags, "threshold": 1, "dtype": "int8"}
            check_training(world, f"int8 by {by}, {bags}", "dense", **options)
    for by, exchange in (("row", "peers"), ("table", "collective")):
        for name, options in DYNAMIC.items():
            options = {"threshold": 40, "by": by, "exchange": exchange, **options}
            check_training(world, f"dynamic, {name}, by {by}", "dynamic", **options)
    for name, options in DROP.items():
        check_training(world, f"drop, {name}", "drop", **options)
    check_copies(world)
    options = {"dtype": "bf16", "precision": "bf16", "threshold": 300}
    check_training(world, "replicas rounded by chance next to shards", "hash", **options)
    check_training(world, "multi-hot cache", "tt", multi_hot=True)
    check_training(world, "no ids", "hash", multi_hot=True, rule="adam")
    for bags in (True, "fixed"):
        options = {"precision": "bf16", "multi_hot": bags, "by": "table", "threshold": 300}
        options["totals"] = [64, 3, 1]
        check_training(world, f"bags in bf16, ranks without tables, {bags}", "tt", **options)
    check_training(world, "clip", "dense", clip_norm=0.05)
    check_training(world, "cross layers", "dense", interaction="dcn")
    check_training(world, "replicas", "dense", by="replicate")
    for rule, rows in itertools.product(("adagrad", "adam"), (90, 2000)):
        options = {"rule": rule, "by": "replicate", "own": {"cache_rows": rows}}
        check_training(world, f"rows in host memory, {rule}", "offload", **options)
    host = {"rows": 900, "cache_share": 0.3}
    check_training(world, "rows of any ids in host memory", "dynamic", own=host, by="replicate")
    for exchange in ("peers", "collective"):
        options = {"comm_dtype": "bf16", "exchange": exchange, "clip_norm": 0.05}
        check_training(world, f"bf16, {exchange}", "dense", **options)
    ways = {"a": "row", "b": "column", "d": "row", "e": "table"}
    for exchange in ("peers", "collective"):
        check_training(world, f"mixed, {exchange}", "dense", tables=ways, exchange=exchange)
        for rule in RULES:
            by = "row" if rule == "rowwise_adagrad" else "column"
            options = {"rule": rule, "by": by, "exchange": exchange, "clip_norm": 0.05}
            check_training(world, f"{rule}, {exchange}", "dense", **options)
    finish(world)


def finish(world):
    """Leave the process group together, and say so."""
    world.wait()
    world.leave()
    if world.device.type == "cpu":
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert not [name for name in threads if "gloo" in name], threads
    if world.first:
        print("all is equal")


if __name__ == "__main__":
    sys.exit(main())
