"""Run by ``torchrun`` in test_distributed.py: tables that peers hold, against whole ones.

On GPUs the steps are captured too; several processes may share one. On CPUs rows are exchanged by
PyTorch, with the argument ``triton`` by the kernels, through Triton's interpreter; ``short``
checks two steps of one sharding.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import torch

from dlrm.data.batch import Batch
from dlrm.distributed import shardings
from dlrm.distributed.peer_exchange import PeerExchange
from dlrm.distributed.peer_lookup import PeerLookup
from dlrm.distributed.peer_memory import SymmetricTensor, bytes_held
from dlrm.distributed.planner import plan_shards
from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.distributed.world import World
from dlrm.embeddings.common.context import NO_CONTEXT
from dlrm.embeddings.dense import Dense
from dlrm.kernels.lookup import peer as peer_rows
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch

SIZES = [500, 7_000, 30_000, 90_000]
BATCHES = {"cuda": 4096, "cpu": 128}  # of each process
STEPS = 4
TOLERANCE = {None: 1e-5, torch.bfloat16: 1e-2}  # sums in another order, or of rounded values


class Run:
    """The same steps on whole tables, with all samples, and on shards, with this process's."""

    def __init__(self, world, sharding_types, comm_dtype=None):
        self.world, self.comm_dtype, device = world, comm_dtype, world.device
        dim = 16 * world.size
        shards = plan_shards(SIZES, dim, world.size, sharding_types=sharding_types)
        with device:
            torch.manual_seed(3)
            self.whole = Dense(SIZES, dim)
            torch.manual_seed(3)
            sharding = ShardingPlan(world=world, shards=shards, comm_dtype=comm_dtype, peers=True)
            self.held = SparseArch(SIZES, dim, [("dense", {})] * len(SIZES), sharding=sharding)
        lookups = (c.peer_lookup for c in self.held.groups[0]._shardings())
        assert all(map(PeerLookup.serves, lookups, self.held.local_parameters()))
        assert self.held.opens_peer_memory
        rule = {"rule": "adagrad", "lr": 0.1}
        if comm_dtype is not None:
            rule = {"rule": "sgd", "lr": 0.01}
        self.rules = [RowOptimizer(m.parameters(), **rule) for m in (self.whole, self.held)]
        for state in (state for rule in self.rules for state in rule.state.values()):
            for kept in state.values():  # else a first gradient that cancels, but for rounding,
                kept.fill_(1.0)  # moves a row as far as any other
        batch = BATCHES[device.type]
        self.mine = slice(batch * world.rank, batch * (world.rank + 1))
        rows = torch.tensor(SIZES, device=device, dtype=torch.float64)[:, None]
        seed = torch.Generator(device).manual_seed(5)
        shape = (len(SIZES), batch * world.size)
        random = torch.rand(STEPS, *shape, device=device, generator=seed, dtype=torch.float64)
        self.ids = (rows**random - 1).floor().minimum(rows - 1).int()
        self.up = torch.randn(*shape[::-1], dim, device=device, generator=seed)
        dense, labels = torch.empty(1, batch, device=device), torch.empty(batch, device=device)
        self.batches = [Batch(dense, ids[:, self.mine].contiguous(), labels) for ids in self.ids]
        self.sorter = RowSorter(device)

    def step_whole(self, index):
        out = self.whole(self.ids[index])
        out.backward(self.up)
        self.rules[0].step()
        self.rules[0].zero_grad()
        return out[self.mine].detach()

    def step_held(self, batch, context=NO_CONTEXT):
        context = replace(context, sorter=self.sorter, equal_sizes=True)
        with self.sorter:
            vectors = self.held(batch.ids, context=context)
            out = torch.cat(vectors, 1)[:, self.held.feature_order.positions]
            out.backward(self.up[self.mine])
            self.rules[1].step(sorter=self.sorter)
            self.rules[1].zero_grad()
        return out.detach()

    def compare(self, step):
        """Steps equal those on whole tables, in whatever order the batches come."""
        for index, found in enumerate(step(self.batches)):
            worst = float((found - self.step_whole(index)).abs().max())
            assert worst < TOLERANCE[self.comm_dtype], worst
        if self.comm_dtype is not None:
            assert worst > TOLERANCE[None], "nothing was rounded"

    def at_once(self, batches):
        return map(self.step_held, batches)

    def captured(self, batches):
        """Steps as a CUDA graph, warmed up by one."""
        batch = batches[0].clone()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step_held(batch)
        torch.cuda.current_stream().wait_stream(side)
        self.step_whole(0)
        with torch.cuda.graph(graph):
            out = self.step_held(batch)
        for each in batches:
            batch.ids.copy_(each.ids)
            graph.replay()
            yield out


def check_memory(world):
    """What one process writes another reads; nothing is left behind."""
    before = set(Path(gettempdir()).glob("dlrm-*"))
    memory = SymmetricTensor(world, (3, 2), torch.float32, world.device, fill=7)
    assert (memory.local == 7).all()
    memory.barrier()
    if world.device.type == "cpu":
        memory.peers.tensors[1][0] = world.rank  # of the next process
    memory.barrier()
    if world.device.type == "cpu":
        assert (memory.local[0] == (world.rank - 1) % world.size).all()
    assert (memory.local[1:] == 7).all()
    assert set(Path(gettempdir()).glob("dlrm-*")) <= before
    assert bytes_held(memory.local.device) == 3 * 2 * 4
    world.wait()  # before anybody makes more
    del memory
    assert not bytes_held(world.device)


def check_exchanges(world):
    """Columns and sums of all processes; each three times, in the same memory."""
    link, ranks = PeerExchange(world), range(world.size)
    for step in range(3):
        every = [torch.arange(6, device=world.device).view(2, 3) + 10 * r + step for r in ranks]
        assert torch.equal(link.columns(every[world.rank]), torch.cat(every, 1))
        drawn = [torch.randn(7, 300, generator=torch.Generator().manual_seed(r)) for r in ranks]
        drawn = [each.to(world.device) * 10 ** (r + step) for r, each in enumerate(drawn)]
        whole, part = link.sums("all", [drawn[world.rank], drawn[world.rank][0]])
        assert torch.equal(whole, sum(drawn[1:], drawn[0]))
        assert torch.equal(part, whole[0])


def check_comm_dtype(world):
    """Sums of gradients arrive in fp32, whatever the rows are of, if nothing else is asked for."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for rows, comm_dtype, arriving in ((fp32, None, fp32), (bf16, None, fp32), (fp32, bf16, bf16)):
        peers = PeerLookup(world, 10, 4, [1] * world.size, comm_dtype)
        weight = peers.new_weight(5, world.device, rows)
        assert peers.recv_buffer(3, weight).gradients.local.dtype is arriving


def main():
    """Check every way to shard tables."""
    world = World.from_environment()
    on_gpu = torch.cuda.is_available()
    gpu = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    world.join(torch.device("cuda", gpu) if on_gpu else torch.device("cpu"))
    check_memory(world)
    check_comm_dtype(world)
    check_exchanges(world)
    if "triton" in sys.argv and not on_gpu:
        BATCHES["cpu"], peer_rows.TILE = 14, 64
        peer_rows.use_triton = lambda *_: True
    mixed = ["row", "column", "row", "table"]
    if "short" in sys.argv:
        run = Run(world, mixed)
        del run.batches[2:]
        run.compare(run.at_once)
        return finish(world)
    for sharding_types in (["table"] * 4, ["column"] * 4, ["row"] * 4, mixed):
        run = Run(world, sharding_types)
        run.compare(run.at_once)
        if on_gpu:
            run.compare(run.captured)
    run = Run(world, ["table"] * 4, torch.bfloat16)
    run.compare(run.at_once)
    shardings.WIDE = 1  # look-ups of all rows are sorted
    run = Run(world, mixed)
    run.compare(run.captured if on_gpu else run.at_once)
    finish(world)


def finish(world):
    """Leave the process group, and say so."""
    world.leave()
    if world.first:
        print("all is equal")


if __name__ == "__main__":
    sys.exit(main())
