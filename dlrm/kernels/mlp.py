"""An MLP of one launch a layer forward, and two backward.

Forward, the library multiplies, and adds the bias and applies ReLU in the same launch. Backward,
one launch computes the gradient of a layer's input, applies ReLU's, and sums that of the bias; the
gradients of the weights are products of the library on a stream of their own, as nothing else
needs them before the update.

Bytes per sample that must be moved, for a layer of ``n`` inputs and ``m`` outputs of ``e`` bytes:
``(n + m) e`` forward, and ``(3 n + 2 m) e`` backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.multi_copy import cast_together
from dlrm.utils.streams import SideStream, side_stream_of

ROWS, COLUMNS, INNER = 64, 128, 64  # of a tile, and how many are multiplied at a time
SUM_ROWS, SUM_COLUMNS = 32, 32  # of a tile of partial sums


@triton.jit
def _backward(
    grad, weight, out, to, partial_bias, batch, n, k, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """``grad [B, k] @ weight [k, n]`` where ``out`` is above 0, times ``scale``; and its sums over
    the rows of each tile, of which the gradient of a bias is the sum.
    """
    tiles = tl.cdiv(n, COLUMNS)
    part = tl.program_id(0) // tiles
    row = (part * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, k, INNER):
        inner = begin + tl.arange(0, INNER)
        at, mask = row * k + inner[None, :], (row < batch) & (inner[None, :] < k)
        left = tl.load(grad + at, mask=mask, other=0.0)
        at, mask = inner[:, None] * n + column, (inner[:, None] < k) & (column < n)
        right = tl.load(weight + at, mask=mask, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")

    at, mask = row * n + column, (row < batch) & (column < n)
    total = tl.where(tl.load(out + at, mask=mask, other=0.0) > 0, total * scale, 0.0)
    tl.store(to + at, total.to(to.dtype.element_ty), mask=mask)
    at = part.to(tl.int64) * n + column
    tl.store(partial_bias + at, tl.sum(total, 0)[None, :], mask=column < n)


@triton.jit
def _sum_parts(partials, biases, parts, sizes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the parts ``[P, n]`` of one block of one gradient ``[n]``."""
    block = tl.program_id(0)
    for index in tl.static_range(len(partials)):
        blocks = tl.cdiv(sizes[index], COLUMNS)
        if (block >= 0) & (block < blocks):
            column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for begin in range(0, parts[index], ROWS):
                row = (begin + tl.arange(0, ROWS)).to(tl.int64)[:, None]
                mask = (row < parts[index]) & (column < sizes[index])
                at = row * sizes[index] + column
                total += tl.load(partials[index] + at, mask=mask, other=0.0).to(tl.float32)
            to = biases[index] + column
            value = tl.sum(total, 0)[None, :].to(biases[index].dtype.element_ty)
            tl.store(to, value, mask=column < sizes[index])
        block -= blocks


class _MLP(torch.autograd.Function):
    """``parameters`` are the weight and the bias of each layer in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        final_relu: bool,
        dropout: float,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        layers = len(parameters) // 2
        weights, biases = parameters[::2], parameters[1::2]
        width = x.shape[1] + -x.shape[1] % 8  # tensor cores need rows aligned to 16 bytes
        widths = [width, width, *(w.shape[1] for w in weights[1:]), *(len(b) for b in biases)]
        ctx.columns, ctx.dtype = x.shape[1], x.dtype
        x, *low = cast_together([x, *weights, *biases], dtype, widths)

        values = [x]
        for layer, (weight, bias) in enumerate(zip(low[:layers], low[layers:], strict=True)):
            if layer == layers - 1 and not final_relu:
                values.append(torch.addmm(bias, values[-1], weight.t()))
                continue
            out = torch._addmm_activation(bias, values[-1], weight.t())
            if dropout and layer < layers - 1:
                out = functional.dropout(out, dropout)
            values.append(out)

        ctx.save_for_backward(*values, *low[:layers])
        ctx.parameters = parameters
        ctx.final_relu, ctx.scale = final_relu, 1 / (1 - dropout)
        return values[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers, learns = len(ctx.parameters) // 2, ctx.needs_input_grad[4:]
        values, weights = ctx.saved_tensors[: layers + 1], ctx.saved_tensors[layers + 1 :]
        grads: list[Tensor | None] = [None] * len(ctx.parameters)
        side, sums = (side_stream_of(grad.device, name) for name in ("weights", "biases"))

        if ctx.final_relu:
            grad = torch.ops.aten.threshold_backward(grad, values[-1], 0)
        grad = grad.contiguous()
        with sums.fork():  # of the last layer over all rows, of those before over parts of them
            partial = [grad.sum(0, keepdim=True, dtype=torch.float32)]
        kept = [grad, *values]  # until the products are done

        for layer in reversed(range(layers)):
            weight = ctx.parameters[2 * layer]
            if learns[2 * layer]:
                with side.fork():
                    found = wide_product(grad.t(), values[layer], weight.dtype)
                    grads[2 * layer] = found[:, : weight.shape[1]].contiguous()
            if layer:
                grad, part = _of_input(grad, weights[layer], values[layer], ctx.scale)
                partial.append(part)
                kept.append(grad)

        biases = ctx.parameters[1::2]
        if any(learns[1::2]):
            with sums.fork():
                grads[1::2] = _sum_together(partial[::-1], biases)
        d_x = (grad @ weights[0])[:, : ctx.columns] if ctx.needs_input_grad[3] else None
        _join((side, sums), ctx.parameters, [*kept, *partial])
        return None, None, None, None if d_x is None else d_x.to(ctx.dtype), *grads


def _join(sides: Sequence[SideStream], parameters: Sequence[Tensor], kept: list[Tensor]) -> None:
    """Wait for the gradients of parameters: at the end of the backward pass, if it only stores
    them.
    """

    def join() -> None:
        for side in sides:
            side.join()
        kept.clear()

    stores = (
        p.is_leaf and p.grad is None and not p._backward_hooks and not p._post_accumulate_grad_hooks
        for p in parameters
    )
    if all(stores):
        torch.autograd.Variable._execution_engine.queue_callback(join)
    else:
        join()


def _of_input(grad: Tensor, weight: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient of what a ReLU made the input ``value`` of a layer of, and the sums of parts of
    its rows. Products that are exact in fp32 are those of the library.
    """
    if grad.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        found = torch.ops.aten.threshold_backward(grad @ weight, value, 0) * scale
        return found, found.sum(0, keepdim=True)

    (batch, n), k = value.shape, grad.shape[1]
    columns = min(COLUMNS, max(16, triton.next_power_of_2(n)))
    inner = min(INNER // (grad.element_size() // 2), max(16, triton.next_power_of_2(k)))
    parts = triton.cdiv(batch, ROWS)
    found, partial = torch.empty_like(value), grad.new_empty(parts, n, dtype=torch.float32)
    _backward[(parts * triton.cdiv(n, columns),)](
        grad, weight, value, found, partial, batch, n, k, scale,
        ROWS=ROWS, COLUMNS=columns, INNER=inner, num_warps=4,
    )  # fmt: skip
    return found, partial


def _sum_together(partials: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of biases from sums of parts of the rows, ``[P, n]`` each."""
    found = [torch.empty_like(bias) for bias in biases]
    sizes = tuple(len(bias) for bias in biases)
    _sum_parts[(sum(triton.cdiv(size, SUM_COLUMNS) for size in sizes),)](
        tuple(partials), tuple(found), tuple(len(partial) for partial in partials), sizes,
        ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS,
    )  # fmt: skip
    return found


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in a wider type, that of the sums."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    final_relu: bool = True,
    dropout: float = 0.0,
    impl: str | None = None,
) -> Tensor:
    """Linear layers with ReLU between them.

    Args:
        x: ``[B, n]``; columns beyond those of the first weight are zeros.
        weights: ``[m, n]`` of each layer.
        biases: ``[m]`` of each layer.
        final_relu: apply ReLU after the last layer too.
        dropout: share of the outputs of the layers before the last one that is set to 0.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[B, m]`` of the last layer, in the type of autocast, or else of the weights.
    """
    if not x.numel() or x.dtype == torch.float64 or not use_triton(x, impl):
        return mlp_torch(x, weights, biases, final_relu=final_relu, dropout=dropout)
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else weights[0].dtype
    parameters = [p for pair in zip(weights, biases, strict=True) for p in pair]
    with torch.autocast(kind, enabled=False):
        return _MLP.apply(dtype, final_relu, dropout, x, *parameters)


def mlp_torch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    final_relu: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """:func:`mlp` in PyTorch."""
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if layer:
            x = functional.dropout(x, dropout)
        if x.shape[1] > weight.shape[1]:
            weight = functional.pad(weight, (0, x.shape[1] - weight.shape[1]))
        x = functional.linear(x, weight, bias)
        if final_relu or layer < len(weights) - 1:
            x = functional.relu(x)
    return x
