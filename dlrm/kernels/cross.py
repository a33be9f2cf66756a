"""The low-rank cross network of DCN-V2, and the concatenation that is its input.

A layer is ``x_{l+1} = x_0 * (W (V x_l) + b) + x_l``. The matrix products are those of the library;
all that lies between two of them is one launch, forward and backward, and the embeddings are read
in place: no concatenation in fp32, no copy in another order, no cast.

Bytes per sample that must be moved next to the products, for ``n`` features of ``e`` bytes:
``4 n e`` a layer forward (``x_0``, ``x_l`` and the product in, ``x_{l+1}`` out) and ``6 n e``
backward (the gradient, ``x_0``, the product and the sum for ``x_0`` in, two gradients out).

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
from dlrm.kernels.interaction import check_vectors, load_vectors, positions_of, with_strides

ROWS, COLUMNS = 4, 512  # of a tile
REPEATS = 16  # tiles below each other whose bias gradients one program sums


class CrossWeights(NamedTuple):
    """The weights of a layer."""

    down: Tensor  # [r, n]
    up: Tensor  # [n, r]
    bias: Tensor  # [n]


class CastLayers(NamedTuple):
    """The weights of all layers: V of each, W of each, b of each."""

    weights: tuple[Tensor, ...]
    late: list[list[Tensor]]  # factors of the gradients of V and W of each, in a backward pass


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
    grad, order, grad_bottom, grad_parts,
    SIZES: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One sample: the gradient of each vector to where the vector came from."""
    sample = tl.program_id(0).to(tl.int64)
    vector = tl.arange(0, BLOCK_F)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    position = positions_of(order, vector, F)
    inside = (vector <= F) & (column < D)
    at = sample * (F + 1) * D + vector * D + column
    value = tl.load(grad + at, mask=inside, other=0.0)
    to = grad_bottom + sample * D + vector * D + column
    tl.store(to, value.to(grad_bottom.dtype.element_ty), mask=inside & (position == -1))
    begin = 0
    for part in tl.static_range(len(SIZES)):
        mine = (position >= begin) & (position < begin + SIZES[part])
        to = grad_parts[part] + (sample * SIZES[part] + position - begin) * D + column
        tl.store(to, value.to(grad_parts[part].dtype.element_ty), mask=inside & mine)
        begin += SIZES[part]


@triton.jit
def _cross(first, product, bias, x, out, batch, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``first * (product + bias) + x``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < batch) & (column < n)
    at = row * n + column
    crossed = tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
    crossed += tl.load(bias + column, mask=column < n, other=0.0)
    crossed *= tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    crossed += tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, crossed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _cross_backward(
    grad, first, product, bias, sum_first, grad_product, partial_bias, batch, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REPEATS: tl.constexpr,
    BEGIN: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one layer, from the last layer to the first.

    ``grad_product`` gets the gradient of the product, ``partial_bias`` that of the bias, summed
    over the rows of the program. ``sum_first`` adds up the gradient of ``first``: it starts in the
    last layer (``BEGIN``), and in the first one (``END``) the gradient of ``x`` is added as well.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    shift = tl.load(bias + column, mask=column < n, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for repeat in range(REPEATS):
        begin = (tl.program_id(0).to(tl.int64) * REPEATS + repeat) * ROWS
        row = begin + tl.arange(0, ROWS)[:, None]
        mask = (row < batch) & (column < n)
        at = row * n + column

        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(product + at, mask=mask, other=0.0).to(tl.float32) + shift
        moved = g * tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_product + at, moved.to(grad_product.dtype.element_ty), mask=mask)
        total += moved

        added = g * factor
        if END:
            added += g
        if not BEGIN:
            added += tl.load(sum_first + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_first + at, added.to(sum_first.dtype.element_ty), mask=mask)
    to = partial_bias + tl.program_id(0).to(tl.int64) * n + column
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


class _Concatenate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: Tensor, order: Tensor | None, *parts: Tensor) -> Tensor:
        vectors = 1 + sum(part.shape[1] for part in parts)
        out = bottom.new_empty(len(bottom), vectors * bottom.shape[1])
        if len(bottom):
            _concatenate[(len(bottom),)](
                bottom, with_strides(parts), order, out, bottom.stride(0), **_sizes(parts)
            )  # fmt: skip
        ctx.save_for_backward(order)
        ctx.inputs = [(x.shape, x.dtype) for x in (bottom, *parts)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        grad_bottom, *grad_parts = (grad.new_empty(shape, dtype=kind) for shape, kind in ctx.inputs)
        if len(grad_bottom):
            _split[(len(grad_bottom),)](
                grad.contiguous(), order, grad_bottom, tuple(grad_parts), **_sizes(grad_parts)
            )  # fmt: skip
        return grad_bottom, None, *grad_parts


class _Late(torch.autograd.Function):
    """The matrices of a layer, cast to the type of their products.

    :class:`_CrossNetwork` hands their gradients over as pairs of factors, and here they are
    multiplied: autograd gets here when all that depends on the gradient of the input is launched.
    It begins with the last layer, whose gradients may be sent during the products of the next one.
    """

    @staticmethod
    def forward(
        ctx: Any, factors: list[Tensor], low: Sequence[Tensor], down: Tensor, up: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.factors, ctx.dtype = factors, down.dtype
        return tuple(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.factors[::2], ctx.factors[1::2], strict=True)
        found = [_product(left.t(), right, ctx.dtype) for left, right in pairs]
        ctx.factors.clear()
        return None, None, *found


class _CrossNetwork(torch.autograd.Function):
    """``weights`` are V of each layer, then W of each, then b of each."""

    @staticmethod
    def forward(
        ctx: Any, late: list[list[Tensor]], overwrites: bool, first: Tensor, *weights: Tensor
    ) -> Tensor:
        layers = len(weights) // 3
        inputs: list[Tensor] = [first]
        narrow: list[Tensor] = []
        products: list[Tensor] = []
        for layer in range(layers):
            down, up, bias = weights[layer::layers]
            narrow.append(inputs[-1] @ down.t())
            products.append(narrow[-1] @ up.t())
            x = torch.empty_like(first)
            _launch(_cross, x.shape, ROWS, first, products[-1], bias, inputs[-1], x)
            inputs.append(x)
        ctx.late, ctx.overwrites, out = late, overwrites, inputs.pop()
        ctx.save_for_backward(*inputs, *narrow, *products, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, layers = ctx.saved_tensors, len(ctx.saved_tensors) // 6
        inputs, narrow, products, downs, ups, biases = (
            saved[begin : begin + layers] for begin in range(0, len(saved), layers)
        )
        first = inputs[0]
        grad = grad.contiguous()
        grad_first = torch.empty_like(first)

        grad_biases: list[Tensor] = []
        for layer in reversed(range(layers)):
            grad_product = torch.empty_like(first)
            partial = grad.new_empty(
                triton.cdiv(len(first), ROWS * REPEATS), first.shape[1], dtype=torch.float32
            )
            _launch(
                _cross_backward, first.shape, ROWS * REPEATS,
                grad, first, products[layer], biases[layer], grad_first, grad_product, partial,
                REPEATS=REPEATS, BEGIN=layer == layers - 1, END=layer == 0,
            )  # fmt: skip

            # The products for the gradients of the weights come last.
            grad_narrow = grad_product @ ups[layer]
            ctx.late[layer][:] = grad_narrow, inputs[layer], grad_product, narrow[layer]
            grad_biases.insert(0, partial.sum(0).to(biases[layer].dtype))
            if layer:
                if layer == layers - 1 and not ctx.overwrites:
                    grad = grad.clone()  # it belongs to others, the next ones are our own
                grad.addmm_(grad_narrow, downs[layer])

        grad_first.addmm_(grad_narrow, downs[0])
        return None, None, grad_first, *[None] * (2 * layers), *grad_biases


def _launch(kernel: Any, shape: torch.Size, rows: int, *tensors: Tensor, **sizes: Any) -> None:
    batch, n = shape
    if batch:
        columns = min(COLUMNS, triton.next_power_of_2(n))
        grid = triton.cdiv(batch, rows), triton.cdiv(n, columns)
        kernel[grid](*tensors, batch, n, ROWS=ROWS, COLUMNS=columns, **sizes)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in a wider type, that of the sums."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def concatenate_vectors(
    bottom: Tensor,
    embedded: Sequence[Tensor],
    *,
    order: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The bottom vector, then the embeddings in order, in one row.

    Args:
        bottom: output of the bottom MLP, ``[B, D]``, fp32 or bf16; the result has its type.
        embedded: several ``[B, F_i, D]`` that are concatenated; of the same or another type.
        order: ``[F]``; embedding ``f`` is number ``order[f]`` of the concatenated ``embedded``.
            None: the embeddings are in order.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, (F + 1) D]``.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    check_vectors(bottom, embedded, order)
    if not use_triton(bottom, impl):
        return concatenate_vectors_torch(bottom, embedded, order=order)
    bottom, *parts = (x if x.stride(-1) == 1 else x.contiguous() for x in (bottom, *embedded))
    order = None if order is None else order.contiguous()
    return _Concatenate.apply(bottom, order, *parts)


def concatenate_vectors_torch(
    bottom: Tensor, embedded: Sequence[Tensor], *, order: Tensor | None = None
) -> Tensor:
    """:func:`concatenate_vectors` in PyTorch."""
    x = torch.cat(list(embedded), dim=1)
    x = x if order is None else x.index_select(1, order)
    return torch.cat([bottom[:, None], x.to(bottom.dtype)], dim=1).flatten(1)


def cast_layers(
    layers: Sequence[CrossWeights], dtype: torch.dtype, *, impl: str | None = None
) -> CastLayers | Sequence[CrossWeights]:
    """The layers for :func:`cross_network` with matrices in the type of its input.

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
    late: list[list[Tensor]] = [[] for _ in layers]
    downs, ups, biases = zip(*layers, strict=True)
    low = [torch.empty_like(matrix, dtype=dtype) for matrix in (*downs, *ups)]
    with torch.no_grad():
        torch._foreach_copy_(low, [*downs, *ups])
    lows = zip(low[: len(layers)], low[len(layers) :], strict=True)
    cast = [_Late.apply(*each) for each in zip(late, lows, downs, ups, strict=True)]
    downs, ups = zip(*cast, strict=True)
    return CastLayers((*downs, *ups, *biases), late)


def cross_network(
    first: Tensor,
    layers: CastLayers | Sequence[CrossWeights],
    *,
    overwrites: bool = False,
    impl: str | None = None,
) -> Tensor:
    """``x_{l+1} = first * (W_l (V_l x_l) + b_l) + x_l`` for each layer, from ``x_0 = first``.

    Args:
        first: ``[B, n]``, fp32 or bf16; the products are computed in its type.
        layers: V ``[r, n]``, W ``[n, r]`` and b ``[n]`` of each, fp32; or :func:`cast_layers` of
            them.
        overwrites: the backward pass may overwrite the gradient of the output, since what computed
            it keeps no hold of it: that saves a copy of ``[B, n]``.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        The output of the last layer, ``[B, n]``.

    Raises:
        ValueError: as for :func:`cast_layers`.
    """
    if not isinstance(layers, CastLayers):
        layers = cast_layers(layers, first.dtype, impl=impl)
    if not isinstance(layers, CastLayers):
        return cross_network_torch(first, layers)
    with torch.autocast(first.device.type, enabled=False):
        first = first.contiguous()
        return _CrossNetwork.apply(layers.late, overwrites, first, *layers.weights)


def cross_network_torch(first: Tensor, layers: Sequence[CrossWeights]) -> Tensor:
    """:func:`cross_network` in PyTorch."""
    x = first
    for down, up, bias in layers:
        x = first * functional.linear(functional.linear(x, down), up, bias) + x
    return x
