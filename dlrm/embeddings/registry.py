"""Embedding kinds by name: the files of this folder that define one."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dlrm.embeddings.base import Common, Embedding
from dlrm.utils.messages import did_you_mean


@functools.cache
def available() -> Mapping[str, type[Embedding]]:
    """Every embedding kind by name: the concrete ``Embedding`` of each file of this folder."""
    kinds = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.ispkg:
            continue
        module = importlib.import_module(f"dlrm.embeddings.{info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Embedding)
                and not inspect.isabstract(value)
                and value.__module__ == module.__name__
            ):
                kinds[info.name] = value
    return MappingProxyType(kinds)


def build(
    kind: str, num_embeddings: Sequence[int], embedding_dim: int, **options: Any
) -> Embedding:
    """Make a group of tables of one kind.

    Args:
        kind: one of :func:`available`.
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        options: the options of the kind, and ``mode``, ``padding_idx``, ``sparse``, ``check_ids``.

    Raises:
        ValueError: an unknown kind or option; the message suggests the closest valid name.
    """
    kinds = available()
    if kind not in kinds:
        raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, kinds)}")
    valid = {*kinds[kind].options(), *Common.__annotations__}
    for name in options:
        if name not in valid:
            raise ValueError(
                f"embedding kind {kind} has no option {name!r}{did_you_mean(name, valid)}"
            )
    return kinds[kind](num_embeddings, embedding_dim, **options)
