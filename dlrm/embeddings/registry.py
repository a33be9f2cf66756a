"""Embedding kinds by name: every file of this package that defines one."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from typing import Any

import dlrm.embeddings
from dlrm.embeddings.base import Embedding
from dlrm.utils.messages import did_you_mean


def available() -> dict[str, type[Embedding]]:
    """Every embedding kind by name: the modules here that define a concrete ``Embedding``."""
    kinds = {}
    for info in pkgutil.iter_modules(dlrm.embeddings.__path__):
        module = importlib.import_module(f"dlrm.embeddings.{info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Embedding)
                and not inspect.isabstract(value)
                and value.__module__ == module.__name__
                and value.is_kind
            ):
                kinds[info.name] = value
    return kinds


def build(
    kind: str, num_embeddings: Sequence[int], embedding_dim: int, **options: Any
) -> Embedding:
    """Make a group of tables of one kind.

    Args:
        kind: one of :func:`available`.
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        options: the kind's options, and ``mode``, ``padding_idx``, ``sparse``, ``check_ids``.

    Raises:
        ValueError: an unknown kind or option, with the nearest valid name.
    """
    kinds = available()
    if kind not in kinds:
        raise ValueError(f"unknown embedding kind {kind!r}{did_you_mean(kind, kinds)}")
    valid = {*kinds[kind].options(), "mode", "padding_idx", "sparse", "check_ids"}
    for name in options:
        if name not in valid:
            raise ValueError(
                f"embedding kind {kind} has no option {name!r}{did_you_mean(name, valid)}"
            )
    return kinds[kind](num_embeddings, embedding_dim, **options)
