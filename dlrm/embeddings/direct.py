"""Rows that processes of one host read where they lie, and gradients that they write there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.distributed import World
from dlrm.kernels.branch import Branch, branch_of
from dlrm.kernels.lookup import row_gradient
from dlrm.kernels.peer_rows import read_rows, send_rows
from dlrm.kernels.plan import Plan, announce, prepare
from dlrm.peers import PeerMemory

ARRIVAL = 2  # the branch on which a process learns which of its rows have gradients


class Direct:
    """Look-ups of rows that lie with peers, without collectives (:mod:`dlrm.kernels.peer_rows`).

    A look-up is asked for by its key: row r of the weight of number p of ``World.ring`` has the key
    ``p * height + r``. Gradients arrive in memory that batches of a size share, so those of a
    look-up must be applied before the next one. Every process has memory for as many rows and
    gradients as the one that needs the most.

    Args:
        world: the processes, all on one host.
        height: rows of the largest weight of all processes.
        width: length of a row.
        asked: look-ups of a sample that each rank may have to serve.
    """

    def __init__(self, world: World, height: int, width: int, asked: Sequence[int]) -> None:
        self.world, self.height, self.width, self.asked = world, height, width, asked
        self._rows: PeerMemory | None = None
        self._inboxes: dict[int, _Inbox] = {}  # by batch size; captured graphs know their addresses

    def key_of(self, rank: int, row: int) -> int:
        """The key of a row of the weight of a rank."""
        return self.world.ring.index(rank) * self.height + row

    @property
    def key_type(self) -> torch.dtype:
        """Of keys: int32, if it holds them."""
        return torch.int32 if self.world.size * self.height < 2**31 else torch.int64

    def new_weight(self, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Zeros ``[rows, width]``: where peers can read them, if it is the device of the run.

        All processes must call it at once.
        """
        self._rows = None
        self._inboxes.clear()
        if device.type != self.world.device.type:
            return torch.zeros(rows, self.width, device=device, dtype=dtype)
        self._rows = PeerMemory(self.world, (self.height, self.width), dtype, device)
        return self._rows.local[:rows]

    def serves(self, weight: Tensor) -> bool:
        """Whether peers can read this weight, and all have as many samples as this process."""
        rows = self._rows
        return self.world.even and rows is not None and rows.local.data_ptr() == weight.data_ptr()

    def __call__(self, weight: Tensor, keys: Tensor) -> Tensor:
        """Look up ``keys [B, S]``, ``[B, S, width]``; all processes must do so at once."""
        found: Tensor = _LookupDirect.apply(weight, keys, self)
        return found

    def inbox(self, batch: int, like: Tensor) -> _Inbox:
        """Where the keys and gradients of a batch of this size arrive."""
        if batch not in self._inboxes:
            self._inboxes[batch] = _Inbox(self, batch, like)
        return self._inboxes[batch]

    @property
    def rows(self) -> PeerMemory:
        """The memory of the weight."""
        assert self._rows is not None
        return self._rows


class _Inbox:
    """Where peers write the rows and gradients of their look-ups: a section for each of them."""

    def __init__(self, direct: Direct, batch: int, like: Tensor) -> None:
        world, asked = direct.world, direct.asked
        slots = world.size * batch * max(asked)
        self.used = world.size * batch * asked[world.rank]
        self.keys = PeerMemory(world, (slots,), torch.int32, like.device, fill=-1)
        self.gradients = PeerMemory(world, (slots, direct.width), like.dtype, like.device)
        sections = [world.rank * batch * asked[rank] for rank in world.ring]
        self._sections = torch.tensor(sections, device=like.device)
        bounds = [step * direct.height for step in range(world.size)]
        self._bounds = torch.tensor(bounds, device=like.device, dtype=direct.key_type)

    def shift(self, plan: Plan) -> Tensor:
        """By holder, how far the slots of this process's look-ups are from their sorted places."""
        return self._sections - torch.searchsorted(plan.rows, self._bounds)

    def take(self) -> Tensor:
        """Row of every slot, -1 where there is none, ``[used]``; the slots are free again."""
        rows = self.keys.local[: self.used].long()
        self.keys.local.fill_(-1)
        return rows


@dataclass(frozen=True)
class _Sent:
    """What the backward pass of a look-up needs to know of it."""

    plan: Plan
    inbox: _Inbox
    shift: Tensor
    rows: Tensor
    arrival: Branch


class _LookupDirect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, keys: Tensor, direct: Direct) -> Tensor:
        plan = prepare(keys.view(-1), direct.world.size * direct.height)
        out = weight.new_empty(keys.numel(), direct.width)
        direct.rows.barrier()  # all have updated their rows
        if not ctx.needs_input_grad[0]:
            read_rows(direct.rows.block, plan, out)
            return out.view(*keys.shape, direct.width)
        inbox = direct.inbox(len(keys), weight)
        shift = inbox.shift(plan)
        read_rows(direct.rows.block, plan, out, inbox=inbox.keys.block, shift=shift)
        arrival = branch_of(weight.device, ARRIVAL)
        with arrival.fork():
            inbox.keys.barrier()  # all have said which rows they look up
            rows = inbox.take()
            announce(rows, len(weight))
        ctx.save_for_backward(weight)
        ctx.direct = direct
        ctx.sent = _Sent(plan, inbox, shift, rows, arrival)
        return out.view(*keys.shape, direct.width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, direct = ctx.sent, ctx.direct
        (weight,) = ctx.saved_tensors
        grads = grad.reshape(-1, direct.width)
        arrived = sent.inbox.gradients
        send_rows(grads, direct.height, sent.plan, arrived.block, sent.shift)
        sent.arrival.join()
        arrived.barrier()  # all gradients are here
        values = arrived.local[: sent.inbox.used]
        return row_gradient(weight, sent.rows, values, True), None, None
