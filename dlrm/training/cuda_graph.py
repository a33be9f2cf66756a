"""Training steps captured as CUDA graphs.

Launches, which otherwise are most of the time of a small batch, then cost next to nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.compiler import set_stance

from dlrm.kernels.multi_copy import copy_together
from dlrm.kernels.streams import stream_of
from dlrm.training.prefetch import PreparedBatch

WARM_UP = 3  # steps of a shape that run one by one before it is captured

Step = Callable[[PreparedBatch, bool], dict[str, Tensor]]
"""Trains on a prepared batch, with gradient norms or without."""

Key = tuple[int, bool, bool, bool]
"""Of a captured step: batch size, with norms, rows fetched ahead, look-ups sorted ahead."""


@dataclass(frozen=True)
class Captured:
    """A step of one batch size as a CUDA graph, and where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    static: PreparedBatch
    out: dict[str, Tensor]


class StepGraphs:
    """CUDA graphs of a step, one for each batch size that comes up often.

    The first steps of a size run one by one, as capture asks for.

    Args:
        device: of the step.
        by_group: the order in which a captured step has the ids of the features, ``[F]``: its
            context says ``grouped``.

    Attributes:
        preparing_seconds: time spent in steps that were compiled or captured, or ran one by one
            before that.
    """

    def __init__(self, device: torch.device, by_group: Tensor) -> None:
        self._device, self._by_group = device, by_group
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self.preparing_seconds = 0.0

    def __call__(self, step: Step, prepared: PreparedBatch, norms: bool) -> dict[str, Tensor]:
        """Run the step or replay it.

        Args:
            step: the same one every time; it does not wait for the GPU.
            prepared: a one-hot batch.
            norms: an argument of the step.

        Returns:
            What the step returns; a captured one writes to the same place every time.
        """
        context = prepared.context
        key = prepared.batch.size, norms, context.rows_fetched, bool(context.lookups)
        if (captured := self._captured.get(key)) is None:
            began = time.perf_counter()
            out = self._prepare(key, step, prepared, norms)
            self.preparing_seconds += time.perf_counter() - began
            return out
        self._place(captured.static, prepared)
        captured.graph.replay()
        return captured.out

    def close(self) -> None:
        """Drop the graphs; the next step of a batch size is captured anew."""
        self._captured.clear()

    def _prepare(
        self, key: Key, step: Step, prepared: PreparedBatch, norms: bool
    ) -> dict[str, Tensor]:
        """A step of a batch size that is not captured yet, and may be now."""
        self._seen[key] += 1
        if self._seen[key] > WARM_UP:
            captured = self._captured[key] = self._capture(step, prepared, norms)
            captured.graph.replay()
            return captured.out
        # The short last batch of an epoch is not worth the seconds of compiling for its size.
        size = prepared.batch.size
        known = not self._captured or any(size == other for other, *_ in self._captured)
        compiles = known or self._seen[key] == WARM_UP
        with nullcontext() if compiles else set_stance("force_eager"):
            return self._warm_up(step, prepared, norms)

    def _warm_up(self, step: Step, prepared: PreparedBatch, norms: bool) -> dict[str, Tensor]:
        """A step one by one on a side stream."""
        current, side = torch.cuda.current_stream(), stream_of(self._device, "steps")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = step(prepared, norms)
        current.wait_stream(side)
        return out

    def _capture(self, step: Step, prepared: PreparedBatch, norms: bool) -> Captured:
        """Record a step on a copy of the batch; nothing is computed yet."""
        lookups = [each.like() for each in prepared.context.lookups]
        context = replace(prepared.context, grouped=True, lookups=lookups)
        static = PreparedBatch(batch=prepared.batch.clone(), context=context)
        self._place(static, prepared)
        graph = torch.cuda.CUDAGraph()
        if not self._captured:  # one replay follows the other: graphs share their memory
            self._pool = torch.cuda.graph_pool_handle()
        # Meanwhile a thread may fetch rows, with streams and memory of its own.
        stream = stream_of(self._device, "steps")
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            out = step(static, norms)
        return Captured(graph, static, out)

    def _place(self, to: PreparedBatch, prepared: PreparedBatch) -> None:
        """Copy a batch to where a captured step reads it."""
        copy_together(
            (to.batch.dense, to.batch.labels, to.batch.ids),
            (prepared.batch.dense, prepared.batch.labels, prepared.batch.ids),
            (None, None, self._by_group),
        )
        for own, lookups in zip(to.context.lookups, prepared.context.lookups, strict=True):
            for old, new in zip(own.tensors, lookups.tensors, strict=True):
                old.copy_(new)
