"""Raw Criteo rows to the columns of a prepared directory, for scoring: labels are not needed.

This is the counterpart of :class:`dlrm.data.table.transform.TableTransform`, with the same
``load`` and ``read``; :func:`dlrm.data.raw_rows.load_transform` picks the one that a directory
has. What it needs lies in ``meta.json`` and ``vocabulary/``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from dlrm.data.preprocess.parser import COLUMNS, MISSING, parse_block
from dlrm.data.preprocess.reader import BLOCK_BYTES, RawBlock, RawFile
from dlrm.data.preprocess.vocabulary import SCHEMA, KeyIndex, open_vocabulary
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, META_FILE, Meta
from dlrm.data.threads import map_in_order
from dlrm.utils.cpus import cpu_count


@dataclass(frozen=True, kw_only=True)
class CriteoTransform:
    """Raw rows of Criteo to the features of a prepared directory."""

    meta: Meta
    indices: Mapping[str, KeyIndex]
    """The vocabulary of each categorical column."""

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> CriteoTransform:
        """Read what lies in ``directory``: a prepared one, or a copy of these files.

        Raises:
            FileNotFoundError: there is no ``meta.json``.
            ValueError: it was not made by ``prepare_criteo.py``, or a vocabulary is damaged.
        """
        meta = Meta.read(directory)
        if "dense_transform" not in meta.options or meta.tables != CRITEO_CATEGORICAL:
            raise ValueError(
                f"{Path(directory) / META_FILE} was not made by scripts/prepare_criteo.py: raw "
                "rows can't be prepared like it"
            )
        indices = {}
        for name in meta.tables:
            with open_vocabulary(Path(directory) / Meta.vocabulary_file(name), directory) as file:
                indices[name] = KeyIndex.of(file.read().cast(SCHEMA))
        return cls(meta=meta, indices=indices)

    def apply(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Prepare parsed rows.

        Args:
            raw: what :func:`dlrm.data.preprocess.parser.parse_block` returned.

        Returns:
            label uint8, if there is one; I1 .. I13 float32; C1 .. C26 int32.

        Raises:
            ValueError: a value has no id, as the vocabulary has none for unseen values.
        """
        names = [name for name in ("label", *CRITEO_DENSE) if name in raw.schema.names]
        columns = {name: raw[name] for name in names}
        for name in CRITEO_CATEGORICAL:
            ids = self.indices[name].look_up(self._keys(raw[name].dictionary.to_numpy()))
            if (ids < 0).any():
                raise ValueError(
                    f"{name}: a value has no id, as the data was prepared with --vocabulary all; "
                    "prepare it with --vocabulary train, and train again"
                )
            columns[name] = pa.array(ids).take(raw[name].indices)
        return pa.RecordBatch.from_pydict(columns)

    def _keys(self, keys: np.ndarray) -> np.ndarray:
        cap = self.meta.options.get("cap")
        return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))

    def read(
        self,
        inputs: Sequence[str | os.PathLike[str]],
        *,
        keep: Sequence[str] = (),
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Read and prepare the raw rows of files, in bounded memory.

        Args:
            inputs: files as ``prepare_criteo.py`` takes them; the label may be missing, in all
                rows of a file.
            keep: columns to return as they are; these rows have no others, so none.
            block_bytes: size of the blocks that text is read in.

        Yields:
            What :meth:`apply` makes of some rows, and a batch without columns.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, or a row is bad; the error names the file and the line.
        """
        if keep:
            raise ValueError(f"rows of Criteo have no column {keep[0]!r} to keep: leave it out")
        blocks = (block for path in map(Path, inputs) for block in _blocks(path, block_bytes))
        for rows in map_in_order(self._prepare, blocks, cpu_count()):
            yield rows, rows.select([])

    def _prepare(self, block: tuple[RawBlock, bool]) -> pa.RecordBatch:
        own, labelled = block
        rows, bad = parse_block(own, self.meta.options["dense_transform"])
        if bad.first:
            how = "" if labelled else " (with a label of 0 put before it)"
            raise ValueError(f"{bad.first[0]}{how}; correct the row")
        return self.apply(rows if labelled else rows.drop_columns(["label"]))


def _blocks(path: Path, block_bytes: int) -> Iterator[tuple[RawBlock, bool]]:
    """The blocks of a file, and whether its rows have a label; a label of 0 is put before others.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or empty.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; the inputs must be raw Criteo logs")
    labelled = True
    for block in RawFile(path).blocks(block_bytes=block_bytes):
        if block.problem:
            raise ValueError(f"{block.problem}; give a file that has rows")
        if block.first_line == 1:
            labelled = block.data.partition(b"\n")[0].count(b"\t") != len(COLUMNS) - 2
        if not labelled:
            lines = block.data.removesuffix(b"\n").replace(b"\n", b"\n0\t")
            block = replace(block, data=b"0\t" + lines + b"\n")
        yield block, labelled
