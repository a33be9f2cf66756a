"""Ids for the values of later rows: tables grow for new values, or old values are evicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING_TO_EVICT = "--forget needs --append-new: ids become free only for new values"


@dataclass(frozen=True, kw_only=True)
class Extended:
    """The ids of a column after later rows."""

    new: NDArray[np.int64]
    """``[m]`` which of the values get an id, in order of falling count."""
    given: NDArray[np.int32]
    """``[m]`` the ids that they get."""
    ids: NDArray[np.int32]
    """``[n]`` of each value; -1 if it has none and there is no id of unlisted ones."""
    counts: NDArray[np.int64]
    """``[V]``, of old and new rows."""
    unseen: NDArray[np.int32]
    """``[V]`` preparations, up to this one, of which no training row had the value."""


def extend_ids(
    known: NDArray[np.int64],
    unseen: NDArray[np.int32] | None,
    oov_id: int | None,
    listed: NDArray[np.int32],
    counts: NDArray[np.int64],
    *,
    min_count: int,
    evict_after: int | None,
    most: int | None = None,
) -> Extended:
    """Give ids to the values of later rows that have none.

    A value is evicted only when a new one needs its id. The values that were unseen the longest go
    first, and among equals those with the largest id, which are the rarest. When none is left, new
    values get the ids after the last one. So no id is without a value, a value that is kept keeps
    its id, and tables never shrink. The counts of evicted values, and of all without an id, are
    added to those of ``oov_id``.

    Args:
        known: ``[U]`` how often each id occurred so far.
        unseen: ``[U]`` preparations, up to the last one, without its value; None: 0.
        oov_id: the id of unlisted values, which is never given away; None if there is none, and
            then ``evict_after`` is None too.
        listed: ``[n]`` the id of each distinct value of the rows; -1 if it has none.
        counts: ``[n]`` how often it occurs in the training rows, perhaps 0.
        min_count: occurrences that a new value needs.
        evict_after: preparations, at least 1, that a value must have been unseen for to be evicted,
            this one included; None to evict none.
        most: the number of ids that there may be.
    """
    size = len(known)
    unseen = np.ones(size, np.int32) if unseen is None else unseen + np.int32(1)
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

    total = np.pad(known, (0, grown - size))
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
    return Extended(new=new, given=given, ids=ids, counts=total, unseen=unseen)
