"""The groups that rows belong to: equal values of a column of the prepared files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm.data.parquet import RowGroupReader
from dlrm.data.prepare.vocabulary import read_vocabulary
from dlrm.data.schema import DESCRIBED, Meta
from dlrm.utils.messages import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The group of each row of a split, and the value that the rows of a group have."""

    of_rows: NDArray[np.int64]  # [rows], in the order of the files; -1: in no group
    values: pa.Array  # [groups]
    vocabulary: Path | None
    """The vocabulary that the values are ids of."""

    def names(self, groups: Sequence[int]) -> list[object]:
        """The values of a few groups as the raw rows have them; ids that have no text as they are.

        Raises:
            ValueError: the vocabulary is damaged.
        """
        values = self.values.take(pa.array(groups, pa.int64()))
        if self.vocabulary is None:
            return values.to_pylist()
        known = read_vocabulary(self.vocabulary, ["id", "value"])
        known = known.filter(pc.is_in(known["id"], values.cast(known["id"].type)))
        texts = dict(zip(*(known[name].to_pylist() for name in ("id", "value")), strict=True))
        return [texts.get(value, value) for value in values.to_pylist()]


def read_groups(
    directory: str | os.PathLike[str], meta: Meta, splits: Iterable[str], column: str | None
) -> dict[str, Groups]:
    """Read the groups of all rows of some splits, by split.

    Rows without a value, and those with the id that all unseen values share, are in no group.

    Args:
        directory: prepared directory.
        meta: its description.
        splits: names of the splits.
        column: a column of its files: a category, a number, or one that was passed through. None:
            there are no groups.

    Raises:
        ValueError: there is no such column, or it holds lists; or a file is damaged.
    """
    if column is None:
        return {}
    return {split: _read_split(Path(directory), meta, split, column) for split in splits}


def _read_split(directory: Path, meta: Meta, split: str, column: str) -> Groups:
    reader, parts = RowGroupReader(directory, meta), []
    for row_group in reader.row_groups(split):
        schema = row_group.metadata.schema.to_arrow_schema()
        if column not in schema.names:
            raise ValueError(
                f"{row_group.path} has no column {column!r} to group by"
                f"{did_you_mean(column, schema.names)}"
            )
        if pa.types.is_nested(schema.field(column).type):
            raise ValueError(
                f"{row_group.path}: column {column!r} holds lists: group by another column"
            )
        parts += reader.read_table(row_group, [column])[column].chunks

    values = pa.chunked_array(parts).combine_chunks()
    coded = values.dictionary_encode()
    of_rows = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    category = next((table for table in meta.categorical if table.name == column), None)
    if category is not None and category.oov_id is not None:
        unseen = coded.dictionary.index(category.oov_id).as_py()
        of_rows[of_rows == unseen] = -1

    vocabulary = directory / meta.vocabulary_file(column)
    described = meta.options.get("made_by") == DESCRIBED  # whose vocabularies are of other ids
    has_texts = category is not None and not described and vocabulary.is_file()
    return Groups(
        of_rows=of_rows, values=coded.dictionary, vocabulary=vocabulary if has_texts else None
    )
