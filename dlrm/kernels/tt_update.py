"""Triton kernel that updates the cores of a TT group; see :func:`dlrm.kernels.tt.tt_update_`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _update_row(
    core, grad, state, row, lr, eps,
    LENGTH: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a slice, or with a rule that needs no sum over the slice one block of it."""
    start = row.to(tl.int64) * LENGTH
    if RULE == "rowwise_adagrad":
        square = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, LENGTH, BLOCK):
            at = first + tl.arange(0, BLOCK)
            g = tl.load(grad + start + at, mask=at < LENGTH, other=0.0).to(tl.float32)
            square += g * g
        moment = tl.load(state + row) + tl.sum(square, 0) / LENGTH
        tl.store(state + row, moment)
        lr = lr / (tl.sqrt(moment) + eps)
    for first in range(tl.program_id(1) * BLOCK, LENGTH, tl.num_programs(1) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < LENGTH
        g = tl.load(grad + start + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(core + start + at, mask=mask, other=0.0).to(tl.float32)
        if RULE == "adagrad":
            moment = tl.load(state + start + at, mask=mask, other=0.0) + g * g
            tl.store(state + start + at, moment, mask=mask)
            g = g / (tl.sqrt(moment) + eps)
        tl.store(core + start + at, (value - lr * g).to(core.dtype.element_ty), mask=mask)


@triton.jit
def update_cores(
    core0, core1, core2, core3, grad0, grad1, grad2, grad3, state0, state1, state2, state3,
    lr, eps, rows0, rows1, rows2,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update all cores in one launch."""
    row = tl.program_id(0)
    rate = tl.load(lr).to(tl.float32)
    if row < rows0:
        _update_row(core0, grad0, state0, row, rate, eps, L0, RULE, BLOCK)
    elif row < rows0 + rows1:
        _update_row(core1, grad1, state1, row - rows0, rate, eps, L1, RULE, BLOCK)
    elif row < rows0 + rows1 + rows2:
        if L2 > 0:
            _update_row(core2, grad2, state2, row - rows0 - rows1, rate, eps, L2, RULE, BLOCK)
    else:
        if L3 > 0:
            behind = row - rows0 - rows1 - rows2
            _update_row(core3, grad3, state3, behind, rate, eps, L3, RULE, BLOCK)
