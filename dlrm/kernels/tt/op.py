"""The look-up in tables in tensor-train format; see :mod:`dlrm.kernels.tt`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm.kernels import require_integers, use_triton
from dlrm.kernels.tt.indexing import LookupRequest, Strategy
from dlrm.kernels.tt.layout import FactorLayout, TTShape, factor_layout
from dlrm.kernels.tt.lookup import Lookup
from dlrm.kernels.tt.reference import tt_bags_torch, tt_vectors_torch
from dlrm.utils.bags import Bags
from dlrm.utils.messages import did_you_mean

PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16")
_UNIQUE_FROM = 24_000  # look-ups from which it pays to find the unique ids
_UNIQUE_UP_TO = 1 << 23  # 32-bit words to flag all ids: at most 268M rows, 32 MB


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        request: LookupRequest,
        options: dict[str, Any],
        weights: Tensor | None,
        *cores: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weights, *cores)
        ctx.lookup = Lookup(request, weights, cores, **options)
        return ctx.lookup.rows(pooled=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *cores = ctx.saved_tensors
        grad = grad.contiguous()
        d_weights = None
        if ctx.needs_input_grad[2]:
            d_weights = _weights_gradient(ctx.lookup, grad).to(weights.dtype)
        grads = ctx.lookup.backward(grad, cores)
        pairs = zip(grads, cores, strict=True)
        in_type = (g.to(c.dtype) for g, c in pairs)
        return None, None, d_weights, *in_type


def _weights_gradient(lookup: Lookup, grad: Tensor) -> Tensor:
    """Gradient of the weight of each id: its row times the gradient of its bag, ``[n]``."""
    results = lookup.index.results
    assert results.bag is not None
    bag = results.bag.clamp(min=0)
    row = (bag % results.batch) * results.tables + bag // results.batch
    return (lookup.rows(pooled=False) * grad.index_select(0, row)).sum(1)  # rows are not rounded


def tt_vectors(
    cores: Sequence[Tensor],
    shape: TTShape,
    tables: Tensor,
    ids: Tensor,
    *,
    skip: Tensor | None = None,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Look up rows of a group of tables in tensor-train format.

    Args:
        cores: core ``k`` as ``[sum over tables of p_k, r_{k-1} * q_k * r_k]``: the slices, each
            row-major in ``(r_{k-1}, q_k, r_k)``, table after table.
        shape: factors and ranks of the tables.
        tables: table of each id, an integer tensor that broadcasts to the shape of ``ids``.
        ids: integers of any shape ``[...]``, each within its table.
        skip: ids to leave out, such as those in a cache, bool of the shape of ``ids``. Their rows
            are zeros without a gradient, and cost nothing.
        dtype: type in which Triton returns the rows; None: that of the cores.
        impl: ``"triton"`` or ``"torch"``; by default Triton on a GPU for two to four cores of fp32
            or bf16.
        precision: how Triton multiplies fp32 matrices: ieee, tf32, tf32x3, or bf16, which also
            halves the buffers for products of two cores. By default bf16 under autocast to bf16,
            otherwise the setting of ``torch.set_float32_matmul_precision``. Gradients of cores are
            summed in fp32.
        deterministic: make the gradients of equal inputs bitwise equal; by default the setting of
            ``torch.use_deterministic_algorithms``.

    Returns:
        The rows, ``[..., D]`` with ``D = prod(q)``. Triton stores the rows of ``ids [F, B]`` as
        ``[B, F, D]``.

    Raises:
        ValueError: ``ids`` are not integers or on another device; ``skip`` has another shape.
    """
    require_integers(cores[0], ids=ids)
    if skip is not None and (skip.shape, skip.dtype) != (ids.shape, torch.bool):
        raise ValueError(
            f"skip is {skip.dtype} {tuple(skip.shape)}, it must be bool {tuple(ids.shape)}"
        )

    if not _runs_triton(cores, impl) or not ids.numel():
        with torch.autocast(ids.device.type, enabled=False):  # it would cast sums and rows too
            if skip is None:
                return tt_vectors_torch(cores, shape, tables, ids)
            rows = cores[0].new_zeros(*ids.shape, prod(shape.q))
            rows[~skip] = tt_vectors_torch(cores, shape, tables.expand_as(ids)[~skip], ids[~skip])
            return rows

    layout = factor_layout(shape)
    table_of, per_table = _table_runs(tables, ids)
    num_tables, batch = ids.shape if ids.dim() == 2 else (1, 1)
    request = LookupRequest(
        layout=layout,
        ids=ids.contiguous().view(-1),
        skip=None if skip is None else skip.contiguous().view(-1),
        dtype=dtype or cores[0].dtype,
        table_of=table_of,
        per_table=per_table,
        num_results=ids.numel(),
        batch=batch,
        tables=num_tables,
        strategy=_strategy(layout, ids.numel()),
        deterministic=_deterministic(deterministic),
    )
    out = _look_up(request, None, cores, precision)

    if ids.dim() == 2:
        return out.view(*ids.t().shape, -1).transpose(0, 1)
    return out.view(*ids.shape, -1)


def tt_bags(
    cores: Sequence[Tensor],
    shape: TTShape,
    bags: Bags,
    *,
    mode: str = "sum",
    dtype: torch.dtype | None = None,
    impl: str | None = None,
    precision: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Look up rows and pool them by bag, without a copy of every row.

    Args:
        cores, shape: as in :func:`tt_vectors`.
        bags: ids, offsets and weights; there may be ids beyond the last bag. Weights need mode sum
            and get a gradient.
        mode: sum or mean; an empty bag gives zeros.
        dtype, impl, precision, deterministic: as in :func:`tt_vectors`.

    Returns:
        ``[F, B, D]``, which Triton stores as ``[B, F, D]``.

    Raises:
        ValueError: the mode is another one, there are weights with mode mean or not one for each
            id, offsets have a wrong length, or ids or offsets are not integers or on another
            device.
    """
    require_integers(cores[0], ids=bags.ids, offsets=bags.offsets)
    tables = shape.p.shape[0]
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode is {mode!r}, it must be sum or mean")
    bags.check(tables, mode)

    # PyTorch takes cores of every number and type, and no look-ups at all.
    batch, lookups = bags.count // tables, len(bags.ids)
    if not _runs_triton(cores, impl) or not lookups or not bags.count:
        with torch.autocast(bags.ids.device.type, enabled=False):
            return tt_bags_torch(cores, shape, bags, mode)

    # One look-up of all bags.
    layout, bags = factor_layout(shape), bags.contiguous()
    request = LookupRequest(
        layout=layout,
        ids=bags.ids,
        dtype=dtype or cores[0].dtype,
        offsets=bags.offsets,
        mean=mode == "mean",
        num_results=bags.count,
        batch=batch,
        tables=tables,
        strategy=_strategy(layout, lookups),
        deterministic=_deterministic(deterministic),
    )
    out = _look_up(request, bags.weights, cores, precision)
    return out.view(batch, tables, -1).transpose(0, 1)


def _look_up(
    request: LookupRequest,
    weights: Tensor | None,
    cores: Sequence[Tensor],
    precision: str | None,
) -> Tensor:
    options = {
        "precision": _precision(precision, cores[0].device.type),
        "trains": torch.is_grad_enabled() and any(core.requires_grad for core in cores),
    }
    return _Rows.apply(request, options, weights, *(core.contiguous() for core in cores))


def _table_runs(tables: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    """The table of every run of ids of one table, and the length of the runs."""
    if tables.numel() == 1:
        return tables.contiguous(), ids.numel()
    if ids.dim() == 2 and tables.shape == (len(ids), 1):
        return tables.contiguous(), ids.shape[1]
    return tables.expand(ids.shape).contiguous(), 1


def _deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _strategy(layout: FactorLayout, n: int) -> Strategy:
    """The strategy for ``n`` look-ups; see :mod:`dlrm.kernels.tt.lookup`."""
    if n >= _UNIQUE_FROM and layout.words <= _UNIQUE_UP_TO and len(layout.segments.right) <= n:
        return "unique"
    return "direct"


def _precision(precision: str | None, device: str) -> str:
    if precision is None:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            return "bf16"
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}{did_you_mean(precision, PRECISIONS)}")
    return precision


def _runs_triton(cores: Sequence[Tensor], impl: str | None) -> bool:
    able = 2 <= len(cores) <= 4 and cores[0].dtype in (torch.float32, torch.bfloat16)
    if impl == "triton" and not able:
        raise ValueError(
            f"{len(cores)} cores of {cores[0].dtype}: the Triton look-up takes 2 to 4 cores of "
            "float32 or bfloat16; leave out impl"
        )
    return able and use_triton(cores[0], impl)
