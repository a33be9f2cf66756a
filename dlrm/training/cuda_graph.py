"""Training steps captured as CUDA graphs.

A captured step is a single launch; otherwise launches take most of the time of a small batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import set_stance

from dlrm.data.batch import Batch
from dlrm.kernels.multi_copy import copy_together
from dlrm.training.prefetch import PreparedBatch
from dlrm.utils.streams import stream_of

WARM_UP = 3  # steps of a batch size before one is captured

Step = Callable[[PreparedBatch, bool], dict[str, Tensor]]
"""Trains on a prepared batch, with or without gradient norms."""


class Key(NamedTuple):
    """What a captured step is for."""

    size: int
    norms: bool
    rows_fetched: bool
    lookups: bool  # sorted ahead
    bags: tuple[int, ...] | int | None  # their fixed sizes, or the room for all ids; None: one-hot


def padded(batch: Batch, room: int) -> Batch:
    """A copy of a batch of ragged bags, with room for ``room`` ids."""
    ids = batch.ids.new_zeros(room)
    ids[: batch.ids.numel()] = batch.ids
    return replace(batch.clone(), ids=ids, bounds=None)


def room_for(count: int) -> int:
    """Ids that a captured step of ``count`` should have room for: 3% to 7% more."""
    count += count // 32
    unit = 1 << max(0, count.bit_length() - 6)
    return -(-count // unit) * unit


@dataclass(frozen=True)
class Captured:
    """A step of one batch size as a CUDA graph, its inputs and its outputs."""

    graph: torch.cuda.CUDAGraph
    static: PreparedBatch
    out: dict[str, Tensor]


class StepGraphs:
    """CUDA graphs of a step, one for each batch size that comes up often.

    The first steps of a size run without a graph: capture needs a warm-up. Of multi-hot batches,
    those of equal ``bag_sizes`` share a graph; ragged ones share those with room for their ids.

    Args:
        device: of the step.
        by_group: the features in the order in which a captured step reads their ids, ``[F]``; its
            context says ``grouped``.

    Attributes:
        preparing_seconds: time spent in steps that were compiled, captured or ran as a warm-up.
    """

    def __init__(self, device: torch.device, by_group: Tensor) -> None:
        self._device, self._by_group = device, by_group
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self.preparing_seconds = 0.0

    def __call__(self, step: Step, prepared: PreparedBatch, norms: bool) -> dict[str, Tensor]:
        """Run the step or replay it.

        Args:
            step: the same one in every call; it must not wait for the GPU.
            prepared: a batch, not empty.
            norms: passed on to the step.

        Returns:
            What the step returns; a captured one writes to the same memory every time.
        """
        key = self._key(prepared, norms)
        if (captured := self._captured.get(key)) is None:
            began = time.perf_counter()
            out = self._prepare(key, step, prepared, norms)
            self.preparing_seconds += time.perf_counter() - began
            return out
        self._copy_inputs(captured.static, prepared)
        captured.graph.replay()
        return captured.out

    def close(self) -> None:
        """Drop the graphs; the next step of a batch size is captured again."""
        self._captured.clear()

    def _key(self, prepared: PreparedBatch, norms: bool) -> Key:
        batch, context = prepared.batch, prepared.context
        lookups = bool(context.lookups)
        key = Key(batch.size, norms, context.rows_fetched, lookups, batch.bag_sizes)
        if batch.offsets is None or batch.bag_sizes is not None:
            return key
        count = batch.ids.numel()
        rooms = [k.bags for k in self._captured if isinstance(k.bags, int) and k[:4] == key[:4]]
        fitting = [room for room in rooms if count <= room <= count + count // 8]
        return key._replace(bags=min(fitting, default=room_for(count)))

    def _prepare(
        self, key: Key, step: Step, prepared: PreparedBatch, norms: bool
    ) -> dict[str, Tensor]:
        """Run a step of a batch size without a graph; capture it after the warm-up."""
        kind = key._replace(bags=0) if isinstance(key.bags, int) else key  # whatever the room
        self._seen[kind] += 1
        if self._seen[kind] > WARM_UP:
            captured = self._captured[key] = self._capture(key, step, prepared)
            captured.graph.replay()
            return captured.out
        # The short last batch of an epoch is not worth the seconds of compiling for its size.
        compiled = not self._captured or any(key.size == other.size for other in self._captured)
        compiles = compiled or self._seen[kind] == WARM_UP
        with nullcontext() if compiles else set_stance("force_eager"):
            return self._warm_up(step, prepared, norms)

    def _warm_up(self, step: Step, prepared: PreparedBatch, norms: bool) -> dict[str, Tensor]:
        """Run a step on a side stream, as capture will."""
        current, side = torch.cuda.current_stream(), stream_of(self._device, "steps")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = step(prepared, norms)
        current.wait_stream(side)
        return out

    def _capture(self, key: Key, step: Step, prepared: PreparedBatch) -> Captured:
        """Record a step on a copy of the batch; nothing is computed yet."""
        lookups = [each.like() for each in prepared.context.lookups]
        ragged = isinstance(key.bags, int)
        context = replace(prepared.context, grouped=True, lookups=lookups, padded=ragged)
        batch = prepared.batch
        copy = padded(batch, key.bags) if isinstance(key.bags, int) else batch.clone()
        static = PreparedBatch(batch=copy, context=context)
        self._copy_inputs(static, prepared)
        graph = torch.cuda.CUDAGraph()
        if not self._captured:  # replays never overlap, so all graphs share one memory pool
            self._pool = torch.cuda.graph_pool_handle()
        # Another thread may fetch rows meanwhile, with streams and memory of its own.
        stream = stream_of(self._device, "steps")
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            out = step(static, key.norms)
        return Captured(graph, static, out)

    def _copy_inputs(self, to: PreparedBatch, prepared: PreparedBatch) -> None:
        """Copy a batch to the tensors that a captured step reads."""
        own, batch = to.batch, prepared.batch
        targets, sources = [own.dense, own.labels], [batch.dense, batch.labels]
        orders: list[Tensor | None] = [None, None]
        if own.offsets is None:
            targets, sources = [*targets, own.ids], [*sources, batch.ids]
            orders.append(self._by_group)
        elif own.bag_sizes is not None:  # the offsets are those of every such batch
            targets.append(own.ids.view(-1, own.size))
            sources.append(batch.ids.view(-1, own.size))
            orders.append(None)
        else:
            own.ids[: batch.ids.numel()].copy_(batch.ids)
            assert batch.offsets is not None
            own.offsets.copy_(batch.offsets)
        copy_together(targets, sources, orders)
        own_weights, weights = own.weights, batch.weights
        assert (own_weights is None) == (weights is None)
        if own_weights is not None and weights is not None:
            own_weights.copy_(weights)
        for known, lookups in zip(to.context.lookups, prepared.context.lookups, strict=True):
            for old, new in zip(known.tensors, lookups.tensors, strict=True):
                old.copy_(new)
