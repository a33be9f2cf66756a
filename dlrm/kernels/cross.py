"""The low-rank cross network of DCN-V2 on the concatenation of all vectors.

A layer is ``x_{l+1} = x_0 * f_l + x_l`` with ``f_l = W (V x_l) + b``. The matrix products are those
of the library; all that lies between two of them is one launch, and the embeddings are read in
place: no concatenation in fp32, no copy in another order, no cast.

The backward pass keeps ``s_l``, the gradient of ``x_l`` times ``x_0``. With ``t_l = V^T W^T
s_{l+1}``, ``s_l = s_{l+1} + x_0 * t_l``, which is a layer again, and no product has to add to what
is in memory. The gradient of ``x_0`` is summed where it is split into those of the vectors: since
``x_l = x_0 * (1 + f_0 + ... + f_{l-1})``, it is ``t_0 + t_1 * (1 + f_0) + ...``, where the last
factor is the gradient of the output.

Bytes per sample that must be moved next to the products, for ``n`` features of ``e`` bytes and
``L`` layers: ``4 n e`` a layer forward (``x_0``, ``x_l`` and ``f_l`` in, ``x_{l+1}`` out), and as
many backward for each but the last; ``2 n e`` to concatenate and ``(2 L + 5) n e`` to begin and to
end the backward pass.

Reference: Wang et al., "DCN V2", WWW 2021, arXiv 2008.13535.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, tl, triton, use_triton
from dlrm.kernels.interaction import (
    check_vectors,
    load_vectors,
    positions_of,
    readable,
    with_strides,
)
from dlrm.kernels.mlp import wide_product
from dlrm.kernels.multi_copy import cast_together

ROWS, COLUMNS = 4, 512  # of a tile
REPEATS = 16  # tiles below each other whose sums of columns one program computes


class CrossWeights(NamedTuple):
    """The weights of a layer."""

    down: Tensor  # [r, n]
    up: Tensor  # [n, r]
    bias: Tensor  # [n]


class CastLayers(NamedTuple):
    """The weights of all layers: V, W and b of each."""

    weights: list[Tensor]
    late: list[list[Tensor]]  # what the gradients of each are made of, in a backward pass


@triton.jit
def _concatenate(
    bottom, parts, order, out, stride_bottom,
    SIZES: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One sample: the bottom vector, then the vectors of the parts in order."""
    sample = tl.program_id(0).to(tl.int64)
    vector = tl.arange(0, BLOCK_F)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    position = positions_of(order, vector, F)
    x = load_vectors(bottom + sample * stride_bottom, parts, sample, position, column, SIZES, D)
    at = sample * (F + 1) * D + vector * D + column
    tl.store(out + at, x, mask=(vector <= F) & (column < D))


@triton.jit
def _split(
    terms, order, grad_bottom, grad_parts,
    SIZES: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """One sample: sum the gradient of ``x_0``, and store that of each vector where it came from.

    ``terms`` are ``t_0`` to ``t_{L-1}``, the gradient of the output, and ``f_0`` to ``f_{L-1}``.
    """
    sample = tl.program_id(0).to(tl.int64)
    vector = tl.arange(0, BLOCK_F)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    position = positions_of(order, vector, F)
    inside = (vector <= F) & (column < D)
    at = sample * (F + 1) * D + vector * D + column

    value = tl.load(terms[0] + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.full((BLOCK_F, BLOCK_D), 1.0, tl.float32)
    for layer in tl.static_range(LAYERS):
        share += tl.load(terms[LAYERS + 1 + layer] + at, mask=inside, other=0.0).to(tl.float32)
        value += share * tl.load(terms[layer + 1] + at, mask=inside, other=0.0).to(tl.float32)

    to = grad_bottom + sample * D + vector * D + column
    tl.store(to, value.to(grad_bottom.dtype.element_ty), mask=inside & (position == -1))
    begin = 0
    for part in tl.static_range(len(SIZES)):
        mine = (position >= begin) & (position < begin + SIZES[part])
        to = grad_parts[part] + (sample * SIZES[part] + position - begin) * D + column
        tl.store(to, value.to(grad_parts[part].dtype.element_ty), mask=inside & mine)
        begin += SIZES[part]


@triton.jit
def _cross(
    factor, first, x, out, sums, batch, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """``first * factor + x``; ``sums`` gets the sums of its columns over the program's rows."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for repeat in range(REPEATS):
        begin = (tl.program_id(0).to(tl.int64) * REPEATS + repeat) * ROWS
        row = begin + tl.arange(0, ROWS)[:, None]
        mask = (row < batch) & (column < n)
        at = row * n + column
        value = tl.load(factor + at, mask=mask, other=0.0).to(tl.float32)
        value *= tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        if x is not None:
            value += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
        total += value
    if sums is not None:
        to = sums + tl.program_id(0).to(tl.int64) * n + column
        tl.store(to, tl.sum(total, 0)[None, :], mask=column < n)


def _sizes(parts: Sequence[Tensor]) -> dict[str, Any]:
    tables, dim = sum(part.shape[1] for part in parts), parts[0].shape[2]
    return {
        "SIZES": tuple(part.shape[1] for part in parts),
        "F": tables,
        "D": dim,
        "BLOCK_F": triton.next_power_of_2(tables + 1),
        "BLOCK_D": triton.next_power_of_2(dim),
    }


class _Late(torch.autograd.Function):
    """The weights of a layer, cast to the type of its products.

    :class:`_CrossNetwork` hands over what their gradients are made of, and here they are computed:
    autograd gets here when all that depends on the gradient of the vectors is launched. It begins
    with the last layer, whose gradients may be sent during the products of the next one.
    """

    @staticmethod
    def forward(ctx: Any, known: list[Tensor], low: Sequence[Tensor], *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.known, ctx.dtypes = known, [weight.dtype for weight in weights]
        return tuple(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad_narrow, x, scaled, narrow, sums), (down, up, bias) = ctx.known, ctx.dtypes
        ctx.known.clear()
        grad_down = wide_product(grad_narrow.t(), x, down)
        return None, None, grad_down, wide_product(scaled.t(), narrow, up), sums.sum(0).to(bias)


class _CrossNetwork(torch.autograd.Function):
    """``tensors`` are ``parts`` parts, then V, W and b of each layer."""

    @staticmethod
    def forward(
        ctx: Any,
        late: list[list[Tensor]],
        order: Tensor | None,
        parts: int,
        bottom: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        embedded, weights = tensors[:parts], tensors[parts:]
        sizes = _sizes(embedded)
        first = bottom.new_empty(len(bottom), (sizes["F"] + 1) * sizes["D"])
        if len(bottom):
            _concatenate[(len(bottom),)](
                bottom, with_strides(embedded), order, first, bottom.stride(0), **sizes
            )  # fmt: skip

        inputs: list[Tensor] = [first]
        narrow: list[Tensor] = []
        factors: list[Tensor] = []
        for down, up, bias in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            narrow.append(inputs[-1] @ down.t())
            factors.append(torch.addmm(bias, narrow[-1], up.t()))
            x, _ = _layer(factors[-1], first, inputs[-1])
            inputs.append(x)

        out = inputs.pop()
        ctx.late, ctx.inputs = late, [(x.shape, x.dtype) for x in (bottom, *embedded)]
        ctx.save_for_backward(order, *weights, *inputs, *narrow, *factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, *saved = ctx.saved_tensors
        layers = len(ctx.late)
        weights, rest = saved[: 3 * layers], saved[3 * layers :]
        inputs, narrow, factors = (rest[i * layers : (i + 1) * layers] for i in range(3))
        grad = grad.contiguous()

        terms, scaled = [grad], None
        for layer in reversed(range(layers)):
            scaled, sums = _layer(terms[0], inputs[0], scaled, sums=True)
            down, up, _ = weights[3 * layer : 3 * layer + 3]
            grad_narrow = scaled @ up
            ctx.late[layer][:] = grad_narrow, inputs[layer], scaled, narrow[layer], sums
            terms.insert(0, grad_narrow @ down)

        grad_bottom, *grad_parts = (grad.new_empty(shape, dtype=kind) for shape, kind in ctx.inputs)
        if len(grad):
            _split[(len(grad),)](
                (*terms, *factors), order, grad_bottom, tuple(grad_parts),
                LAYERS=layers, **_sizes(grad_parts),
            )  # fmt: skip
        return None, None, None, grad_bottom, *grad_parts, *[None] * (3 * layers)


def _layer(
    factor: Tensor, first: Tensor, x: Tensor | None, *, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``first * factor + x``, and the sums of its columns in parts."""
    (batch, n), repeats = first.shape, REPEATS if sums else 1
    columns = min(COLUMNS, triton.next_power_of_2(n))
    grid = triton.cdiv(batch, ROWS * repeats), triton.cdiv(n, columns)
    out = torch.empty_like(first)
    parts = first.new_empty(grid[0], n, dtype=torch.float32) if sums else None
    if batch:
        _cross[grid](
            factor, first, x, out, parts, batch, n, ROWS=ROWS, COLUMNS=columns, REPEATS=repeats
        )
    return out, parts


def cast_layers(
    layers: Sequence[CrossWeights], dtype: torch.dtype, *, impl: str | None = None
) -> CastLayers | Sequence[CrossWeights]:
    """The layers for :func:`cross_network` in the type of its input.

    In a backward pass, the gradients of these come after all of what is launched later in the
    forward pass than this. Do it first, and embeddings are updated next to these products.

    Args:
        layers: of the network, fp32.
        dtype: that of the input.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: weights that a kernel reads are not contiguous.
    """
    if not layers or not use_triton(layers[0].bias, impl):
        return layers
    for layer in layers:
        require_contiguous(**layer._asdict())
    weights = [weight for layer in layers for weight in layer]
    with torch.no_grad():
        low = cast_together(weights, dtype)
    late: list[list[Tensor]] = [[] for _ in layers]
    cast = [
        _Late.apply(late[index], low[3 * index : 3 * index + 3], *layer)
        for index, layer in enumerate(layers)
    ]
    return CastLayers([weight for layer in cast for weight in layer], late)


def cross_network(
    bottom: Tensor,
    embedded: Sequence[Tensor],
    layers: CastLayers | Sequence[CrossWeights],
    *,
    order: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l`` for each layer.

    ``x_0`` is the bottom vector, then the embeddings in order, in one row ``[B, n]``.

    Args:
        bottom: output of the bottom MLP, ``[B, D]``, fp32 or bf16; ``x_0`` and the products have
            its type.
        embedded: several ``[B, F_i, D]`` that are concatenated; of the same or another type.
        layers: V ``[r, n]``, W ``[n, r]`` and b ``[n]`` of each, fp32; or :func:`cast_layers` of
            them.
        order: ``[F]``; embedding ``f`` is number ``order[f]`` of the concatenated ``embedded``.
            None: the embeddings are in order.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The output of the last layer, ``[B, n]``.

    Raises:
        ValueError: the shapes of the vectors do not fit each other; or as for :func:`cast_layers`.
    """
    check_vectors(bottom, embedded, order)
    if not isinstance(layers, CastLayers):
        if not use_triton(bottom, impl):
            x = torch.cat(list(embedded), dim=1)
            x = x if order is None else x.index_select(1, order)
            first = torch.cat([bottom[:, None], x.to(bottom.dtype)], dim=1).flatten(1)
            return cross_network_torch(first, layers)
        cast = cast_layers(layers, bottom.dtype, impl=impl)
        layers = cast if isinstance(cast, CastLayers) else CastLayers([], [])
    bottom, *parts = readable(bottom, embedded)
    order = None if order is None else order.contiguous()
    with torch.autocast(bottom.device.type, enabled=False):
        return _CrossNetwork.apply(layers.late, order, len(parts), bottom, *parts, *layers.weights)


def cross_network_torch(first: Tensor, layers: Sequence[CrossWeights]) -> Tensor:
    """The layers of :func:`cross_network` in PyTorch, from ``x_0 = first``."""
    x = first
    for down, up, bias in layers:
        x = first * functional.linear(functional.linear(x, down), up, bias) + x
    return x
