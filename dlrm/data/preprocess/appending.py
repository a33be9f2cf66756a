"""Ids for the values of later rows: new ones are appended; old ones may be forgotten for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlrm.data.prepare.criteo_rows import hex_strings
from dlrm.data.preprocess.vocabulary import SCHEMA, UNSEEN, KeyIndex, open_vocabulary, read_known
from dlrm.data.schema import Meta

NOTHING_TO_FORGET = "--forget needs --append-new: ids become free only for new values"


@dataclass(frozen=True, kw_only=True)
class Extended:
    """What later rows make of the ids of a column."""

    new: NDArray[np.int64]
    """``[m]`` which of the values get an id, in order of falling count."""
    given: NDArray[np.int32]  # [m] the ids that they get
    ids: NDArray[np.int32]
    """``[n]`` of each value; -1 if it has none and there is no id of unlisted ones."""
    counts: NDArray[np.int64]  # [V], of old and new rows
    unseen: NDArray[np.int32]
    """``[V]`` preparations, up to this one, of which no training row had the value."""

    def put(self, old: pa.Array, values: pa.Array) -> pa.Array:
        """The value of each id: the ``old`` ones, and those of the ``values [n]`` that are new."""
        source = np.arange(len(self.counts))
        source[self.given] = np.arange(len(old), len(old) + len(self.new))
        new = values.take(pa.array(self.new)).cast(old.type)
        return pa.concat_arrays([old, new]).take(pa.array(source))


def extend_ids(
    known: NDArray[np.int64],
    unseen: NDArray[np.int32] | None,
    oov_id: int | None,
    listed: NDArray[np.int32],
    counts: NDArray[np.int64],
    *,
    min_count: int,
    forget: int | None,
    most: int | None = None,
) -> Extended:
    """Give ids to the values of later rows that have none.

    A value is forgotten only when a new one needs its id. Of the values that were unseen for long
    enough, the longest unseen go first, and of equals those with the largest id, which are the
    rarest. When none is left, new values get the ids after the last one. So no id is without a
    value, a value that is kept keeps its id, and tables never shrink. The counts of forgotten
    values, and of all without an id, are those of ``oov_id``.

    Args:
        known: ``[U]`` how often each id occurred so far.
        unseen: ``[U]`` preparations, up to the last one, without its value; None: 0.
        oov_id: the id of unlisted values, which is never given away; None if there is none, and
            then ``forget`` is None too.
        listed: ``[n]`` the id of each distinct value of the rows; -1 if it has none.
        counts: ``[n]`` how often it occurs in the training rows, perhaps 0.
        min_count: occurrences that a new value needs.
        forget: preparations, at least 1, that a value must have been unseen for to be forgotten,
            this one included; None to forget none.
        most: the number of ids that there may be.
    """
    size = len(known)
    unseen = np.ones(size, np.int32) if unseen is None else unseen + np.int32(1)
    unseen[listed[(counts > 0) & (listed >= 0)]] = 0
    if oov_id is not None:
        unseen[oov_id] = 0
    new = np.flatnonzero((listed < 0) & (counts >= min_count))
    new = new[np.argsort(-counts[new], kind="stable")]
    free = np.flatnonzero(unseen >= forget)[::-1] if forget else np.empty(0, np.int64)
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


def append_ids(
    directory: Path,
    name: str,
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    min_count: int = 1,
    forget: int | None = None,
) -> tuple[pa.Table, NDArray[np.int32]]:
    """The vocabulary of a column of a prepared directory with new values, and the id of each key.

    Args:
        directory: the prepared directory.
        name: the column.
        keys: ``[n]`` distinct, in rising order.
        counts: ``[n]`` occurrences of each; 0 for a key that occurs only in rows not counted.
        min_count: see :func:`extend_ids`.
        forget: see there.

    Raises:
        ValueError: the vocabulary is damaged, has no id for unlisted values, which some keys need,
            or becomes too large.
    """
    with open_vocabulary(directory / Meta.vocabulary_file(name), directory) as file:
        table = read_known(file, SCHEMA)
        index = KeyIndex.of(table)
    made = extend_ids(
        table["count"].to_numpy(),
        table[UNSEEN.name].to_numpy() if UNSEEN.name in table.column_names else None,
        index.oov_id,
        replace(index, oov_id=None).look_up(keys),
        counts,
        min_count=min_count,
        forget=forget,
    )
    size = len(made.counts)
    if size > np.iinfo(np.int32).max:
        raise ValueError(f"{name} would have {size:,} ids, at most 2^31 - 1 are possible")
    if (made.ids < 0).any():
        raise ValueError(
            f"{name}: {(made.ids < 0).sum()} values are in no training row, and {directory} was "
            "prepared with --vocabulary all and has no out-of-vocabulary id: prepare it with "
            "--vocabulary train"
        )
    columns = {
        "value": made.put(table["value"].combine_chunks(), hex_strings(keys)),
        "id": np.arange(size, dtype=np.int32),
        "count": made.counts,
        UNSEEN.name: made.unseen,
    }
    return pa.table(columns, schema=SCHEMA.append(UNSEEN)), made.ids
