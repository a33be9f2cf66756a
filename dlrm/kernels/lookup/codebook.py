"""Logits of a vocabulary whose vectors are composed of shared parts.

Every entry ``v`` of the vocabulary has a code for each part ``p`` of its vector: the number of one
of ``C`` centroids. The product of a token with the vector is then the sum of its products with
these centroids, ``out[n, v] = sum_p products[p, code[v, p], n] + bias[v]``, and there are few
products with centroids. Codes are packed: 384 centroids need 9 bits, so 8 parts need 9 bytes.

Bytes that must move: ``out`` once. The products, a few hundred KB, stay in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dlrm.kernels import require_contiguous, tl, triton, use_triton
from dlrm.utils.offsets import offsets_of

BLOCK_V, BLOCK_N = 64, 64  # entries and tokens of a tile of the output
SEGMENT = 512  # entries of a centroid that one program sums
SUM_M, SUM_N = 8, 128  # entries of a centroid, and tokens, that are summed at a time
BAG_TOKENS = 32  # tokens whose gradients are summed at a time on a CPU: 128 take 2.7 times as long


def code_bits(clusters: int) -> int:
    """Bits of a code that can name each of ``clusters`` centroids."""
    return max(1, (clusters - 1).bit_length())


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[V, parts]``, each below ``2^bits`` (16 bits at most), as uint8 ``[V, bytes]``.

    The codes of a row are concatenated, lowest bit first.
    """
    rows, parts = codes.shape
    packed = torch.zeros(rows, (parts * bits + 7) // 8, dtype=torch.uint8, device=codes.device)
    for part in range(parts):
        byte, shift = divmod(part * bits, 8)
        value = codes[:, part].long() << shift
        for column in range(byte, min(byte + 3, packed.shape[1])):
            packed[:, column] |= (value & 255).to(torch.uint8)
            value >>= 8
    return packed


def unpack(packed: Tensor, parts: int, bits: int) -> Tensor:
    """The codes of packed rows: uint8 ``[..., bytes]`` to int64 ``[..., parts]``."""
    return _unpack(packed, parts, bits).long()


def _unpack(packed: Tensor, parts: int, bits: int) -> Tensor:
    """The same in int32 or uint8. Columns are taken together: ten times faster than rows."""
    if bits == 8:
        return packed
    begin = torch.arange(parts, device=packed.device) * bits
    columns = packed.movedim(-1, 0).int()
    words = torch.zeros((), dtype=torch.int32, device=packed.device)
    for byte in range(2 if bits <= 9 else 3):  # a code begins in any bit of its first byte
        # A byte past the end is the last one again, in bits that no code has.
        at = (begin // 8 + byte).clamp(max=packed.shape[-1] - 1)
        words = words + (columns[at] << 8 * byte)
    shift = (begin % 8).int().view(-1, *[1] * (packed.dim() - 1))
    return ((words >> shift) & ((1 << bits) - 1)).movedim(0, -1)


@dataclass(frozen=True)
class Members:
    """The entries of each centroid, for the backward pass.

    They are cut into segments of at most ``SEGMENT``, so that no program has to sum all of a
    centroid that many entries share.
    """

    order: Tensor  # [parts, V] int32, the entries of each part ordered by code
    segments: Tensor  # [S, 2] int32, begin and end in order, flat; empty ones at the end
    first: Tensor  # [parts * clusters + 1] int32, the first segment of each centroid
    begin: Tensor  # [parts * clusters] int32, where each centroid begins in order, flat

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.order, self.segments, self.first, self.begin)
        return sum(tensor.nbytes for tensor in tensors)


def members(packed: Tensor, parts: int, bits: int, clusters: int) -> Members:
    """Find the entries of each centroid. The shapes do not depend on the codes."""
    codes = unpack(packed, parts, bits) + clusters * torch.arange(parts, device=packed.device)
    codes, order = codes.t().flatten().sort(stable=True)
    centroids = torch.arange(parts * clusters + 1, device=packed.device)
    bounds = torch.searchsorted(codes, centroids)
    lengths = bounds.diff()
    first = offsets_of((lengths + SEGMENT - 1) // SEGMENT)
    segment = torch.arange(parts * (clusters + len(packed) // SEGMENT), device=packed.device)
    owner = torch.searchsorted(first, segment, right=True) - 1  # parts * clusters if there is none
    begin = bounds[owner] + SEGMENT * (segment - first[owner])
    end = torch.minimum(begin + SEGMENT, bounds[(owner + 1).clamp(max=len(bounds) - 1)])
    entries = order % max(len(packed), 1)
    segments = torch.stack([begin, end], 1).int()
    return Members(entries.int(), segments, first.int(), bounds[:-1].int())


@triton.jit
def _sum_forward(
    products, codes, bias, out, tokens, entries, clusters, width,
    PARTS: tl.constexpr, BITS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the products that each entry selects, for a tile of entries and tokens."""
    v = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = v < entries
    mask = inside[:, None] & (n < tokens)[None, :]

    total = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    for first in range(0, PARTS, 8):  # eight codes are whole bytes: their shifts repeat
        for k in tl.static_range(8 if PARTS > 8 else PARTS):
            there = inside & (first + k < PARTS)
            at = codes + v * width + first // 8 * BITS + k * BITS // 8
            word = tl.load(at, mask=there, other=0).to(tl.int32)
            if k * BITS % 8 + BITS > 8:
                word |= tl.load(at + 1, mask=there, other=0).to(tl.int32) << 8
            if k * BITS % 8 + BITS > 16:
                word |= tl.load(at + 2, mask=there, other=0).to(tl.int32) << 16
            code = (word >> (k * BITS % 8)) & ((1 << BITS) - 1)

            row = ((first + k) * clusters + code).to(tl.int64)
            value = tl.load(
                products + row[:, None] * tokens + n[None, :],
                mask=mask & there[:, None],
                other=0.0,
            )
            total += value.to(tl.float32)

    if bias is not None:
        total += tl.load(bias + v, mask=inside, other=0.0).to(tl.float32)[:, None]
    to = n.to(tl.int64)[None, :] * entries + v[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _transpose(
    grad, transposed, bias, tokens, entries, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Transpose ``grad [N, V]``: entries become contiguous. Sum the gradient of the bias."""
    v = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    for first in range(0, tokens, BLOCK_N):
        n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        mask = (v < entries) & (n < tokens)
        value = tl.load(grad + n * entries + v, mask=mask, other=0.0)
        tl.store(transposed + v * tokens + n, value, mask=mask)
        total += value.to(tl.float32)
    if bias is not None:
        summed = tl.sum(total, 1, keep_dims=True)
        tl.store(bias + v, summed.to(bias.dtype.element_ty), mask=v < entries)


@triton.jit
def _sum_segments(
    grad, order, segments, out, tokens, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Sum the gradients ``grad [V, N]`` of the entries in a segment, as ``out [S, N]``."""
    segment = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(segments + 2 * segment), tl.load(segments + 2 * segment + 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(begin, end, BLOCK_M):
        member = at + tl.arange(0, BLOCK_M)
        live = member < end
        v = tl.load(order + member, mask=live, other=0).to(tl.int64)
        mask = live[:, None] & (n < tokens)[None, :]
        value = tl.load(grad + v[:, None] * tokens + n[None, :], mask=mask, other=0.0)
        total += value.to(tl.float32)
    tl.store(out + segment * tokens + n, tl.sum(total, 0), mask=n < tokens)


@triton.jit
def _add_segments(
    sums, first, out, tokens, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Sum the sums ``[S, N]`` of the segments of one centroid."""
    centroid = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(first + centroid), tl.load(first + centroid + 1)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(begin, end, BLOCK_M):
        segment = (at + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (segment < end) & (n < tokens)[None, :]
        total += tl.load(sums + segment * tokens + n[None, :], mask=mask, other=0.0)
    to = out + centroid * tokens + n
    tl.store(to, tl.sum(total, 0).to(out.dtype.element_ty), mask=n < tokens)


class _CodebookSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        products: Tensor,
        codes: Tensor,
        bias: Tensor | None,
        bits: int,
        index: Members | None,
    ) -> Tensor:
        parts, clusters, tokens = products.shape
        out = products.new_empty(tokens, len(codes))
        grid = (triton.cdiv(len(codes), BLOCK_V), triton.cdiv(tokens, BLOCK_N))
        if out.numel():
            _sum_forward[grid](
                products.contiguous(), codes, bias, out, tokens, *codes.shape[:1], clusters,
                codes.shape[1], PARTS=parts, BITS=bits, BLOCK_V=BLOCK_V, BLOCK_N=BLOCK_N,
            )  # fmt: skip
        ctx.index, ctx.shape, ctx.has_bias = index, products.shape, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index: Members | None = ctx.index
        if index is None:
            raise ValueError("codebook_sum without an index has no backward pass: give members(..)")
        parts, clusters, tokens = ctx.shape
        entries = grad.shape[1]
        out = grad.new_zeros(ctx.shape)
        bias = grad.new_zeros(entries) if ctx.has_bias else None

        if grad.numel():
            transposed = grad.new_empty(entries, tokens)
            _transpose[triton.cdiv(entries, BLOCK_V),](
                grad.contiguous(),
                transposed,
                bias,
                tokens,
                entries,
                BLOCK_V=BLOCK_V,
                BLOCK_N=BLOCK_N,
            )

            # The entries of a centroid are summed by segments, and these then in order.
            sums = grad.new_empty(len(index.segments), tokens, dtype=torch.float32)
            columns = triton.cdiv(tokens, SUM_N)
            _sum_segments[len(sums), columns](
                transposed, index.order, index.segments, sums, tokens,
                BLOCK_M=SUM_M, BLOCK_N=SUM_N, num_warps=2,
            )  # fmt: skip
            _add_segments[parts * clusters, columns](
                sums, index.first, out, tokens, BLOCK_M=SUM_M, BLOCK_N=SUM_N, num_warps=2
            )
        return out, None, bias, None, None


def codebook_sum(
    products: Tensor,
    codes: Tensor,
    bias: Tensor | None,
    bits: int,
    index: Members | None,
    *,
    impl: str | None = None,
) -> Tensor:
    """Sum, for every token and entry of the vocabulary, the products that the entry selects.

    Args:
        products: products of every centroid with every token, ``[parts, clusters, N]``.
        codes: packed codes of each entry, uint8 ``[V, bytes]``, contiguous; see :func:`pack`.
        bias: ``[V]``, or None.
        bits: bits of a code.
        index: ``members(codes, ...)``; the backward pass of the kernel needs it.
        impl: see :mod:`dlrm.kernels`.

    Returns:
        ``[N, V]``. The sums are taken in fp32, and the gradient of the products is the same on
        every run: no atomic additions.

    Raises:
        ValueError: the kernel runs and ``codes`` are not contiguous.
    """
    if not use_triton(products, impl):
        return codebook_sum_torch(products, codes, bias, bits)
    require_contiguous(codes=codes)
    bias = None if bias is None else bias.contiguous()
    return _CodebookSum.apply(products, codes, bias, bits, index)


def codebook_sum_torch(products: Tensor, codes: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    """:func:`codebook_sum` in PyTorch."""
    parts, clusters, _ = products.shape
    return selected_sum(products, selected_rows(codes, parts, bits, clusters), bias, None)


def selected_rows(codes: Tensor, parts: int, bits: int, clusters: int) -> Tensor:
    """The codes as :func:`selected_sum` reads them: rows of ``products [parts * clusters, N]``.

    Returns:
        int32 ``[V, parts]``, contiguous.
    """
    first = torch.arange(0, parts * clusters, clusters, dtype=torch.int32, device=codes.device)
    return (_unpack(codes, parts, bits).int() + first).contiguous()


def selected_sum(
    products: Tensor, rows: Tensor, bias: Tensor | None, index: Members | None
) -> Tensor:
    """:func:`codebook_sum` in PyTorch, of :func:`selected_rows` of the codes.

    Its backward pass is 2 to 20 times as fast with an index.
    """
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    bias = None if bias is None else bias.to(wide.dtype)
    total = _SumRows.apply(wide.flatten(0, 1), rows, bias, index)  # [V, N]
    return total.t().to(products.dtype)


class _SumRows(torch.autograd.Function):
    """The sums of some rows, ``[rows, N]`` and ``[V, parts]`` to ``[V, N]``, plus ``bias [V]``.

    ``embedding_bag`` sums them four times as fast as additions do. Its own backward pass takes
    several times as long as this one, which sums the gradients of each row's entries by it again.
    """

    @staticmethod
    def forward(
        ctx: Any, products: Tensor, rows: Tensor, bias: Tensor | None, index: Members | None
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.index, ctx.rows, ctx.has_bias = index, len(products), bias is not None
        if not products.numel():  # rows of no numbers are an error on some processors
            return products.new_zeros(len(rows), products.shape[1])
        # Detached: embedding_bag would prepare for its own backward pass.
        total = functional.embedding_bag(rows, products.detach(), mode="sum")
        return total if bias is None else total.add_(bias[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        index: Members | None = ctx.index
        bias = grad.sum(1) if ctx.has_bias else None
        tokens = grad.shape[1]
        if index is not None and tokens > 1:  # bags of single numbers are slow
            order, parts = index.order.flatten(), grad.tensor_split(-(-tokens // BAG_TOKENS), 1)
            sums = [
                functional.embedding_bag(order, part.contiguous(), index.begin, mode="sum")
                for part in parts
            ]
            return torch.cat(sums, 1), None, bias, None
        total, grad = grad.new_zeros(ctx.rows, tokens), grad.contiguous()
        for part in rows.t().long():
            total.index_put_((part,), grad, accumulate=True)
        return total, None, bias, None
