"""Rows of tables in the number formats of an export, looked up by plain PyTorch operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.utils.messages import did_you_mean

PRECISIONS = ("fp32", "bf16", "int8", "int4")
SHORTEST = 8  # weights of a row with a scale; shorter rows would not become smaller
CHUNK = 1 << 18  # rows that are quantized at a time


class FloatRows(nn.Module):
    """Rows in fp32 or bf16.

    Args:
        weight: ``[n, D]``; not copied.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.weight: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        """The rows of ``rows [...]``, ``[..., D]`` in fp32."""
        return functional.embedding(rows, self.weight).float()


class Int8Rows(nn.Module):
    """Rows of 8-bit integers, each row with a scale: ``code * scale``, codes -127 .. 127.

    The scale is the largest absolute value of the row divided by 127, in bf16, which has the range
    of fp32. Codes use the rounded scale: the error is at most half a step, and three quarters of a
    step for the largest entry.

    Args:
        weight: ``[n, D]``.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = _scales(weight, 127)
        for rows, scale, out in _chunks(weight, scales, codes):
            out.copy_((rows / scale).round_().clamp_(-127, 127))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.codes: Tensor  # [n, D] int8
        self.scales: Tensor  # [n] bf16

    def forward(self, rows: Tensor) -> Tensor:
        """The rows of ``rows [...]``, ``[..., D]`` in fp32."""
        return self.codes[rows].float() * self.scales[rows].float()[..., None]


class Int4Rows(nn.Module):
    """Rows of 4-bit integers, each row with a scale: ``(code - 7.5) * scale``, codes 0 .. 15.

    The 16 levels are symmetric about zero. Byte ``i`` of a row has entry ``i`` in its low
    bits, and entry ``i + ceil(D / 2)`` in its high ones.

    Args:
        weight: ``[n, D]``.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.dim = weight.shape[1]
        half = (self.dim + 1) // 2
        packed = torch.empty(len(weight), half, dtype=torch.uint8, device=weight.device)
        scales = _scales(weight, 7.5)
        for rows, scale, out in _chunks(weight, scales, packed):
            codes = (rows / scale + 7.5).round_().clamp_(0, 15).to(torch.uint8)
            high = functional.pad(codes[:, half:], (0, 2 * half - self.dim))
            out.copy_(codes[:, :half] | high << 4)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.packed: Tensor  # [n, ceil(D / 2)] uint8
        self.scales: Tensor  # [n] bf16

    def forward(self, rows: Tensor) -> Tensor:
        """The rows of ``rows [...]``, ``[..., D]`` in fp32."""
        packed = self.packed[rows].int()
        codes = torch.cat([packed & 15, packed >> 4], -1)[..., : self.dim]
        return (codes.float() - 7.5) * self.scales[rows].float()[..., None]


def store_rows(weight: Tensor, precision: str) -> nn.Module:
    """Rows in a number format.

    Args:
        weight: ``[n, D]``, fp32 or bf16.
        precision: one of :data:`PRECISIONS`. ``fp32`` keeps the rows as they are; rows of fewer
            than :data:`SHORTEST` weights become bf16 instead of int8 and int4.

    Raises:
        ValueError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}{did_you_mean(precision, PRECISIONS)}")
    weight = weight.detach()
    if precision == "fp32":
        return FloatRows(weight)
    if precision == "bf16" or weight.shape[1] < SHORTEST:
        return FloatRows(weight.to(torch.bfloat16))
    return Int8Rows(weight) if precision == "int8" else Int4Rows(weight)


def _scales(weight: Tensor, levels: float) -> Tensor:
    """The scale of each row, ``[n]`` bf16, never 0."""
    tiny = torch.finfo(torch.bfloat16).tiny
    largest = torch.linalg.vector_norm(weight, torch.inf, 1).float()
    return (largest / levels).clamp_(min=tiny).to(torch.bfloat16)


def _chunks(weight: Tensor, scales: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows at a time: the rows in fp32, their scales ``[rows, 1]``, and their part of out."""
    parts = zip(weight.split(CHUNK), scales.split(CHUNK), out.split(CHUNK), strict=True)
    for rows, scale, target in parts:
        yield rows.float(), scale.float()[:, None], target
