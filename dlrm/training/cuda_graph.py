"""Training steps captured as CUDA graphs.

A captured step is a single launch; otherwise launches take most of the time of a small batch.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.kernels.multi_copy import copy_together
from dlrm.training.prefetch import PreparedBatch
from dlrm.utils.graph_recorder import GraphRecorder

WARM_UP = 3  # steps of a batch size; it is captured after the last of them

Step = Callable[[PreparedBatch, bool], dict[str, Tensor]]
"""Trains on a prepared batch, with or without gradient norms."""


class Key(NamedTuple):
    """Batches that share a captured step."""

    size: int
    norms: bool
    rows_fetched: bool
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
    """A recorded step of one batch size, its inputs and its outputs."""

    replay: Callable[[], object]
    static: PreparedBatch
    out: dict[str, Tensor]


class StepGraphs:
    """CUDA graphs of a step, one for each batch size that comes up often.

    The first steps of a size run without a graph, as a warm-up. They train on copies of their
    batches, which have the layout of the tensors that are captured, so that all kernels have been
    compiled for those: a dimension of size 0 or 1 may have any stride. Of multi-hot batches, those
    of equal ``bag_sizes`` share a graph; ragged ones share those with room for their ids.

    If a capture fails, all later steps that have no graph yet run without one, as a warm-up does.

    Args:
        device: of the step.
        by_group: the features in the order in which a captured step reads their ids, ``[F]``; its
            context says ``grouped``.
        undo: drops what a step leaves that was interrupted while it was recorded.
        make_recorder: makes what records the steps.

    Attributes:
        preparing_seconds: time spent in steps that were compiled, captured or ran as a warm-up.
    """

    def __init__(
        self,
        device: torch.device,
        by_group: Tensor,
        undo: Callable[[], None],
        make_recorder: Callable[[torch.device], GraphRecorder] = GraphRecorder,
    ) -> None:
        self._device, self._by_group = device, by_group
        self.undo, self._make_recorder = undo, make_recorder
        self._recorder: GraphRecorder | None = None
        self._captures = True
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self.preparing_seconds = 0.0

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self._captured)

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
        captured.replay()
        return captured.out

    def close(self) -> None:
        """Drop the graphs; the next step of a batch size is captured again."""
        self._captured.clear()
        self._recorder = None  # its memory went with the graphs

    def _key(self, prepared: PreparedBatch, norms: bool) -> Key:
        batch, context = prepared.batch, prepared.context
        key = Key(batch.size, norms, context.rows_fetched, batch.bag_sizes)
        if batch.offsets is None or batch.bag_sizes is not None:
            return key
        count = batch.ids.numel()
        rooms = [k.bags for k in self._captured if isinstance(k.bags, int) and k[:3] == key[:3]]
        fitting = [room for room in rooms if count <= room <= count + count // 8]
        return key._replace(bags=min(fitting, default=room_for(count)))

    def _prepare(
        self, key: Key, step: Step, prepared: PreparedBatch, norms: bool
    ) -> dict[str, Tensor]:
        """Run a step of a batch size without a graph, and capture it after the warm-up."""
        recorder = self._recorder = self._recorder or self._make_recorder(self._device)
        kind = key._replace(bags=0) if isinstance(key.bags, int) else key  # whatever the room
        self._seen[kind] += 1

        static = self._static(key, prepared)
        out = recorder.warm_up(lambda: step(static, norms))
        if self._captures and self._seen[kind] >= WARM_UP:
            self._capture(key, recorder, lambda: step(static, norms), static)
        return out

    def _capture(
        self,
        key: Key,
        recorder: GraphRecorder,
        run: Callable[[], dict[str, Tensor]],
        static: PreparedBatch,
    ) -> None:
        """Record a step that has just run on the same tensors, without computing anything."""
        try:
            replay, out = recorder.record(run)
        except Exception as error:
            self._captures = False
            self.undo()
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            warnings.warn(
                f"a step for {key.size} samples can't be captured as a CUDA graph ({reason}); "
                "training continues with eager steps, which are slower for small batches; "
                "--step eager does so from the start",
                stacklevel=2,
            )
        else:
            self._captured[key] = Captured(replay, static, out)

    def _static(self, key: Key, prepared: PreparedBatch) -> PreparedBatch:
        """A copy of a batch that a captured step can read, of the same layout every time."""
        batch, context = prepared.batch, prepared.context
        ragged = isinstance(key.bags, int)
        copy = padded(batch, key.bags) if isinstance(key.bags, int) else batch.clone()
        static = PreparedBatch(batch=copy, context=replace(context, grouped=True, padded=ragged))
        self._copy_inputs(static, prepared)
        return static

    def _copy_inputs(self, to: PreparedBatch, prepared: PreparedBatch) -> None:
        """Copy a batch to the tensors that a captured step reads."""
        static, batch = to.batch, prepared.batch

        # One launch copies all tensors that have rows.
        targets, sources = [static.dense, static.labels], [batch.dense, batch.labels]
        orders: list[Tensor | None] = [None, None]
        if static.offsets is None:
            targets, sources = [*targets, static.ids], [*sources, batch.ids]
            orders.append(self._by_group)
        elif static.bag_sizes is not None:  # the offsets are those of every such batch
            targets.append(static.ids.view(-1, static.size))
            sources.append(batch.ids.view(-1, static.size))
            orders.append(None)
        else:
            static.ids[: batch.ids.numel()].copy_(batch.ids)
            assert batch.offsets is not None
            static.offsets.copy_(batch.offsets)
        copy_together(targets, sources, orders)

        own_weights, weights = static.weights, batch.weights
        assert (own_weights is None) == (weights is None)
        if own_weights is not None and weights is not None:
            own_weights.copy_(weights)
