"""Whether two prepared directories gave their values the same ids and numbers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..schema import Meta
from .vocabulary import read_vocabulary


def fingerprint(directory: str | os.PathLike[str], tables: Iterable[str], rules: Any) -> str:
    """A digest of the vocabularies of a directory and of the rules for its other features.

    It depends on the values and their ids, not on how often they occurred, on the rows, or on how
    the files were written. So rows that were given the ids of earlier data have its fingerprint.

    Args:
        directory: has the vocabularies.
        tables: the categorical columns, in order.
        rules: everything else that determines the features of a raw row, as JSON.

    Raises:
        ValueError: a vocabulary is damaged.
    """
    total = hashlib.sha256(json.dumps(rules, sort_keys=True, default=str).encode())
    for name in tables:
        values = _values(directory, name)
        unlisted = pc.index(values.is_null(), True).as_py()
        total.update(json.dumps([name, len(values), unlisted]).encode())
        texts = values.drop_null().cast(pa.large_binary())
        total.update(pc.binary_length(texts).to_numpy().astype("<i8"))
        _, offsets, data = texts.buffers()
        if len(texts) and data is not None:
            ends = np.frombuffer(offsets, np.int64)[texts.offset :]
            total.update(memoryview(data)[ends[0] : ends[len(texts)]])
    return total.hexdigest()


def _values(directory: str | os.PathLike[str], column: str) -> pa.Array:
    """The value of each id of a column; null is that of all others."""
    path = Path(directory) / Meta.vocabulary_file(column)
    return read_vocabulary(path, ["value"], directory)["value"].combine_chunks()


def same_values(
    directory: str | os.PathLike[str], earlier: str | os.PathLike[str], column: str
) -> NDArray[np.bool_]:
    """Whether each id ``[V]`` of a column has the same value in a directory as in an earlier one.

    Raises:
        FileNotFoundError: there is no such vocabulary.
        ValueError: a vocabulary is damaged.
    """
    now, before = (_values(path, column) for path in (directory, earlier))
    size = min(len(now), len(before))
    now, before = now[:size], before[:size]
    unlisted = pc.and_(now.is_null(), before.is_null())
    same = pc.or_(pc.equal(now, before).fill_null(False), unlisted)
    return same.to_numpy(zero_copy_only=False)


def require_same_ids(
    data: str | os.PathLike[str], meta: Meta, trained: str | None, model: str | os.PathLike[str]
) -> None:
    """Check that ids of the data that ``meta`` describes stand for the values that they stand for
    in a model, whose data had the fingerprint ``trained``; None if that is not known.

    Raises:
        ValueError: the fingerprints differ.
    """
    if None in (trained, meta.fingerprint) or trained == meta.fingerprint:
        return
    criteo = " --criteo" * ("dense_transform" in meta.options)
    raise ValueError(
        f"{data} was prepared separately from the data of {model}, so its ids stand for other "
        f"values: score the raw rows with dlrm predict, or prepare them with "
        f"dlrm prepare{criteo} --ids-of RUN, to train on them with --split 0.8 0.1 0.1"
    )


def other_data(
    directory: str | os.PathLike[str], model: str | os.PathLike[str], instead: str
) -> ValueError:
    """The error of a directory that does not describe the data that ``model`` was trained on; it
    says what to do ``instead`` of restoring it."""
    return ValueError(
        f"{directory} is not of the data that {model} was trained on; restore it, or {instead}"
    )
