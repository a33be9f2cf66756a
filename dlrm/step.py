"""One training step: forward, loss, backward, update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.data.batch import Batch
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm


class TrainStep:
    """A training step on one device, without a synchronisation with the host.

    Args:
        model: the model, in training mode.
        optimizers: together they own every parameter.
        amp: run MLPs and interaction in bfloat16 autocast.
        clip_norm: scale all gradients down to this norm together; None for not at all.
    """

    def __init__(
        self,
        model: DLRM,
        optimizers: Sequence[RowOptimizer],
        *,
        amp: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.amp = amp
        self.clip_norm = clip_norm

    def __call__(self, batch: Batch, *, norms: bool = False) -> dict[str, Tensor]:
        """Train on one batch.

        Args:
            batch: on the model's device.
            norms: also give the gradient norms of the dense part and of the embeddings.

        Returns:
            ``loss`` (and ``gradient_norm/dense``, ``gradient_norm/embeddings``) as 0-d tensors.
        """
        with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=self.amp):
            logits = self.model(batch.dense, batch.ids, batch.offsets)
        loss = binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()
        out = {"loss": loss.detach()}
        if norms or self.clip_norm is not None:
            dense = gradient_norm(self.model.dense_parameters())
            embeddings = gradient_norm(self.model.sparse_arch.parameters())
            out["gradient_norm/dense"], out["gradient_norm/embeddings"] = dense, embeddings
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
