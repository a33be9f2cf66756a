"""The deep learning recommendation model: MLPs, interactions, and DLRM itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from dlrm.distributed.sharding_plan import ShardingPlan
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.kernels.cross import CrossWeights, cast_layers, cross_network
from dlrm.kernels.interaction import dot_interaction
from dlrm.kernels.mlp import mlp
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import TablePlan
from dlrm.utils.messages import did_you_mean
from dlrm.utils.streams import side_stream_of

Interact = Callable[[Tensor, list[Tensor], Tensor], Tensor]
"""Function of the bottom vector, the embeddings of the groups and their order; returns the crossed
features."""

INTERACTIONS = ("dot", "dcn")
# A layer on no dense features has no weights to initialize.
warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op", UserWarning)


class MLP(nn.Sequential):
    """Linear layers with ReLU between them and, with ``final_relu``, after the last one.

    Weights start as N(0, sqrt(2 / (m + n))), biases as N(0, sqrt(1 / m)) for m outputs and n
    inputs, as in the reference DLRM (Naumov et al., arXiv 1906.00091).

    In training, ``dropout`` is the share of the outputs of hidden layers that is set to 0.
    """

    def __init__(
        self, sizes: Sequence[int], *, final_relu: bool = True, dropout: float = 0.0
    ) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            linear = nn.Linear(inputs, outputs)
            nn.init.normal_(linear.weight, std=(2 / (outputs + inputs)) ** 0.5)
            nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5)
            layers += [linear, nn.ReLU()]
        super().__init__(*(layers if final_relu else layers[:-1]))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n]`` to ``[B, m]``; columns of ``x`` beyond n must be zeros and are ignored."""
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        if x.shape[1] < layers[0].in_features:
            raise ValueError(
                f"x has {x.shape[1]} columns, it must have {layers[0].in_features} or more"
            )
        return mlp(
            x,
            [layer.weight for layer in layers],
            [layer.bias for layer in layers],
            final_relu=isinstance(self[-1], nn.ReLU),
            dropout=self.dropout if self.training else 0.0,
        )


class DotInteraction(nn.Module):
    """The bottom MLP's output, then the dot products of all pairs of the ``F + 1`` vectors.

    Reference: Naumov et al., arXiv 1906.00091.
    """

    def __init__(self, num_tables: int, embedding_dim: int) -> None:
        super().__init__()
        self.out_features = embedding_dim + num_tables * (num_tables + 1) // 2

    def begin(self) -> Interact:
        """Do what needs no arguments yet, and return the function to call with them."""
        return self

    def forward(self, bottom: Tensor, embedded: list[Tensor], order: Tensor) -> Tensor:
        """Combine dense and sparse features.

        Args:
            bottom: the output of the bottom MLP, ``[B, D]``.
            embedded: the vectors of each group of tables, ``[B, F_g, D]``.
            order: the position of each feature among the vectors of all groups, ``[F]``.

        Returns:
            ``[B, D + F (F + 1) / 2]``; on a GPU followed by up to 7 columns of zeros, since tensor
            cores need rows aligned to 16 bytes.
        """
        multiple = 8 if bottom.is_cuda else 1
        return dot_interaction(bottom, embedded, order=order, multiple=multiple)


class CrossLayer(nn.Module):
    """The weights of ``x_0 * (W (V x) + b) + x`` with V of ``rank`` outputs."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(features, rank, bias=False)
        self.up = nn.Linear(rank, features)
        nn.init.xavier_normal_(self.down.weight)
        nn.init.xavier_normal_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    @property
    def weights(self) -> CrossWeights:
        """V, W and b."""
        return CrossWeights(self.down.weight, self.up.weight, self.up.bias)


class CrossInteraction(nn.Module):
    """The low-rank cross network of DCN-V2 on the concatenation of all vectors.

    Reference: Wang et al., "DCN V2", WWW 2021, arXiv 2008.13535.
    """

    def __init__(self, num_tables: int, embedding_dim: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.out_features = (num_tables + 1) * embedding_dim
        self.layers = nn.ModuleList(CrossLayer(self.out_features, rank) for _ in range(layers))

    def begin(self) -> Interact:
        """Cast the weights ahead, and return the function to call; see :class:`DotInteraction`."""
        weights = [layer.weights for layer in cast(Sequence[CrossLayer], self.layers)]
        device = weights[0].bias.device.type if weights else "cpu"
        casts = torch.is_autocast_enabled(device)
        layers = cast_layers(weights, torch.get_autocast_dtype(device) if casts else torch.float32)

        def interact(bottom: Tensor, embedded: list[Tensor], order: Tensor) -> Tensor:
            return cross_network(bottom, embedded, layers, order=order)

        return interact

    def forward(self, bottom: Tensor, embedded: list[Tensor], order: Tensor) -> Tensor:
        """Arguments as in :class:`DotInteraction`; returns ``[B, (F + 1) D]``."""
        return self.begin()(bottom, embedded, order)


class DLRM(nn.Module):
    """Deep learning recommendation model over dense features and embedding tables.

    Args:
        num_dense: number of dense features N.
        num_embeddings: rows of each table.
        embedding_dim: length D of a row.
        plan: kind and options of each table; see ``dlrm.sparse_arch.table_plan``.
        bottom_mlp: hidden sizes of the bottom MLP; its last layer has D outputs.
        top_mlp: hidden sizes of the top MLP; its last layer has one output.
        interaction: ``dot`` or ``dcn``.
        cross_layers, cross_rank: number of layers and rank of the dcn interaction.
        tables_dtype: type of the embedding parameters, ``fp32``, ``bf16``, ``int8`` or ``int4``;
            see :class:`~dlrm.sparse_arch.arch.SparseArch`.
        sharding: how tables are sharded over several processes.
        dropout: share of the outputs of hidden layers that training sets to 0.

    Raises:
        ValueError: an unknown name, or a plan without exactly one entry for each table.

    Reference: Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", arXiv 1906.00091.
    """

    def __init__(
        self,
        num_dense: int,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: TablePlan,
        *,
        bottom_mlp: Sequence[int] = (512, 256, 64),
        top_mlp: Sequence[int] = (512, 256),
        interaction: str = "dot",
        cross_layers: int = 3,
        cross_rank: int = 512,
        tables_dtype: str = "fp32",
        sharding: ShardingPlan | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        tables = len(num_embeddings)
        if len(plan) != tables:
            raise ValueError(f"the plan has {len(plan)} entries for {tables} tables")
        self.num_dense = num_dense

        self.interaction: DotInteraction | CrossInteraction
        if interaction == "dot":
            self.interaction = DotInteraction(tables, embedding_dim)
        elif interaction == "dcn":
            self.interaction = CrossInteraction(
                tables, embedding_dim, layers=cross_layers, rank=cross_rank
            )
        else:
            raise ValueError(
                f"unknown interaction {interaction!r}{did_you_mean(interaction, INTERACTIONS)}"
            )

        self.bottom_mlp = MLP([num_dense, *bottom_mlp, embedding_dim], dropout=dropout)
        top_sizes = [self.interaction.out_features, *top_mlp, 1]
        self.top_mlp = MLP(top_sizes, final_relu=False, dropout=dropout)
        self.sparse_arch = SparseArch(
            num_embeddings, embedding_dim, plan, dtype=tables_dtype, sharding=sharding
        )

        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))
        self.calibration: Tensor  # scale and shift of the logits, except in training

    def forward(
        self,
        dense: Tensor,
        ids: Tensor,
        offsets: Tensor | None = None,
        bounds: Sequence[int] | None = None,
        *,
        context: LookupContext = NO_CONTEXT,
    ) -> Tensor:
        """Score a feature-major batch.

        Args:
            dense: ``[N, B]``.
            ids: ``[F, B]``, or ``[nnz]`` with ``offsets [F * B + 1]``.
            bounds: ``offsets[::B]``, if on the host; otherwise the host may wait for the device.
            context: what a training step prepared for the look-ups.

        Returns:
            Logits, ``[B]``; in evaluation mode calibrated ones.

        Raises:
            ValueError: dense features or ids of the wrong shape, or ids that are not integers.
        """
        if dense.dim() != 2 or len(dense) != self.num_dense:
            raise ValueError(
                f"dense has shape {tuple(dense.shape)}, it must be [{self.num_dense}, B]: "
                "one row per dense feature"
            )

        # The look-ups run next to the bottom MLP, which is launched first: it takes longer for
        # small batches. What the interaction begins ends, in the backward pass, before that of the
        # bottom MLP, next to which its large gradients are summed over processes.
        stream = side_stream_of(ids.device)
        begin = stream.record_event()
        bottom = self.bottom_mlp(dense.t())  # [B, D]
        interact = self.interaction.begin()
        with stream.fork(after=begin):  # [B, F_g, D] of each group
            embedded = self.sparse_arch(ids, offsets, bounds=bounds, context=context)
        stream.join()
        for lane, work in context.later or ():
            with torch.cuda.stream(lane):
                work()

        order = self.sparse_arch.feature_order.positions
        crossed = interact(bottom, embedded, order)
        logits = self.top_mlp(crossed).squeeze(1)
        if self.training:
            return logits
        scale, shift = self.calibration
        return logits.float() * scale + shift

    def load_trained(
        self, trained: DLRM, extend: Callable[[list[Tensor]], list[Tensor]] | None = None
    ) -> None:
        """Copy the MLPs of a trained model and fit the embeddings to its tables.

        Args:
            trained: a model of the same shape; its embeddings may be of any kind.
            extend: adds rows to its tables, each ``[V, D]``, if this model has more.

        Raises:
            ValueError: the models differ in more than their embeddings.
        """
        if self.num_dense != trained.num_dense:
            raise ValueError(
                f"the trained model has {trained.num_dense} dense features, this one "
                f"{self.num_dense}: it was trained on other data"
            )
        for name in ("bottom_mlp", "interaction", "top_mlp"):
            own, other = (getattr(model, name) for model in (self, trained))
            shapes = [[p.shape for p in part.parameters()] for part in (own, other)]
            if type(own) is not type(other) or shapes[0] != shapes[1]:
                raise ValueError(
                    f"the trained model has a different {name}: use the --model options of that "
                    "model"
                )
            own.load_state_dict(other.state_dict())
        self.calibration.copy_(trained.calibration)
        tables = trained.sparse_arch.to_dense()
        self.sparse_arch.load_dense(extend(tables) if extend else tables)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters of the MLPs and the interaction."""
        modules = (self.bottom_mlp, self.interaction, self.top_mlp)
        return [parameter for module in modules for parameter in module.parameters()]
