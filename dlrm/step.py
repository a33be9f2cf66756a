"""One training step: forward, loss, backward, update; eager, compiled, or captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.data.batch import Batch
from dlrm.hints import nearest
from dlrm.kernels.plan import Planner
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm

MODES = ("auto", "eager", "compile", "graph")
PRECISIONS = ("fp32", "tf32", "bf16")
WARM_UP = 3  # steps of a shape that run one by one before it is captured


@dataclass(frozen=True)
class Captured:
    """A step of one batch size as a CUDA graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    out: dict[str, Tensor]


class TrainStep:
    """A training step on one device, without a synchronisation with the host.

    ``eager`` runs operation by operation. ``compile`` has ``torch.compile`` fuse the MLPs.
    ``graph`` does so too and captures the whole step, the optimizers included, as a CUDA graph
    for each batch size that comes up often: launches, which otherwise are most of the time of a
    small batch, cost next to nothing. ``auto`` is ``graph`` on a GPU and ``eager`` elsewhere.
    Batches with bags of ids change their shape from step to step and are never captured.

    Args:
        model: the model, in training mode.
        optimizers: together they own every parameter.
        precision: of the matrix products: ``fp32``; ``tf32`` on a GPU; or ``bf16``, autocast of
            the MLPs and the interaction, what stays in fp32 (TT cores) being multiplied in tf32.
        clip_norm: scale all gradients down to this norm together; None for not at all.
        mode: one of ``auto``, ``eager``, ``compile``, ``graph``.

    Raises:
        ValueError: an unknown mode or precision, or graph without a GPU.
    """

    def __init__(
        self,
        model: DLRM,
        optimizers: Sequence[RowOptimizer],
        *,
        precision: str = "fp32",
        clip_norm: float | None = None,
        mode: str = "auto",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"unknown step mode {mode!r}{nearest(mode, MODES)}")
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}")
        self.device = next(model.parameters()).device
        on_gpu = self.device.type == "cuda"
        if mode == "graph" and not on_gpu:
            raise ValueError("--step graph needs a GPU; use --step eager or compile")
        self.mode = ("graph" if on_gpu else "eager") if mode == "auto" else mode
        self.model = model
        self.optimizers = optimizers
        self.clip_norm = clip_norm
        self.precision = precision
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        if self.mode != "eager":
            for mlp in (model.bottom_mlp, model.top_mlp):
                mlp.compile(dynamic=False)
        self._planner = Planner(self.device) if on_gpu else nullcontext()
        self._seen: Counter[tuple[int, bool]] = Counter()
        self._captured: dict[tuple[int, bool], Captured] = {}

    def __call__(self, batch: Batch, *, norms: bool = False) -> dict[str, Tensor]:
        """Train on one batch.

        Args:
            batch: on the model's device.
            norms: also give the gradient norms of the dense part and of the embeddings.

        Returns:
            ``loss`` (and ``gradient_norm/dense``, ``gradient_norm/embeddings``) as 0-d tensors,
            to be read before the next step: a captured one writes to the same place.
        """
        if self.mode != "graph" or batch.offsets is not None:
            return self._run(batch, norms)
        key = (batch.size, norms)
        self._seen[key] += 1
        if key in self._captured:
            captured = self._captured[key]
            captured.batch.copy_(batch)
        elif self._seen[key] <= WARM_UP:
            return self._warm_up(batch, norms)
        else:
            captured = self._captured[key] = self._capture(batch, norms)
        captured.graph.replay()
        return captured.out

    def _run(self, batch: Batch, norms: bool) -> dict[str, Tensor]:
        with self._planner:
            with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16"):
                logits = self.model(batch.dense, batch.ids, batch.offsets)
            loss = binary_cross_entropy_with_logits(logits.float(), batch.labels)
            loss.backward()
            out = {"loss": loss.detach()}
            if norms or self.clip_norm is not None:
                dense = gradient_norm(self.model.dense_parameters())
                embeddings = gradient_norm(self.model.sparse_arch.parameters())
                out |= {"gradient_norm/dense": dense, "gradient_norm/embeddings": embeddings}
                if self.clip_norm is not None:
                    norm = torch.hypot(dense, embeddings)
                    self._scale_gradients((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return out

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _warm_up(self, batch: Batch, norms: bool) -> dict[str, Tensor]:
        """A step one by one on a side stream, as capture asks for."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = self._run(batch, norms)
        current.wait_stream(side)
        return out

    def _capture(self, batch: Batch, norms: bool) -> Captured:
        """Record a step on copies of ``batch``; nothing is computed yet."""
        static = batch.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._run(static, norms)
        return Captured(graph, static, out)
