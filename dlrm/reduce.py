"""Gradients of replicated parameters, summed over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.distributed import World
from dlrm.kernels.lookup import row_gradient
from dlrm.kernels.plan import announced
from dlrm.kernels.rows import update_rows
from dlrm.model import DLRM
from dlrm.optim import gradient_norm

SMALL = 2**23  # elements of a table up to which its row gradient travels as a table


class Reducer:
    """Sums gradients over processes, so that replicas stay equal to the last bit.

    The gradients of ``early`` parameters are sent as soon as the backward pass has them all, while
    it goes on; those of ``late`` ones at its end. Dense gradients travel together in one piece. The
    row gradients of a small table are summed into a table, with a mark for each touched row, and
    travel along; those of a larger one go to all processes, entry by entry.

    Args:
        world: the processes.
        early: parameters with dense gradients that the backward pass meets first.
        late: all other replicated parameters.
        local: parameters of which every process has others.
    """

    def __init__(
        self,
        world: World,
        early: Iterable[nn.Parameter],
        late: Iterable[nn.Parameter],
        local: Iterable[nn.Parameter] = (),
    ) -> None:
        self.world = world
        self._early, self._late, self._local = list(early), list(late), set(local)
        self._missing = len(self._early)
        self._sent: tuple[Tensor, dist.Work] | None = None
        for parameter in self._early:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @classmethod
    def of(cls, model: DLRM, world: World) -> Reducer:
        """For all parameters of a model; its caches count the ids of all processes."""
        early = [*model.top_mlp.parameters(), *model.interaction.parameters()]
        local = model.sparse_arch.local_parameters()
        rest = set(model.parameters()) - {*early, *local}
        late = [parameter for parameter in model.parameters() if parameter in rest]
        for group, _ in model.sparse_arch.embeddings():
            group.gather = world.gather_ids if group.cache_stats() else None
        return cls(world, early, late, local)

    @contextmanager
    def step(self, total: int, *, one_hot: bool) -> Iterator[None]:
        """A training step on a batch of ``total`` samples over all processes."""
        on_gpu = self._late[0].is_cuda
        self.world.static = one_hot and on_gpu and total % self.world.size == 0
        try:
            yield
        finally:
            self.world.static = False

    def _arrived(self, _: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = len(self._early)
            flat = _joined([p.grad for p in self._early if p.grad is not None])
            self._sent = flat, dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def finish(self, loss: Tensor) -> Tensor:
        """Give all parameters the gradient of the global batch, and return its loss.

        Args:
            loss: of the local samples, divided by all; 0-d.
        """
        whole, small, large = [], [], []
        for parameter in self._late:
            if parameter.grad is None:
                continue
            if not parameter.grad.is_sparse:
                whole.append(parameter)
            elif parameter.numel() <= SMALL:
                small.append(parameter)
            else:
                large.append(parameter)
        tables = [_table(parameter) for parameter in small]
        grads = [p.grad for p in whole if p.grad is not None]
        flat = _joined([*grads, *tables, loss])
        work = dist.all_reduce(flat, async_op=True)
        for parameter in large:
            self._collect(parameter)
        if self._sent is not None:
            early, sent = self._sent
            sent.wait()
            _give(self._early, early)
            self._sent = None
        work.wait()
        rest = _give(whole, flat)
        for parameter, table in zip(small, tables, strict=True):
            rows = parameter.shape[0]
            summed, rest = rest.split([table.numel(), rest.numel() - table.numel()])
            values, marks = summed.split([parameter.numel(), rows])
            parameter.grad = _touched(parameter, values.view(rows, -1), marks)
        return rest.view(()).to(loss.dtype)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """As :func:`dlrm.optim.gradient_norm`, over all processes."""
        everything = list(parameters)
        norm = gradient_norm(p for p in everything if p not in self._local)
        if not self._local.intersection(everything):
            return norm
        local = gradient_norm(p for p in everything if p in self._local).square()
        dist.all_reduce(local)
        return (norm.square() + local).sqrt()

    def _collect(self, parameter: nn.Parameter) -> None:
        """All processes' entries of a row gradient, in the order of the ranks."""
        assert parameter.grad is not None
        rows, values = parameter.grad._indices()[0], parameter.grad._values()
        sizes = self.world.sizes(len(rows), rows.device)
        rows = torch.cat(self.world.gather(rows, sizes))
        values = torch.cat(self.world.gather(values, sizes))
        parameter.grad = row_gradient(parameter, rows, values, sparse=True)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _give(parameters: Sequence[nn.Parameter], flat: Tensor) -> Tensor:
    """Give parameters their gradients from the front of ``flat``; returns what is left."""
    for parameter in parameters:
        own, flat = flat.split([parameter.numel(), flat.numel() - parameter.numel()])
        parameter.grad = own.view_as(parameter).to(parameter.dtype)
    return flat


def _table(parameter: nn.Parameter) -> Tensor:
    """A row gradient summed by row, then a mark for each row that has an entry, ``[V (D + 1)]``."""
    assert parameter.grad is not None
    rows, values = parameter.grad._indices()[0], parameter.grad._values()
    height, width = parameter.shape
    wide = torch.promote_types(values.dtype, torch.float32)
    flat = torch.zeros(height * (width + 1), dtype=wide, device=values.device)
    table, marks = flat.split([height * width, height])
    minus = torch.full((), -1.0, device=values.device)
    update_rows("sgd", table.view(height, width), rows, values, lr=minus, plan=announced(rows))
    marks.index_fill_(0, rows, 1.0)
    return flat


def _touched(parameter: nn.Parameter, table: Tensor, marks: Tensor) -> Tensor:
    """The row gradient of ``table`` for the marked rows.

    It has an entry for every row, so that its shape does not depend on the ids: those of rows
    without a mark, all zeros, are entries of the first row that has one.
    """
    found = marks > 0
    rows = torch.arange(len(marks), device=marks.device)
    rows = torch.where(found, rows, found.int().argmax())
    return row_gradient(parameter, rows, table.to(parameter.dtype), sparse=True)
