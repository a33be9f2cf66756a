"""Gradients of replicated parameters, summed over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.data.batch import Batch
from dlrm.distributed.sharded_tables import EXCHANGE
from dlrm.distributed.world import World
from dlrm.embeddings.common.context import LookupContext
from dlrm.kernels.lookup.tables import row_gradient
from dlrm.kernels.streams import side_stream_of
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.kernels.update.sparse import update_rows
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm

SMALL = 8  # rows for a sample of the global batch up to which a row gradient travels as a table


class GradientReducer:
    """Sums gradients over processes, so that replicas stay equal to the last bit.

    Dense gradients are reduced in buckets. That of the ``early`` parameters is sent as soon as the
    backward pass has them all, while it goes on. The row gradients of a small table are summed into
    a table and reduced with the dense ones; those of a larger one go to all processes, entry by
    entry.

    Args:
        world: the processes.
        early: parameters with dense gradients that the backward pass meets first.
        late: the others with dense gradients only.
        embeddings: replicated parameters of the embeddings.
        local: parameters of which every process has others.
        skips_zero_gradients: whether the optimizer leaves rows with a gradient of zeros alone,
            so that no entry must be left out.
    """

    def __init__(
        self,
        world: World,
        *,
        early: Iterable[nn.Parameter],
        late: Iterable[nn.Parameter],
        embeddings: Iterable[nn.Parameter],
        local: Iterable[nn.Parameter] = (),
        skips_zero_gradients: bool = False,
    ) -> None:
        self.world = world
        self._early, self._late = list(early), list(late)
        self._embeddings, self._local = list(embeddings), set(local)
        self._skips_zero_gradients = skips_zero_gradients
        self._missing = len(self._early)
        self._sent: tuple[Tensor, dist.Work] | None = None
        this = ref(self)  # a parameter must not keep all others alive

        def arrived(_: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._arrived()

        for parameter in self._early:
            parameter.register_post_accumulate_grad_hook(arrived)

    @classmethod
    def of(cls, model: DLRM, optimizer: RowOptimizer, world: World) -> GradientReducer | None:
        """For all parameters of a model.

        Args:
            model: the same on every process, but for the shards of tables.
            optimizer: of the embeddings.
            world: the processes.

        Returns:
            None for one process.

        Raises:
            ValueError: replicas could not be kept equal.
        """
        if world.size == 1:
            return None
        local = set(model.sparse_arch.local_parameters())
        rounded = [p for p in model.sparse_arch.parameters() if p.dtype == torch.bfloat16]
        if local and any(not p.is_cuda for p in rounded):
            raise ValueError(
                "tables in bf16 are updated with stochastic rounding, which would differ between "
                "replicas on CPUs next to sharded tables: use --sharding.by replicate or "
                "--tables.dtype fp32"
            )
        return cls(
            world,
            early=[*model.top_mlp.parameters(), *model.interaction.parameters()],
            late=model.bottom_mlp.parameters(),
            embeddings=[p for p in model.sparse_arch.parameters() if p not in local],
            local=local,
            skips_zero_gradients=all(
                _skips_zero_gradients_in(group) for group in optimizer.param_groups
            ),
        )

    def is_even(self, batch: Batch) -> bool:
        """Whether every process has as many samples in the step of a batch."""
        return batch.total_size % self.world.size == 0

    def in_context(self, batch: Batch, context: LookupContext) -> LookupContext:
        """The context with what the look-ups of a batch must know of the other processes."""
        equal = batch.offsets is None and self.is_even(batch)
        gather_ids = partial(self.world.gather_ids, equal=equal)
        return replace(context, equal_sizes=equal, gather_ids=gather_ids)

    def _arrived(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = len(self._early)
            flat = _joined([p.grad for p in self._early if p.grad is not None])
            self._sent = flat, dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def reduce_dense(self, loss: Tensor) -> Tensor:
        """Give the MLPs the gradient of the global batch, and return its loss.

        Args:
            loss: of the local samples, divided by all; 0-d.
        """
        flat = _joined([*(p.grad for p in self._late if p.grad is not None), loss])
        work = dist.all_reduce(flat, async_op=True)
        if self._sent is not None:
            early, sent = self._sent
            sent.wait()
            _give(self._early, early)
            self._sent = None
        work.wait()
        return _give(self._late, flat).view(())

    @torch.no_grad()
    def reduce_embeddings(self, batch: Batch, context: LookupContext) -> None:
        """Give the replicated embeddings the gradient of the global batch, and wait for that of
        the others.

        Args:
            batch: of this process.
            context: that of its look-ups.
        """
        dense, small, large = [], [], []
        for parameter in self._embeddings:
            if parameter.grad is None:
                continue
            if not parameter.grad.is_sparse:
                dense.append(parameter)
            elif len(parameter) <= SMALL * batch.total_size:
                small.append(parameter)
            else:
                large.append(parameter)
        grads = [p.grad for p in dense if p.grad is not None]
        tables = [table for p in small for table in self._table(p, context.sorter)]
        if grads or tables:
            flat = _joined([*grads, *tables])
            dist.all_reduce(flat)
            rest = _give(dense, flat)
            for parameter in small:
                rest = self._take(parameter, rest)
        for parameter in large:
            self._collect(parameter, equal=context.equal_sizes and parameter.is_cuda)
        if self._local:
            side_stream_of(self._late[0].device, EXCHANGE).join()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """As :func:`dlrm.optim.gradient_norm`, over all processes."""
        everything = list(parameters)
        norm = gradient_norm(p for p in everything if p not in self._local)
        if not self._local.intersection(everything):
            return norm
        local = gradient_norm(p for p in everything if p in self._local).square()
        dist.all_reduce(local)
        return (norm.square() + local).sqrt()

    def _table(self, parameter: nn.Parameter, sorter: RowSorter | None) -> list[Tensor]:
        """A row gradient summed by row ``[V, D]`` and, if rows without must be known, a mark for
        each that has an entry ``[V]``.
        """
        assert parameter.grad is not None
        rows, values = parameter.grad._indices()[0], parameter.grad._values()
        wide = torch.promote_types(values.dtype, torch.float32)
        table = torch.zeros(parameter.shape, dtype=wide, device=values.device)
        minus = torch.full((), -1.0, device=values.device)
        found = sorter.result(rows) if sorter else None
        update_rows("sgd", table, rows, values, lr=minus, sorted_rows=found)
        if self._skips_zero_gradients:
            return [table]
        return [table, torch.zeros_like(table[:, 0]).index_fill_(0, rows, 1.0)]

    def _take(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """Give a parameter its summed table from the front of ``flat``; returns what is left.

        Where some rows must be left out, the gradient still has an entry for every row, so that its
        shape does not depend on the ids: those without a mark have row -1.
        """
        table, flat = flat.split([parameter.numel(), flat.numel() - parameter.numel()])
        grad = table.view_as(parameter).to(parameter.dtype)
        if self._skips_zero_gradients:
            parameter.grad = grad
            return flat
        height = len(parameter)
        marks, flat = flat.split([height, flat.numel() - height])
        rows = torch.arange(height, device=marks.device).where(marks > 0, -1)
        parameter.grad = row_gradient(parameter, rows, grad, sparse=True)
        return flat

    def _collect(self, parameter: nn.Parameter, *, equal: bool) -> None:
        """All processes' entries of a row gradient, in the order of the ranks; with ``equal`` each
        has as many.
        """
        assert parameter.grad is not None
        rows, values = parameter.grad._indices()[0], parameter.grad._values()
        sizes = self.world.sizes(len(rows), rows.device, equal=equal)
        rows = torch.cat(self.world.gather(rows, sizes))
        values = torch.cat(self.world.gather(values, sizes))
        parameter.grad = row_gradient(parameter, rows, values, sparse=True)


def _skips_zero_gradients_in(group: dict[str, Any]) -> bool:
    """Whether a parameter stays as it is under a gradient of zeros."""
    moved = group.get("momentum") or group.get("weight_decay")
    return group["rule"] in ("sgd", "adagrad", "rowwise_adagrad") and not moved


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _give(parameters: Sequence[nn.Parameter], flat: Tensor) -> Tensor:
    """Give parameters their gradients from the front of ``flat``; returns what is left."""
    for parameter in parameters:
        own, flat = flat.split([parameter.numel(), flat.numel() - parameter.numel()])
        parameter.grad = own.view_as(parameter).to(parameter.dtype)
    return flat


def state_bytes(model: DLRM, optimizer: RowOptimizer, world: World) -> int:
    """Bytes of the state that ``optimizer`` keeps for a model's embeddings, the shards of tables
    on all processes counted and replicas once; every process calls it, between steps.
    """
    local = optimizer.state_bytes(model.sparse_arch.local_parameters())
    here = optimizer.state_bytes(model.sparse_arch.parameters())
    return here - local + sum(world.sizes(local, world.device))
