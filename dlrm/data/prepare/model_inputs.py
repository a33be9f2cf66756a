"""Raw rows to the arrays that an exported model takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..schema import Meta
from .raw_rows import in_batches, prepare
from .transform import Transform

PREPARATION = "preparation"
"""Where an export has what its raw rows are prepared with."""
Arrays = list[NDArray[Any]]
"""``dense [N, B]`` float32; ``ids [F_1, B]`` int64 of the features with one id each; and for each
feature with lists of ids ``values [nnz]`` and ``offsets [B + 1]``, int64."""


@dataclass(frozen=True, kw_only=True)
class InputReader:
    """Reads raw rows, with the columns that the training data had, as inputs of a model.

    Example::

        reader = InputReader.load("EXPORT")
        arrays = reader.arrays({"price": [9.5], "user": ["u1"]})
        probabilities = model(*map(torch.from_numpy, arrays))
    """

    meta: Meta
    transform: Transform

    @classmethod
    def load(cls, export: str | os.PathLike[str]) -> Self:
        """Load the preparation in an export.

        Raises:
            FileNotFoundError, ValueError: it is missing or damaged.
        """
        directory = Path(export) / PREPARATION
        return cls(meta=Meta.read(directory), transform=Transform.load(directory))

    def arrays(self, rows: Any) -> Arrays:
        """The inputs of rows in memory.

        Args:
            rows: a DataFrame, an Arrow table or batch, or a mapping of columns. Columns that no
                feature is made of are left out.

        Raises:
            ValueError: a column is missing, or a value does not fit.
        """
        return self._inputs(prepare(self.transform, rows))

    def read(
        self, inputs: Sequence[str | os.PathLike[str]], *, batch_size: int = 16384
    ) -> Iterator[Arrays]:
        """The inputs of the rows of files, ``batch_size`` rows at a time, in bounded memory.

        Args:
            inputs: files or patterns, as for the preparation of the training data.
            batch_size: rows of a batch; the last may have fewer.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, a column is missing, or a value does not fit; the error
                names the file and the row.
        """
        parts = ((rows,) for rows, _, _ in self.transform.read(inputs))
        for (rows,) in in_batches(parts, batch_size):
            (batch,) = rows.combine_chunks().to_batches()
            yield self._inputs(batch)

    def _inputs(self, rows: pa.RecordBatch) -> Arrays:
        """The inputs of prepared rows."""
        count = rows.num_rows
        dense = [_array(rows[name], np.float32) for name in self.meta.dense]
        single = [column.name for column in self.meta.categorical if not column.multi_hot]
        ids = [_array(rows[name], np.int64) for name in single]
        arrays: Arrays = [_stacked(dense, count, np.float32), _stacked(ids, count, np.int64)]
        for column in self.meta.categorical:
            if column.multi_hot:
                bags = rows[column.name]
                lengths = pc.fill_null(pc.list_value_length(bags), 0).to_numpy()
                offsets = np.zeros(count + 1, np.int64)
                np.cumsum(lengths, out=offsets[1:])
                arrays += [_array(bags.flatten(), np.int64), offsets]
        return arrays


def _array(column: pa.Array, dtype: type) -> NDArray[Any]:
    return column.to_numpy(zero_copy_only=False).astype(dtype)


def _stacked(rows: list[NDArray[Any]], count: int, dtype: type) -> NDArray[Any]:
    """Rows one below the other; no rows have the shape ``[0, count]``."""
    return np.stack(rows) if rows else np.empty((0, count), dtype)
