"""One training step: forward, loss, backward, update; eager, compiled, or captured."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.data.batch import Batch
from dlrm.kernels.multi_copy import copy_together
from dlrm.kernels.streams import side_stream_of, stream_of
from dlrm.kernels.update.row_sort import RowSorter
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, fused, gradient_norm
from dlrm.sparse_arch.arch import SparseArch
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.prefetch import RowPrefetcher, SortPrefetcher
from dlrm.utils.messages import did_you_mean

MODES = ("auto", "eager", "compile", "graph")
PRECISIONS = ("fp32", "tf32", "bf16")
FUSION = {"combo_kernels": True}  # one launch to cast all weights, one to sum several biases
WARM_UP = 3  # steps of a shape that run one by one before it is captured
SHAPES = 64  # for which MLPs are compiled in one process: models share what PyTorch counts


Key = tuple[int, bool]  # of a captured step: batch size, with norms


@dataclass(frozen=True)
class Captured:
    """A step of one batch size as a CUDA graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch  # its ids in the order of the groups
    out: dict[str, Tensor]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy in fp32, ``[B]`` and ``[B]`` to a 0-d tensor."""
    return binary_cross_entropy_with_logits(logits.float(), labels)


def _parameters(optimizer: RowOptimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _ahead_of(
    arch: SparseArch, device: torch.device, *, alone: bool
) -> RowPrefetcher | SortPrefetcher | None:
    """What is done for the embeddings ahead of a step, by one process or by each of several."""
    if alone:  # what others update must not move
        return RowPrefetcher(arch) if arch.round_of(1) else None
    return SortPrefetcher(arch, device) if arch.at_peers() else None


class TrainStep:
    """A training step on one device, without a synchronisation with the host.

    ``eager`` runs operation by operation. ``compile`` has ``torch.compile`` fuse the MLPs.
    ``graph`` does so too and captures the whole step, the optimizers included, as a CUDA graph
    for each batch size that comes up often: launches, which otherwise are most of the time of a
    small batch, cost next to nothing. ``auto`` is ``graph`` on a GPU, ``compile`` where tables lie
    on other devices as well, and ``eager`` elsewhere.
    Batches with bags of ids change their shape from step to step and are never captured.

    Args:
        model: the model, in training mode.
        optimizers: together they own every parameter.
        precision: of the matrix products: ``fp32``; ``tf32`` on a GPU; or ``bf16``, autocast of
            the MLPs, the interaction and the products of TT cores; parameters stay in fp32.
        clip_norm: scale all gradients down to this norm together; None for not at all.
        mode: one of ``auto``, ``eager``, ``compile``, ``graph``.
        deterministic: equal seeds give equal bits on a GPU as well; holds for the whole process.
        reducer: sums the gradients over the processes, if there are several.

    Attributes:
        preparing_seconds: time spent in steps that were compiled or captured, or ran one by one
            before that.

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
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown step mode {mode!r}{did_you_mean(mode, MODES)}")
        if precision not in PRECISIONS:
            raise ValueError(
                f"unknown precision {precision!r}{did_you_mean(precision, PRECISIONS)}"
            )
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        one = all(parameter.device == self.device for parameter in model.parameters())
        if mode == "graph" and not (on_gpu and one):
            raise ValueError(
                "--step graph needs a GPU, and all tables in its memory or in pinned host memory; "
                "use --step eager or compile"
            )
        auto = "eager" if not on_gpu else "graph" if one else "compile"
        self.mode = auto if mode == "auto" else mode
        self.model = model
        self.optimizers = optimizers
        self.clip_norm = clip_norm
        self.reducer = reducer
        self.precision = precision
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one for every stream
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.mode != "eager":
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, SHAPES)
            for mlp in (model.bottom_mlp, model.top_mlp):
                mlp.compile(dynamic=False, options=FUSION if on_gpu else None)
        self._loss = mean_loss if self.mode == "eager" else torch.compile(mean_loss, dynamic=False)
        embeddings = {id(parameter) for parameter in model.sparse_arch.parameters()}
        self._beside = [o for o in optimizers if embeddings.issuperset(map(id, _parameters(o)))]
        self._branch = side_stream_of(self.device)
        self._planner = RowSorter(self.device) if on_gpu else nullcontext()
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self._ahead = _ahead_of(model.sparse_arch, self.device, alone=reducer is None)
        if reducer is not None:
            reducer.world.before_leaving(self.close)
        self.preparing_seconds = 0.0

    def __call__(
        self,
        batch: Batch,
        *,
        norms: bool = False,
        total: int | None = None,
        upcoming: Batch | Sequence[Batch] | None = None,
    ) -> dict[str, Tensor]:
        """Train on one batch.

        Args:
            batch: on the model's device; with several processes this one's share.
            norms: also give the gradient norms of the dense part and of the embeddings.
            total: samples of the shares of all processes together.
            upcoming: the batch of the next step, or of several, as far as they are known:
                embeddings may fetch their rows or sort their ids ahead. They must stay as they are
                until then.

        Returns:
            ``loss`` (and ``gradient_norm/dense``, ``gradient_norm/embeddings``) as 0-d tensors,
            to be read before the next step: a captured one writes to the same place.
        """
        total = batch.size if total is None else total
        known = [upcoming] if isinstance(upcoming, Batch) else list(upcoming or ())
        with self._ahead.step(batch, known) if self._ahead else nullcontext():
            return self._step(batch, norms, total)

    def look_ahead(self, samples: int) -> int:
        """How many batches of so many samples it is of use to know behind the present one."""
        return self._ahead.look_ahead(samples) if self._ahead else 0

    def _step(self, batch: Batch, norms: bool, total: int) -> dict[str, Tensor]:
        uneven = self.reducer is not None and total % self.reducer.world.size > 0
        if self.mode != "graph" or batch.offsets is not None or uneven:
            return self._run(batch, norms, total)
        captured = self._captured.get((batch.size, norms))
        if captured is not None:
            self._place(captured.batch, batch)
            captured.graph.replay()
            return captured.out
        began = time.perf_counter()
        out = self._prepare(batch, norms, total)
        self.preparing_seconds += time.perf_counter() - began
        return out

    def _prepare(self, batch: Batch, norms: bool, total: int) -> dict[str, Tensor]:
        """A step of a batch size that is not captured yet, and may be now."""
        key = (batch.size, norms)
        self._seen[key] += 1
        if self._seen[key] > WARM_UP:
            captured = self._captured[key] = self._capture(batch, norms, total)
            captured.graph.replay()
            return captured.out
        # The short last batch of an epoch is not worth the seconds of compiling for its size.
        known = not self._captured or any(size == batch.size for size, _ in self._captured)
        compiles = known or self._seen[key] == WARM_UP
        with nullcontext() if compiles else set_stance("force_eager"):
            return self._warm_up(batch, norms, total)

    def close(self) -> None:
        """Drop the captured graphs; the next step of a batch size is captured anew."""
        self._captured.clear()

    def _place(self, to: Batch, batch: Batch) -> None:
        """Copy a batch to where a captured step reads it."""
        copy_together(
            (to.dense, to.labels, to.ids),
            (batch.dense, batch.labels, batch.ids),
            (None, None, self.model.sparse_arch.features),
        )

    def _run(
        self, batch: Batch, norms: bool, total: int, *, grouped: bool = False
    ) -> dict[str, Tensor]:
        reducer = self.reducer
        sharing = reducer.step(total, one_hot=batch.offsets is None) if reducer else nullcontext()
        norm_of = reducer.norm if reducer else gradient_norm
        norms = norms or self.clip_norm is not None
        fusing = nullcontext() if norms or reducer is not None else fused(self.optimizers)
        with self._planner, sharing, fusing:
            with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16"):
                logits = self.model(
                    batch.dense, batch.ids, batch.offsets, batch.bounds, grouped=grouped
                )
            loss = self._loss(logits, batch.labels)
            if reducer is not None:  # a mean over no samples is not a number
                loss = loss * (batch.size / total) if batch.size else logits.float().sum()
            loss.backward()
            out = {"loss": loss.detach()}
            if reducer is not None:
                with self._branch.fork(wait=False):
                    reducer.reduce_embeddings()
                out["loss"] = reducer.reduce_dense(out["loss"])
                if norms:
                    self._branch.join()
            if norms:
                dense = norm_of(self.model.dense_parameters())
                embeddings = norm_of(self.model.sparse_arch.parameters()).to(self.device)
                out |= {"gradient_norm/dense": dense, "gradient_norm/embeddings": embeddings}
                if self.clip_norm is not None:
                    norm = torch.hypot(dense, embeddings)
                    self._scale_gradients((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
            self._update()
        return out

    def _update(self) -> None:
        """Apply the gradients, those of the embeddings beside the backward pass of the MLPs."""
        with self._branch.fork(wait=self.clip_norm is not None):
            for optimizer in self._beside:
                optimizer.step()
        for optimizer in self.optimizers:
            if optimizer not in self._beside:
                optimizer.step()
        self._branch.join()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None:  # in place: the planner knows the rows of a sparse one
                (grad._values() if grad.is_sparse else grad).mul_(factor.to(grad.device))

    def _warm_up(self, batch: Batch, norms: bool, total: int) -> dict[str, Tensor]:
        """A step one by one on a side stream, as capture asks for."""
        current, side = torch.cuda.current_stream(), stream_of(self.device, "steps")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = self._run(batch, norms, total)
        current.wait_stream(side)
        return out

    def _capture(self, batch: Batch, norms: bool, total: int) -> Captured:
        """Record a step on a copy of the batch; nothing is computed yet."""
        static = batch.clone()
        self._place(static, batch)
        graph = torch.cuda.CUDAGraph()
        if not self._captured:  # one replay follows the other: graphs share their memory
            self._pool = torch.cuda.graph_pool_handle()
        # Meanwhile a thread may fetch rows, with streams and memory of its own.
        stream = stream_of(self.device, "steps")
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            out = self._run(static, norms, total, grouped=True)
        return Captured(graph, static, out)
