"""Update the rows of a table from the gradients of its look-ups, in one pass.

``n`` look-ups have ``n`` gradient rows, many of them for the same row of the table. They are
sorted by row (:mod:`dlrm.kernels.update.row_sort`: this needs only the ids and can run ahead of
time) and summed per row, and the rule is applied once to each row that was used. There is no dense
gradient, no coalesced copy, no count of unique rows on the host, and the result is deterministic.

Bytes an update must move: every gradient row and its row number once, every unique row of the
weight and its state twice. The kernels are in :mod:`dlrm.kernels.update._merge`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm.kernels import require_integers, triton, use_triton
from dlrm.kernels.update._merge import Entries, Step, Table, finish, merge, merge_runs
from dlrm.kernels.update.cached_slots import CachedSlots
from dlrm.kernels.update.packed import PackedRows, packed_rows, storage, update_packed_torch
from dlrm.kernels.update.rounding import round_stochastic, seeded
from dlrm.kernels.update.row_sort import SortedRows, merge_rows_torch, sort_rows
from dlrm.kernels.update.rules import Rule, foreach_update, hyper, make_rule

TILE = 1024  # elements that a warp sums at a time
MANY = 6000  # tiles that fill a GPU; beyond that, tiles have several parts
LONGEST = 1 << 16  # elements of a tile of many parts
# Where `merge_runs` is faster. On one H200 with row-wise Adagrad and dim 128, 1.5 M look-ups in
# MLPerf's bags took 0.29 ms with it and 0.50 without it, 0.4 M one-hot ones 0.135 and 0.132; with
# dim 16 it took 1.5 times as long.
RUNS_COLUMNS, RUNS_ENTRIES = 128, 1 << 19
RUNS_ELEMENTS = 512  # of the rows that a warp sums at a time
RUNS_TILES, RUNS_LONGEST = 12_000, 256  # tiles that fill a GPU, and the most entries of one


def update_rows(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    sorted_rows: SortedRows | None = None,
    cached: CachedSlots | None = None,
    seed: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Apply one optimizer step, in place, to the rows of a row gradient.

    Gradients of equal rows are summed first. Nothing is read back by the host and no shape depends
    on the ids, so a CUDA graph can capture the call.

    Args:
        rule: a rule of :func:`~dlrm.kernels.update.rules.make_rule`, or the name of one with its
            default options.
        weight: the table, ``[V, D]`` contiguous, fp32 or bf16; or a
            :class:`~dlrm.kernels.update.packed.PackedParameter`.
        rows: row of each gradient, ``[n]``; those with row -1 are skipped.
        grads: ``[n, D]``, fp32 or bf16; with ``sorted_rows`` of another length, if their ``order``
            says which gradient each row has, as where a bag of rows has one.
        states: state of the table, in the order of ``rule.states``, zeros at first: ``[V, D]``, or
            ``[V]`` or ``[V, 1]`` where it is one number per row; fp32, steps also int32, sums also
            bf16, which are rounded as bf16 rows are.
        lr: learning rate, a 0-d fp32 tensor.
        sorted_rows: ``sort_rows(rows, V)`` if that was computed ahead; the kernels then read it in
            place of ``rows``.
        cached: the cached rows of ``weight`` and ``states``, if these are in host memory.
        seed: a 0-d int64 tensor, another number in each step. With it bf16 and packed rows are
            rounded stochastically, without bias; without it they are rounded to nearest.
        impl: see :mod:`dlrm.kernels`.

    Raises:
        ValueError: unknown rule, states or shapes that do not fit, or rows that are not integers or
            on another device.
    """
    rule = make_rule(rule) if isinstance(rule, str) else rule
    _check(rule, weight, grads, states)

    if sorted_rows is None:
        require_integers(weight, rows=rows)
        if rows.shape != grads.shape[:1]:
            raise ValueError(
                f"rows have shape {tuple(rows.shape)}, they must be [{len(grads)}]: one a gradient"
            )

    if not use_triton(weight, impl):
        with seeded(seed):
            update_rows_torch(rule, weight, rows, grads, states, lr=lr, cached=cached, seed=seed)
        return

    sorted_rows = sorted_rows or sort_rows(rows, len(weight))
    if len(sorted_rows.rows):
        data, wide, packing = storage(weight)
        table = Table((data, *states), None, (), wide)
        if cached is not None:
            table = Table((data, *states), cached.slots, cached.to_cache, wide)
        step = Step(lr, hyper(rule), seed)
        _launch(rule, sorted_rows, grads.contiguous(), table, step, packing)


def _launch(
    rule: Rule, sorted_rows: SortedRows, grads: Tensor, table: Table, step: Step, packing: int
) -> None:
    """Merge the gradients of equal rows, and update each row once."""
    n, dim = len(sorted_rows.rows), grads.shape[1]
    block_d = max(2 if packing else 1, triton.next_power_of_2(dim))
    states = rule.kind.weight_states + rule.kind.momentum

    entries = Entries(sorted_rows.rows, sorted_rows.order, sorted_rows.base, sorted_rows.first, n)
    options = {
        "D": dim,
        "BLOCK_D": block_d,
        "RULE": rule.kind,
        "ROUND": step.seed is not None
        and (packing > 0 or table.tensors[0].dtype == torch.bfloat16),
        "FORMAT": packing,
    }

    # Wide rows are merged in runs, a loop for each; narrow ones in blocks, by a scan.
    if block_d >= RUNS_COLUMNS and n >= RUNS_ENTRIES and not packing:
        length = min(RUNS_LONGEST, triton.next_power_of_2(max(1, n // RUNS_TILES)))
        tiles = triton.cdiv(n, length)
        partials = torch.empty(tiles, 2, dim, device=grads.device)
        begins = torch.empty(n, dtype=torch.int32, device=grads.device)
        elements = RUNS_ELEMENTS >> min(states, 1)
        merge_runs[tiles,](
            entries, grads, partials, begins, table, step,
            LENGTH=length, RUNS=max(1, elements // block_d), CHUNK=1,
            num_warps=min(4, max(1, block_d // elements)), **options,
        )  # fmt: skip
    else:
        block, warps = _tile(block_d, states + (packing > 0))
        wanted = max(1, n // (MANY * block))
        parts = min(max(1, LONGEST // (block * block_d)), 1 << (wanted.bit_length() - 1))
        length = block * parts
        tiles = triton.cdiv(n, length)
        partials = torch.empty(tiles, 2, dim, device=grads.device)
        merge[tiles,](
            entries, grads, partials, table, step,
            BLOCK=block, PARTS=parts, num_warps=warps, **options,
        )  # fmt: skip

    # Rows with entries in several tiles.
    if tiles > 1:
        finish[tiles - 1,](
            entries, partials, table, step,
            BLOCK=length, WIDTH=max(16, min(64, 4096 // block_d)), num_warps=1, **options,
        )  # fmt: skip


def _tile(block_d: int, states: int) -> tuple[int, int]:
    """Rows of a part of a tile, and its warps.

    A warp holds the gradient, the weight and each state of its elements in registers, and their
    addresses. With 64 elements a thread Adam spilled 5 kB a thread: ten times the time. Rounding
    packed rows takes registers too: they count as a state.
    """
    elements = max(32, TILE >> min(states, 1))
    block = max(4, min(256, elements // block_d))
    return block, min(4, max(1, block * block_d // elements))


def _check(rule: Rule, weight: Tensor, grads: Tensor, states: Sequence[Tensor]) -> None:
    rows, dim = weight.shape
    sizes = [rows if per_row else rows * dim for per_row in rule.states.values()]
    if [state.numel() for state in states] != sizes:
        raise ValueError(
            f"{rule.name} on a table {(rows, dim)} needs states of {sizes} elements, "
            f"got {[tuple(state.shape) for state in states]}"
        )
    if grads.dim() != 2 or grads.shape[1] != dim:
        raise ValueError(f"grads have shape {tuple(grads.shape)}, they must be [n, {dim}]")
    if not all(tensor.is_contiguous() for tensor in (storage(weight)[0], *states)):
        raise ValueError("weight and states must be contiguous, they are updated in place")


@torch.no_grad()
def update_rows_torch(
    rule: str | Rule,
    weight: Tensor,
    rows: Tensor,
    grads: Tensor,
    states: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    cached: CachedSlots | None = None,
    seed: Tensor | None = None,
) -> None:
    """:func:`update_rows` in PyTorch, which draws from PyTorch's generator."""
    if not len(rows):
        return
    rule = make_rule(rule) if isinstance(rule, str) else rule
    rows, grad = merge_rows_torch(rows.long(), grads)

    packed = packed_rows(weight)
    if packed is not None and cached is not None:
        _update_cached_packed(rule, packed, rows, grad, cached, lr, seed)
        return
    if packed is not None:
        update_packed_torch(rule, packed, rows, grad, states, lr, seed)
        return

    tensors = [tensor.view(len(weight), -1) for tensor in (weight, *states)]
    if cached is None:
        value, *state = [tensor.index_select(0, rows) for tensor in tensors]
    else:
        value, *state = [cached.read(index, rows) for index in range(len(tensors))]
    value = value.to(grad.dtype)
    foreach_update(rule, [value], [grad], [state], lr)
    if seed is not None and weight.dtype == torch.bfloat16:
        value = round_stochastic(value)

    for index, (tensor, new) in enumerate(zip(tensors, (value, *state), strict=True)):
        if cached is None:
            tensor.index_copy_(0, rows, new.to(tensor.dtype))
        else:
            cached.write(index, rows, new.to(tensor.dtype))


def _update_cached_packed(
    rule: Rule,
    packed: PackedRows,
    rows: Tensor,
    grad: Tensor,
    cached: CachedSlots,
    lr: Tensor,
    seed: Tensor | None,
) -> None:
    """:func:`update_packed_torch` of rows that may be in a cache: as a table of their own."""
    records, *states = (cached.read(index, rows) for index in range(len(cached.tensors)))
    table, every = packed.of_records(records), torch.arange(len(rows), device=rows.device)
    update_packed_torch(rule, table, every, grad, states, lr, seed)
    for index, new in enumerate((table.records, *states)):
        cached.write(index, rows, new)
