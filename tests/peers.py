"""Run by ``torchrun`` in test_distributed.py: tables that peers hold, against whole ones.

On GPUs the steps are captured too; several processes may share one. On CPUs rows are exchanged by
PyTorch, with the argument ``triton`` by the kernels, through Triton's interpreter.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import gettempdir

import torch

from dlrm.distributed import World
from dlrm.embeddings.dense import Dense
from dlrm.embeddings.partition import place
from dlrm.embeddings.sharded import Sharded, Sharding
from dlrm.kernels import peer_rows
from dlrm.kernels.plan import Planner
from dlrm.optim import RowOptimizer
from dlrm.peers import PeerMemory, bytes_held

SIZES = [500, 7_000, 30_000, 90_000]
BATCHES = {"cuda": 4096, "cpu": 128}  # of each process
STEPS = 3
TOLERANCE = 1e-5  # sums in another order


class Run:
    """The same steps on whole tables, with all samples, and on pieces, with this process's."""

    def __init__(self, world, ways):
        self.world, device = world, world.device
        dim = 16 * world.size
        pieces = place(SIZES, dim, world.size, ways=ways)
        with device:
            torch.manual_seed(3)
            self.whole = Dense(SIZES, dim)
            torch.manual_seed(3)
            sharding = Sharding(world=world, pieces=pieces, peers=True)
            self.held = Sharded(SIZES, dim, sharding)
        assert all(cut.direct.serves(weight) for cut, weight in zip(*self.parts(), strict=True))
        self.rules = [
            RowOptimizer(m.parameters(), "adagrad", lr=0.1) for m in (self.whole, self.held)
        ]
        batch = BATCHES[device.type]
        total = batch * world.size
        self.mine = slice(batch * world.rank, batch * (world.rank + 1))
        rows = torch.tensor(SIZES, device=device, dtype=torch.float64)[:, None]
        seed = torch.Generator(device).manual_seed(5)
        random = torch.rand(len(SIZES), total, device=device, generator=seed, dtype=torch.float64)
        self.ids = (rows**random - 1).floor().minimum(rows - 1).int()
        self.up = torch.randn(total, len(SIZES), dim, device=device, generator=seed)
        self.planner = Planner(device) if device.type == "cuda" else nullcontext()

    def parts(self):
        cuts = self.held._cuts()
        return cuts, self.held.local_parameters()

    def step_whole(self):
        out = self.whole(self.ids)
        out.backward(self.up)
        self.rules[0].step()
        self.rules[0].zero_grad()
        return out[self.mine].detach()

    def step_held(self):
        with self.planner:
            out = self.held(self.ids[:, self.mine].contiguous())
            out.backward(self.up[self.mine])
            self.rules[1].step()
            self.rules[1].zero_grad()
        return out.detach()

    def compare(self, step):
        for _ in range(STEPS):
            found = step()
            worst = float((found - self.step_whole()).abs().max())
            assert worst < TOLERANCE, worst

    def captured(self):
        """A step as a CUDA graph, warmed up by one."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step_held()
        torch.cuda.current_stream().wait_stream(side)
        self.step_whole()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.step_held()

        def replay():
            graph.replay()
            return out

        return replay


def check_memory(world):
    """What one process writes another reads; nothing is left behind."""
    before = set(Path(gettempdir()).glob("dlrm-*"))
    memory = PeerMemory(world, (3, 2), torch.float32, world.device, fill=7)
    assert (memory.local == 7).all()
    memory.barrier()
    if world.device.type == "cpu":
        memory.block.tensors[1][0] = world.rank  # of the next process
    memory.barrier()
    if world.device.type == "cpu":
        assert (memory.local[0] == (world.rank - 1) % world.size).all()
    assert (memory.local[1:] == 7).all()
    assert set(Path(gettempdir()).glob("dlrm-*")) <= before
    assert bytes_held(memory.local.device) == 3 * 2 * 4
    del memory
    assert not bytes_held(world.device)


def main():
    """Check every way to cut tables."""
    world = World.of_environment()
    on_gpu = torch.cuda.is_available()
    gpu = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    world.join(torch.device("cuda", gpu) if on_gpu else torch.device("cpu"))
    world.even = True
    check_memory(world)
    if sys.argv[1:] == ["triton"] and not on_gpu:
        BATCHES["cpu"], peer_rows.TILE = 30, 64
        peer_rows.use_triton = lambda *_: True
    for ways in (["table"] * 4, ["column"] * 4, ["row"] * 4, ["row", "column", "row", "table"]):
        run = Run(world, ways)
        run.compare(run.step_held)
        if on_gpu:
            run.compare(run.captured())
    world.leave()
    if world.first:
        print("all is equal")


if __name__ == "__main__":
    sys.exit(main())
