"""One training step: forward, loss, backward, update; eager, compiled, or captured."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.data.batch import Batch
from dlrm.hints import nearest
from dlrm.kernels.branch import branch_of
from dlrm.kernels.plan import Planner
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm
from dlrm.reduce import Reducer
from dlrm.rounds import Rounds

MODES = ("auto", "eager", "compile", "graph")
PRECISIONS = ("fp32", "tf32", "bf16")
FUSION = {"combo_kernels": True}  # one launch to cast all weights, one to sum several biases
WARM_UP = 3  # steps of a shape that run one by one before it is captured


LOOK_AHEAD = 3  # number of a branch
Key = tuple[int, bool, bool, int | None]  # of a captured step: its size and what else is asked


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step is asked for."""

    batch: Batch
    upcoming: Batch | None
    foreseen: int | None  # in which of two places the last step prepared its look-ups
    norms: bool
    total: int

    @property
    def key(self) -> Key:
        """Work of one key is the same on other values."""
        return self.batch.size, self.norms, self.upcoming is not None, self.foreseen


@dataclass(frozen=True)
class Captured:
    """A step as a CUDA graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    work: Work
    out: dict[str, Tensor]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy in fp32, ``[B]`` and ``[B]`` to a 0-d tensor."""
    return binary_cross_entropy_with_logits(logits.float(), labels)


def _parameters(optimizer: RowOptimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


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
            the MLPs and the interaction, what stays in fp32 (TT cores) being multiplied in tf32.
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
        reducer: Reducer | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown step mode {mode!r}{nearest(mode, MODES)}")
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}")
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
            for mlp in (model.bottom_mlp, model.top_mlp):
                mlp.compile(dynamic=False, options=FUSION if on_gpu else None)
        self._loss = mean_loss if self.mode == "eager" else torch.compile(mean_loss, dynamic=False)
        embeddings = {id(parameter) for parameter in model.sparse_arch.parameters()}
        self._beside = [o for o in optimizers if embeddings.issuperset(map(id, _parameters(o)))]
        self._branch = branch_of(self.device)
        self._planner = Planner(self.device) if on_gpu else nullcontext()
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self._knows = reducer is None and model.sparse_arch.knows
        # What others update must not move.
        ahead = reducer is None and model.sparse_arch.round_of(1) > 0
        self._rounds = Rounds(model.sparse_arch) if ahead else None
        self._announced: Batch | None = None  # the upcoming batch of the last step
        self._ahead = branch_of(self.device, LOOK_AHEAD)
        # What look-ups need to know, by batch size and place: one in use, one for the next step.
        self._known: dict[tuple[int, int], list[Any]] = {}
        self._place = 0
        self._pool = torch.cuda.graph_pool_handle() if self.mode == "graph" else None
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
                embeddings may fetch their rows or prepare their look-ups ahead. They must stay as
                they are until then.

        Returns:
            ``loss`` (and ``gradient_norm/dense``, ``gradient_norm/embeddings``) as 0-d tensors,
            to be read before the next step: a captured one writes to the same place.
        """
        total = batch.size if total is None else total
        known = [upcoming] if isinstance(upcoming, Batch) else list(upcoming or ())
        with self._rounds.step(batch, known) if self._rounds else nullcontext():
            return self._step(batch, norms, total, known[0] if known else None)

    def _step(
        self, batch: Batch, norms: bool, total: int, upcoming: Batch | None
    ) -> dict[str, Tensor]:
        uneven = self.reducer is not None and total % self.reducer.world.size > 0
        if not self._knows or (upcoming and upcoming.size != batch.size):
            upcoming = None  # a graph has one shape
        foreseen = self._place if batch is self._announced else None
        if (batch.size, foreseen) not in self._known:
            foreseen = None
        work = Work(batch=batch, upcoming=upcoming, foreseen=foreseen, norms=norms, total=total)
        self._announced, self._place = upcoming, 1 if foreseen == 0 else 0
        if self.mode != "graph" or batch.offsets is not None or uneven:
            return self._run(work)
        captured = self._captured.get(work.key)
        if captured is not None:
            captured.work.batch.copy_(batch)
            if captured.work.upcoming is not None and upcoming is not None:
                captured.work.upcoming.ids.copy_(upcoming.ids)
            captured.graph.replay()
            return captured.out
        began = time.perf_counter()
        out = self._prepare(work)
        self.preparing_seconds += time.perf_counter() - began
        return out

    def _prepare(self, work: Work) -> dict[str, Tensor]:
        """A step of a kind that is not captured yet, and may be now."""
        key, own = work.key, work.batch.size
        self._seen[key] += 1
        if self._seen[key] > WARM_UP:
            captured = self._captured[key] = self._capture(work)
            captured.graph.replay()
            return captured.out
        # The short last batch of an epoch is not worth the seconds of compiling for its size.
        compiled = not self._captured or any(size == own for size, *_ in self._captured)
        compiles = compiled or self._seen[key] == WARM_UP
        with nullcontext() if compiles else set_stance("force_eager"):
            return self._warm_up(work)

    def close(self) -> None:
        """Drop the captured graphs."""
        self._captured.clear()

    def _run(self, work: Work) -> dict[str, Tensor]:
        batch, upcoming, norms, total = work.batch, work.upcoming, work.norms, work.total
        known = None if work.foreseen is None else self._known[batch.size, work.foreseen]
        reducer = self.reducer
        sharing = reducer.step(total, one_hot=batch.offsets is None) if reducer else nullcontext()
        norm_of = reducer.norm if reducer else gradient_norm
        with self._planner, sharing:
            with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16"):
                logits = self.model(batch.dense, batch.ids, batch.offsets, known=known)
            if upcoming is not None and upcoming.offsets is not None:
                upcoming = None
            if upcoming is not None:
                self._look_ahead(upcoming, 1 if work.foreseen == 0 else 0)
            loss = self._loss(logits, batch.labels)
            if reducer is not None:  # a mean over no samples is not a number
                loss = loss * (batch.size / total) if batch.size else logits.float().sum()
            loss.backward()
            out = {"loss": loss.detach()}
            if reducer is not None:
                with self._branch.fork(wait=False):
                    reducer.reduce_embeddings()
                out["loss"] = reducer.reduce_dense(out["loss"])
                if norms or self.clip_norm is not None:
                    self._branch.join()
            if norms or self.clip_norm is not None:
                dense = norm_of(self.model.dense_parameters())
                embeddings = norm_of(self.model.sparse_arch.parameters()).to(self.device)
                out |= {"gradient_norm/dense": dense, "gradient_norm/embeddings": embeddings}
                if self.clip_norm is not None:
                    norm = torch.hypot(dense, embeddings)
                    self._scale_gradients((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
            self._update()
            if upcoming is not None:  # a capture can't wait for a stream that has no part in it
                self._ahead.join()
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

    def _look_ahead(self, upcoming: Batch, place: int) -> None:
        """Prepare the next look-ups beside the backward pass."""
        key = upcoming.size, place
        with self._ahead.fork():
            known = self.model.sparse_arch.know(upcoming.ids, self._known.get(key))
        if known is not None:
            self._known[key] = known

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.device))

    def _warm_up(self, work: Work) -> dict[str, Tensor]:
        """A step one by one on a side stream, as capture asks for."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = self._run(work)
        current.wait_stream(side)
        return out

    def _capture(self, work: Work) -> Captured:
        """Record a step on copies of the batches; nothing is computed yet."""
        upcoming = work.upcoming and work.upcoming.clone()
        work = replace(work, batch=work.batch.clone(), upcoming=upcoming)
        graph = torch.cuda.CUDAGraph()
        # The MLPs are the longer chain: where a branch has work ready as well, theirs goes first.
        first = torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.graph(graph, pool=self._pool, stream=first):
            torch.zeros((), device=self.device)  # one root: with two, both wait for 10 us
            out = self._run(work)
        return Captured(graph, work, out)
