"""Helpers that tests of several rooms share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm.distributed.world import World
from dlrm.training.checkpoint import Parts, read_index
from dlrm.training.checkpoint.index import Index
from dlrm.training.checkpoint.manifest import RunState
from dlrm.training.checkpoint.writer import CheckpointWriter

GPU = torch.cuda.is_available()
SLOW = () if GPU else pytest.mark.slow
"""The mark of what takes long in Triton's interpreter."""


def first(name: str, values: Sequence[Any], slow: Any = SLOW) -> pytest.MarkDecorator:
    """Parametrize a test over values: the first is in the fast suite, the others are ``slow``."""
    rest = [pytest.param(value, marks=slow) for value in values[1:]]
    return pytest.mark.parametrize(name, [values[0], *rest])


def combinations(slow: Any = SLOW, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of the values of its arguments.

    Those of the fast suite have each value at least once; the others have the mark ``slow``.
    """
    rows = max(map(len, axes.values()))
    fast = {tuple(row % len(values) for values in axes.values()) for row in range(rows)}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        values = [axis[place] for axis, place in zip(axes.values(), places, strict=True)]
        cases.append(pytest.param(*values, marks=() if places in fast else slow))
    return pytest.mark.parametrize(tuple(axes), cases)


def write_checkpoint(
    run: Path,
    parts: Parts,
    state: RunState,
    *,
    by: str = "0" * 32,
    best: bool = False,
    keep: int = 2,
) -> None:
    """Write a checkpoint ``step_N`` of the run ``by``, and wait until it is on disk."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(run, by, World(), keep, read_index(run) or Index())
    try:
        writer.save(parts, state, best=best)
        writer.wait()
    finally:
        writer.close()
