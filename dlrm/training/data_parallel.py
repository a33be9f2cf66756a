"""All-reduce of the gradients of replicated parameters, for data parallelism."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.data.batch import Batch
from dlrm.distributed.peer_exchange import PeerExchange
from dlrm.distributed.world import World
from dlrm.embeddings.common.context import LookupContext
from dlrm.kernels.lookup.source import row_gradient
from dlrm.kernels.update.packed import packed_rows
from dlrm.kernels.update.row_sort import RowSorter, SortedRows
from dlrm.kernels.update.sparse import update_rows
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm
from dlrm.utils.streams import side_stream_of

# Bytes that a process reads from others for a sum; more are left to the collective.
LARGEST = 12 << 20
SMALL = 8  # rows per sample of the global batch; larger tables send entries, not a dense gradient


class GradientReducer:
    """Sums gradients over the processes, so that replicas stay bitwise equal.

    The dense gradients are sent in parts while the backward pass is still running: those of the
    top MLP, of each cross layer, and of the bottom MLP. The row gradients of small tables are
    converted to dense ones and summed together, with a mask of the rows that have a gradient,
    unless the optimizer leaves a row unchanged if its gradient is zero. Those of large tables are
    gathered from all processes. Where processes read each other's memory, a kernel computes small
    sums (:mod:`dlrm.distributed.peer_exchange`).

    Args:
        model: the same on every process, except for the shards of tables.
        optimizer: the optimizer of the embeddings.
        world: the processes.

    Attributes:
        local: parameters that are not replicated.
    """

    def __init__(self, model: DLRM, optimizer: RowOptimizer, world: World) -> None:
        self.world, self.local = world, set(model.sparse_arch.local_parameters())
        # Parts that are sent together, in the order in which a backward pass completes them.
        layers = reversed(getattr(model.interaction, "layers", ()))
        modules = model.top_mlp, *layers, model.bottom_mlp
        self._parts = [[*module.parameters()] for module in modules]
        self._side = side_stream_of(self._parts[0][0].device, "gradients")
        self._exchanges = model.sparse_arch.exchanges
        self._link = PeerExchange(world) if model.sparse_arch.opens_peer_memory else None
        self._embeddings = [p for p in model.sparse_arch.parameters() if p not in self.local]
        self._skips_zero_gradients = all(map(_skips_zero_gradients_in, optimizer.param_groups))
        self.drop_gradients()
        this = ref(self)  # so that a parameter does not keep the reducer alive

        def on_gradient(part: int, _: Tensor) -> None:
            if (reducer := this()) is not None:
                reducer._on_gradient(part)

        for part, parameters in enumerate(self._parts):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(partial(on_gradient, part))

    @classmethod
    def of(cls, model: DLRM, optimizer: RowOptimizer, world: World) -> GradientReducer | None:
        """The reducer, or None if there is only one process."""
        return None if world.size == 1 else cls(model, optimizer, world)

    def is_even(self, batch: Batch) -> bool:
        """Whether every process has the same number of samples of a global batch."""
        return batch.total_size % self.world.size == 0

    def in_context(self, batch: Batch, context: LookupContext) -> LookupContext:
        """The context of the look-ups of a batch, with what they need from other processes."""
        fixed = batch.offsets is None or batch.bag_sizes is not None
        equal = fixed and self.is_even(batch)
        gather_ids = partial(self._gather_ids, equal=equal)
        return replace(context, equal_sizes=equal, bag_sizes=batch.bag_sizes, gather_ids=gather_ids)

    def _gather_ids(
        self, tables: Tensor, ids: Tensor, *, equal: bool
    ) -> tuple[Tensor, Tensor, slice | None]:
        """As :meth:`World.gather_ids`, by copies where these are faster."""
        if self._link is None or not equal or ids.dim() == 1:
            return self.world.gather_ids(tables, ids, equal=equal)
        begin, batch = self.world.rank * ids.shape[1], ids.shape[1]
        return tables, self._link.columns(ids), slice(begin, begin + batch)

    def with_all_ids(self, batch: Batch) -> Batch:
        """A one-hot batch with the ids of all processes, ``[F, total_size]``."""
        _, ids, _ = self.world.gather_ids(batch.ids, batch.ids, equal=self.is_even(batch))
        return replace(batch, ids=ids)

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that was interrupted."""
        self._missing = [len(part) for part in self._parts]
        self._sent = 0  # parts
        self._given: list[Tensor] = []  # what the side stream may still read

    def _on_gradient(self, part: int) -> None:
        # In the same order on every process. The last part follows the gradients of tables, which
        # are complete before it: sums run one after another.
        self._missing[part] -= 1
        while self._sent < len(self._parts) - 1 and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        """Sum the gradients of the next part, next to the backward pass."""
        part = [p for p in self._parts[self._sent] if p.grad is not None]
        grads = [p.grad for p in part if p.grad is not None]
        self._given += grads
        with self._side.fork():
            for parameter, grad in zip(part, self._sum(self._sent, grads), strict=True):
                parameter.grad = grad
        self._sent += 1

    def _sum(self, name: Hashable, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums of tensors over the processes, which may be written to the tensors.

        Args:
            name: of this sum among those of a step.
            tensors: fp32 tensors of the same shapes in all processes.
        """
        read = sum(tensor.nbytes for tensor in tensors) * (self.world.size - 1)
        if self._link is not None and 0 < read <= LARGEST:
            return self._link.sums(name, tensors)
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        return tensors

    def sum_loss(self, loss: Tensor, total: Tensor) -> Tensor:
        """The loss of the global batch, after :meth:`reduce_dense`.

        Args:
            loss: sum over the local samples, divided by the size of the global batch; 0-d.
            total: the result is added to it.
        """
        self._given.append(loss)
        with self._side.fork():
            (found,) = self._sum("loss", [loss.detach().clone()])
            total.add_(found)
        return found

    @torch.no_grad()
    def reduce_dense(self) -> None:
        """Wait for the sums of the gradients of the dense parameters."""
        while self._sent < len(self._parts):  # a parameter has no gradient
            self._send()
        self._side.join()
        self.drop_gradients()

    @torch.no_grad()
    def reduce_embeddings(self, batch: Batch, context: LookupContext) -> None:
        """Reduce the gradients of replicated embeddings, and wait for the exchange of sharded ones.

        Args:
            batch: the samples of this process.
            context: the context of its look-ups.
        """
        # Sparse gradients of small tables are cheaper to sum as dense ones.
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

        grads = [_wide(p.grad) for p in dense if p.grad is not None]
        tables = [table for p in small for table in self._dense_gradient(p, context.sorter)]
        sums = iter(self._sum("tables", [*grads, *tables]))
        for parameter in dense:
            parameter.grad = next(sums).to(parameter.dtype)
        for parameter in small:
            self._set_dense_gradient(parameter, sums, context.sorter)

        for parameter in large:
            self._gather_rows(parameter, equal=context.equal_sizes and parameter.is_cuda)
        for side in self._exchanges if batch.offsets is None else ():  # a capture of bags has none
            side.join()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """As :func:`dlrm.optim.gradient_norm`, over all processes."""
        parameters = list(parameters)
        norm = gradient_norm(p for p in parameters if p not in self.local)
        if not self.local.intersection(parameters):
            return norm
        local = gradient_norm(p for p in parameters if p in self.local).square()
        dist.all_reduce(local)
        return (norm.square() + local).sqrt()

    def _dense_gradient(self, parameter: nn.Parameter, sorter: RowSorter | None) -> list[Tensor]:
        """A row gradient as a dense one ``[V, D]`` and, unless zero gradients are skipped, a mask
        of the rows with a gradient ``[V]``.
        """
        assert parameter.grad is not None
        rows, values = parameter.grad._indices()[0], parameter.grad._values()
        table = torch.zeros(parameter.shape, dtype=torch.float32, device=values.device)
        minus_one = torch.full((), -1.0, device=values.device)
        found = sorter.result(parameter, rows) if sorter else None
        update_rows("sgd", table, rows, values, lr=minus_one, sorted_rows=found)
        if not self._needs_mask(parameter):
            return [table]
        return [table, torch.zeros_like(table[:, 0]).index_fill_(0, rows, 1.0)]

    def _needs_mask(self, parameter: nn.Parameter) -> bool:
        """Whether an update changes rows without a gradient, as by rounding them."""
        return not self._skips_zero_gradients or packed_rows(parameter) is not None

    def _set_dense_gradient(
        self, parameter: nn.Parameter, sums: Iterator[Tensor], sorter: RowSorter | None
    ) -> None:
        """Set the gradient of a parameter from the next of the sums.

        Unless zero gradients are skipped, it has an entry for every row, so that its shape does not
        depend on the ids. The row of an entry is -2 if the row has no gradient.
        """
        grad = next(sums).to(parameter.dtype)
        if not self._needs_mask(parameter):
            parameter.grad = grad
            return
        order = torch.arange(len(parameter), device=grad.device)
        rows = order.where(next(sums) > 0, -2)
        if sorter is not None:
            sorter.submit(parameter, rows, sorted_rows=SortedRows(rows, order))
        parameter.grad = row_gradient(parameter, rows, grad, sparse=True)

    def _gather_rows(self, parameter: nn.Parameter, *, equal: bool) -> None:
        """Gather the entries of a row gradient from all processes, in the order of the ranks.

        Args:
            parameter: the table.
            equal: whether each process has the same number of entries.
        """
        assert parameter.grad is not None
        rows, values = parameter.grad._indices()[0], parameter.grad._values()
        sizes = self.world.sizes(len(rows), rows.device, equal=equal)
        rows = torch.cat(self.world.gather(rows, sizes))
        values = torch.cat(self.world.gather(values, sizes))
        parameter.grad = row_gradient(parameter, rows, values, sparse=True)


def _skips_zero_gradients_in(group: dict[str, Any]) -> bool:
    """Whether a parameter stays unchanged if its gradient is zero."""
    moved = group.get("momentum") or group.get("weight_decay")
    return group["rule"] in ("sgd", "adagrad", "rowwise_adagrad") and not moved


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
