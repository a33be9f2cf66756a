"""One training step: forward, loss, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.embeddings.common.context import LookupContext
from dlrm.kernels.loss import mean_loss
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, apply_in_backward, gradient_norm
from dlrm.training.cuda_graph import StepGraphs
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.metrics import RunningMean
from dlrm.training.modes import mode_for, set_precision
from dlrm.training.prefetch import PreparedBatch, make_prefetcher
from dlrm.utils.streams import side_stream_of

Run = Callable[["TrainStep", PreparedBatch, bool], dict[str, Tensor]]
"""Trains on a batch, with or without gradient norms: see :func:`train_on_batch`."""


def train_on_batch(step: TrainStep, batch: PreparedBatch, norms: bool) -> dict[str, Tensor]:
    """Compute a step in four parts: forward, loss, backward and update."""
    with step.context(batch, norms) as context:
        logits = step.forward(batch.batch, context)
        loss = step.loss(logits, batch.batch)
        out = step.backward(loss, batch.batch, context, norms=norms)
        step.update()
    return out


class TrainStep:
    """A training step on one device, without synchronizing with the host.

    ``eager`` runs operation by operation. ``graph`` captures the whole step, the optimizers
    included, as a CUDA graph for each batch size that comes up often
    (:mod:`dlrm.training.cuda_graph`). ``auto`` is ``graph`` if all tables are on one GPU, and
    ``eager`` elsewhere.
    Batches with bags of ids are captured too, of tables that allow it (``Embedding.captures_bags``)
    and over several processes only bags of fixed lengths. Others run eagerly.

    Args:
        model: the model, in training mode.
        optimizers: together they own every parameter.
        precision: of the matrix products: ``fp32``; ``tf32`` on a GPU; or ``bf16``, autocast of
            the MLPs, the interaction and the products of TT cores; parameters stay in fp32.
        clip_norm: clip the norm of all gradients together to this value; None: no clipping.
        mode: one of ``auto``, ``eager``, ``graph``.
        deterministic: equal seeds give equal bits on a GPU as well; holds for the whole process.
        reducer: sums the gradients over the processes, if there are several.
        odds: of a positive among the samples, divided by those among all rows; see
            :func:`mean_loss`.

    Attributes:
        losses: the mean loss since it was last taken.
        last_loss: of the last step; None before the first one.
        prefetcher: prepares batches ahead of their step: ``step.prefetcher(batches)``.
        graphs: the captured steps.

    Raises:
        ValueError: an unknown mode or precision, or graph without a GPU or with several.
    """

    def __init__(
        self,
        model: DLRM,
        optimizers: Sequence[RowOptimizer],
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        mode: str = "auto",
        deterministic: bool = False,
        reducer: GradientReducer | None = None,
        odds: float = 1.0,
    ) -> None:
        self.device = next(model.parameters()).device
        self.mode = mode_for(model, self.device, mode)
        self.model = model
        self.optimizers = optimizers
        self.reducer = reducer
        self.clip_norm = clip_norm
        self.precision = precision
        self.odds = odds

        set_precision(precision, deterministic=deterministic)
        # The interaction casts vectors to the type of the MLPs anyway.
        self._dtype = torch.bfloat16 if precision == "bf16" else None

        embeddings = {id(parameter) for parameter in model.sparse_arch.parameters()}
        self._embedding_optimizers: list[RowOptimizer] = []  # of nothing else
        self._other_optimizers: list[RowOptimizer] = []
        for optimizer in optimizers:
            updated = (id(p) for group in optimizer.param_groups for p in group["params"])
            alone = embeddings.issuperset(updated)
            (self._embedding_optimizers if alone else self._other_optimizers).append(optimizer)

        self.losses = RunningMean(self.device)
        self.last_loss: Tensor | None = None
        # Made once, as it would be a launch a step. On a CPU, PyTorch would import SymPy for it.
        self._one = torch.ones((), device=self.device) if self.device.type == "cuda" else None
        self._side = side_stream_of(self.device)
        self._sorter = RowSorter(self.device)
        by_group = model.sparse_arch.feature_order.by_group
        self.graphs = StepGraphs(self.device, by_group, self._undo)
        self.prefetcher = make_prefetcher(model.sparse_arch, reducer)
        if reducer is not None:  # captured graphs that exchange values must be gone by then
            reducer.world.before_leaving(self.graphs.close)

    def __call__(
        self, batch: Batch | PreparedBatch, *, norms: bool = False, run: Run = train_on_batch
    ) -> dict[str, Tensor]:
        """Train on one batch.

        Args:
            batch: on the model's device, preferably from :attr:`prefetcher`; with several
                processes, the share of this one.
            norms: also return the gradient norms of the dense part and of the embeddings.
            run: what a step computes, the same function in every call. It is captured if the mode
                is ``graph``.

        Returns:
            ``loss`` (and ``gradient_norm/dense``, ``gradient_norm/embeddings``) as 0-d tensors,
            to be read before the next step: a captured one writes to the same memory.
        """
        prepared = self.prefetcher.prepare(batch) if isinstance(batch, Batch) else batch
        self.losses.count += 1
        if self.mode == "graph" and self._can_capture(prepared.batch):
            out = self.graphs(partial(run, self), prepared, norms)
        else:
            out = run(self, prepared, norms)
        self.last_loss = out["loss"]
        return out

    def _can_capture(self, batch: Batch) -> bool:
        if self.reducer is not None and not self.reducer.is_even(batch):
            return False
        if batch.offsets is None:
            return True
        ragged = batch.bag_sizes is None
        capturable = self.model.sparse_arch.captures_bags(ragged=ragged)
        return capturable and batch.size > 0 and not (ragged and self.reducer is not None)

    @contextmanager
    def context(self, prepared: PreparedBatch, norms: bool) -> Iterator[LookupContext]:
        """Yield what the parts of a step on a batch share."""
        fused = () if self._wants_norms(norms) else self.optimizers
        whole = None if self.reducer is None else self.reducer.local  # gradients, not summed
        with self._sorter as sorter, apply_in_backward(fused, only=whole) as updates:
            context = replace(
                prepared.context,
                sorter=sorter,
                updates=updates,
                dtype=self._dtype,
                later=[] if self.device.type == "cuda" else None,
            )
            if self.reducer is not None:
                context = self.reducer.in_context(prepared.batch, context)
            yield context

    def forward(self, batch: Batch, context: LookupContext) -> Tensor:
        """The logits of a batch, ``[B]``."""
        with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16"):
            return self.model(batch.dense, batch.ids, batch.offsets, batch.bounds, context=context)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean loss of a batch, 0-d; with several processes, the part of it that is theirs."""
        size = batch.total_size
        loss = mean_loss(logits, batch.labels, batch.weights, self.odds, size)
        if self.reducer is None:
            with self._side.fork():  # on its own, it would add 5 us to a step of 0.17 ms
                self.losses.total.add_(loss.detach())
        return loss

    def backward(
        self, loss: Tensor, batch: Batch, context: LookupContext, *, norms: bool
    ) -> dict[str, Tensor]:
        """Compute the gradients, sum them over the processes and clip them.

        Returns:
            What :meth:`__call__` returns.
        """
        reducer = self.reducer
        total = self.losses.total
        out = {"loss": loss.detach() if reducer is None else reducer.sum_loss(loss, total)}
        loss.backward(self._one)
        norms = self._wants_norms(norms)
        if reducer is not None:
            with self._side.fork(wait=False):
                self.model.sparse_arch.join()
                reducer.reduce_embeddings(batch, context)
            reducer.reduce_dense()
            if norms:
                self._side.join()

        if norms:
            out |= self._norms()
        if self.clip_norm is not None:
            norm = torch.hypot(out["gradient_norm/dense"], out["gradient_norm/embeddings"])
            self._scale_gradients((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return out

    def _wants_norms(self, norms: bool) -> bool:
        return norms or self.clip_norm is not None

    def _norms(self) -> dict[str, Tensor]:
        """The gradient norms of the dense part and of the embeddings."""
        norm_of = self.reducer.norm if self.reducer else gradient_norm
        dense = norm_of(self.model.dense_parameters())
        embeddings = norm_of(self.model.sparse_arch.parameters()).to(self.device)
        return {"gradient_norm/dense": dense, "gradient_norm/embeddings": embeddings}

    def update(self) -> None:
        """Apply the gradients; embeddings are updated while the MLPs' backward pass still runs."""
        with self._side.fork(wait=self.clip_norm is not None):
            self.model.sparse_arch.join()
            for optimizer in self._embedding_optimizers:
                optimizer.step(sorter=self._sorter)
            self.model.sparse_arch.clear_shared_rows()
        for optimizer in self._other_optimizers:
            optimizer.step(sorter=self._sorter)
        self._side.join()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _undo(self) -> None:
        """Drop what a step left that was interrupted."""
        self.model.zero_grad()
        if self.reducer is not None:
            self.reducer.drop_gradients()

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None:  # in place: the sorter knows sparse ones by their rows
                (grad._values() if grad.is_sparse else grad).mul_(factor.to(grad.device))
