"""A trained model as a module for inference alone: dense features and ids to probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dlrm.export.lookups import lookup_of
from dlrm.kernels.cross import cross_network_torch
from dlrm.model import DLRM, CrossInteraction, CrossLayer


class InferenceModel(nn.Module):
    """A trained model of plain PyTorch operators, whose shapes depend on the batch alone.

    Args:
        model: the trained model, on the CPU. Its weights are not copied and become buffers, so it
            can't be used afterwards.
        multi_hot: for each feature, whether it has a list of ids.
        precision: number format of the tables; see :func:`~dlrm.export.lookups.lookup_of`.
    """

    def __init__(
        self, model: DLRM, multi_hot: Sequence[bool], *, precision: str | None = "fp32"
    ) -> None:
        super().__init__()
        self.bottom_mlp = nn.Sequential(*model.bottom_mlp)
        self.top_mlp = nn.Sequential(*model.top_mlp)
        self.cross = None
        if isinstance(model.interaction, CrossInteraction):
            self.cross = model.interaction.layers
        groups, order = model.sparse_arch.embeddings(), model.sparse_arch.feature_order
        self.tables = nn.ModuleList(lookup_of(group, precision) for group, _ in groups)
        self.modes = [group.mode for group, _ in groups]

        self.register_buffer("calibration", model.calibration.clone())
        self.calibration: Tensor  # scale and shift of the logits

        # Where the ids of each feature are in the inputs.
        self.features = order.groups
        self.multi_hot = list(multi_hot)
        count = len(self.multi_hot)
        singles = [f for f in range(count) if not self.multi_hot[f]]
        bags = [f for f in range(count) if self.multi_hot[f]]
        self._row_of = {feature: row for row, feature in enumerate(singles)}
        self._bag_of = {feature: bag for bag, feature in enumerate(bags)}
        for index, features in enumerate(self.features):
            tables = torch.arange(len(features)) // order.sharing[index]
            self.register_buffer(f"numbers_{index}", tables)
            rows = torch.tensor([self._row_of.get(feature, -1) for feature in features])
            self.register_buffer(f"columns_{index}", rows)

        by_group = [feature for features in self.features for feature in features]
        self.register_buffer("order", torch.tensor(by_group).argsort())
        below = torch.tril_indices(count + 1, count + 1, -1)
        self.register_buffer("pairs", below[0] * (count + 1) + below[1])
        self.order: Tensor  # [F] the position of each feature's vectors among those of all groups
        self.pairs: Tensor  # [F (F + 1) / 2] products below the diagonal

        # Buffers only, and all of them persistent: everything is saved, and nothing has a gradient.
        for module in self.eval().modules():
            for name in list(module._parameters):
                value = module._parameters.pop(name)
                module.register_buffer(name, None if value is None else value.detach())
            module._non_persistent_buffers_set.clear()

    def forward(self, dense: Tensor, ids: Tensor, *bags: Tensor) -> Tensor:
        """Score a batch.

        Args:
            dense: dense features, ``[N, B]`` float32.
            ids: the ids of features with one each, ``[F_1, B]`` int64, each inside its table.
            bags: for each feature with lists of ids, in order: ``values [nnz]`` and
                ``offsets [B + 1]``, the first of the values of each row; int64.

        Returns:
            Probabilities, ``[B]`` float32.
        """
        bottom = self.bottom_mlp(dense.t())  # [B, D]
        parts = [
            self._vectors(index, ids, bags, dense.shape[1]) for index in range(len(self.features))
        ]
        vectors = torch.cat(parts).index_select(0, self.order).transpose(0, 1)  # [B, F, D]
        both = torch.cat([bottom[:, None], vectors], dim=1)  # [B, F + 1, D]

        if self.cross is not None:
            weights = [layer.weights for layer in cast(Sequence[CrossLayer], self.cross)]
            crossed = cross_network_torch(both.flatten(1), weights)
        else:
            products = torch.bmm(both, both.transpose(1, 2)).flatten(1)
            crossed = torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)

        logits = self.top_mlp(crossed).squeeze(1)
        logits = logits.float() * self.calibration[0] + self.calibration[1]
        return torch.sigmoid(logits.double()).float()

    def _vectors(self, index: int, ids: Tensor, bags: Sequence[Tensor], batch: int) -> Tensor:
        """The vectors of a group, ``[F_g, B, D]``."""
        lookup, features = self.tables[index], self.features[index]
        numbers = self.get_buffer(f"numbers_{index}")
        if not any(self.multi_hot[feature] for feature in features):
            group_ids = ids.index_select(0, self.get_buffer(f"columns_{index}"))
            return lookup(numbers[:, None], group_ids)

        vectors = []
        for number, feature in zip(numbers.split(1), features, strict=True):
            if self.multi_hot[feature]:
                bag = 2 * self._bag_of[feature]
                values, offsets = bags[bag], bags[bag + 1]
                found = lookup(number, values)
                vectors.append(_pooled(found, offsets, batch, self.modes[index]))
            else:
                vectors.append(lookup(number, ids[self._row_of[feature]]))
        return torch.stack(vectors)


def _pooled(vectors: Tensor, offsets: Tensor, batch: int, mode: str) -> Tensor:
    """Pool bags: ``vectors [nnz, D]`` and ``offsets [B + 1]`` to ``[B, D]``."""
    starts = offsets.new_zeros(vectors.shape[0] + 1)  # number of bags that start at each vector
    starts = starts.index_add(0, offsets, torch.ones_like(offsets))
    bag = starts.cumsum(0)[:-1] - 1
    out = vectors.new_zeros(batch, vectors.shape[1])
    if mode == "max":
        where = bag[:, None].expand(vectors.shape)
        return out.scatter_reduce(0, where, vectors, "amax", include_self=False)
    out = out.index_add(0, bag, vectors)
    return out / offsets.diff().clamp(min=1)[:, None] if mode == "mean" else out
