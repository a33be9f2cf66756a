"""Ids for the values of later rows: tables grow for new values, or old values are evicted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .vocabulary import Vocabulary, texts_of


def extend_ids(
    old: Vocabulary,
    values: pa.Array,
    counts: NDArray[np.int64],
    *,
    min_count: int,
    most: int | None = None,
    evict_after: int | None = None,
) -> tuple[Vocabulary, NDArray[np.int32]]:
    """Give ids to the values of later rows that have none.

    A value is evicted only when a new one needs its id. The values that were unseen the longest go
    first, and among equals those with the largest id, which are the rarest. When none is left, new
    values get the ids after the last one. So no id is without a value, a value that is kept keeps
    its id, and tables never shrink. The counts of evicted values, and of all without an id, are
    added to those of ``oov_id``, whose id is never given away.

    Args:
        old: the vocabulary so far. Without an ``oov_id``, no value can be evicted.
        values: ``[n]`` distinct texts or keys, in rising order.
        counts: ``[n]`` occurrences in the new training rows, perhaps 0. They are added to the old
            ones.
        min_count: occurrences that a new value needs.
        most: the number of ids that there may be.
        evict_after: preparations, at least 1, that a value must have been unseen for to be evicted,
            this one included; None to evict none.

    Returns:
        The extended vocabulary, and the id ``[n]`` of each value; -1 if it has none.
    """
    size, oov_id, listed = len(old), old.oov_id, old.find(values)
    unseen = np.ones(size, np.int32) if old.unseen is None else old.unseen + np.int32(1)
    unseen[listed[(counts > 0) & (listed >= 0)]] = 0
    if oov_id is not None:
        unseen[oov_id] = 0

    # New values, and the ids that are free for them: those of evicted values, then further ones.
    new = np.flatnonzero((listed < 0) & (counts >= min_count))
    new = new[np.argsort(-counts[new], kind="stable")]
    free = np.flatnonzero(unseen >= evict_after)[::-1] if evict_after else np.empty(0, np.int64)
    free = free[np.argsort(-unseen[free], kind="stable")][: len(new)]
    grown = size + len(new) - len(free)
    if most is not None:
        grown = max(size, min(grown, most))
    given = np.concatenate([free, np.arange(size, grown)]).astype(np.int32)
    new = new[: len(given)]

    # What becomes of the counts and of values that have lost their ids.
    total = np.pad(old.counts, (0, grown - size))
    ids = listed.copy()
    if len(free):
        total[oov_id] += total[free].sum()
        total[free] = 0
        ids[np.isin(listed, free)] = -1  # in rows that are not for training
    ids[new] = given
    if oov_id is not None:
        ids[ids < 0] = oov_id
    np.add.at(total, ids[ids >= 0], counts[ids >= 0])
    unseen = np.pad(unseen, (0, grown - size))
    unseen[given] = 0

    # Each id has its old value, or one of the new ones, which come after all old ones.
    source = np.arange(grown)
    source[given] = size + np.arange(len(new))
    added = texts_of(values.take(pa.array(new))).cast(old.values.type)
    extended = Vocabulary(
        values=pa.concat_arrays([old.values, added]).take(pa.array(source)),
        counts=total,
        oov_id=oov_id,
        unseen=unseen,
        positives=None if old.positives is None else np.pad(old.positives, (0, len(new)))[source],
    )
    return extended, ids
