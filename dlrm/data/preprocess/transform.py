"""Raw Criteo rows to the columns of a prepared directory, for scoring: labels are not needed.

This is the counterpart of :class:`dlrm.data.prepare.transform.TableTransform`, with the same
``load`` and ``read``; :func:`dlrm.data.prepare.raw_rows.load_transform` picks the one that a
directory has. What it needs lies in ``meta.json`` and ``vocabulary/``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm.data.prepare.criteo_rows import COLUMNS, MISSING, dense, hex_keys, parse_block
from dlrm.data.prepare.text_blocks import BLOCK_BYTES, BlockReader, TextBlock
from dlrm.data.prepare.values import BadValue, decoded, is_text, numbers, shown
from dlrm.data.preprocess.vocabulary import SCHEMA, KeyIndex, open_vocabulary, read_known
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
                indices[name] = KeyIndex.of(read_known(file, SCHEMA))
        return cls(meta=meta, indices=indices)

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that features are made of."""
        return (*CRITEO_DENSE, *CRITEO_CATEGORICAL)

    @property
    def passed(self) -> tuple[str, ...]:
        """The columns that are passed through: none."""
        return ()

    def apply(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Prepare raw rows that are columns already.

        Args:
            raw: I1 .. I13, numbers or texts, and C1 .. C26, texts of hex digits. Other columns are
                left out.

        Returns:
            I1 .. I13 float32; C1 .. C26 int32.

        Raises:
            ValueError: a value does not fit, or has no id, as the vocabulary has none for unseen
                values.
        """
        columns: dict[str, pa.Array] = {}
        for name in CRITEO_DENSE:
            found = numbers(raw[name], name)
            filled = pa.array(np.nan_to_num(found, nan=0.0))
            columns[name] = dense(filled, self.meta.options["dense_transform"])
        for name in CRITEO_CATEGORICAL:
            columns[name] = _hex_column(raw[name], name)
        return self.encode(pa.RecordBatch.from_pydict(columns))

    def encode(self, parsed: pa.RecordBatch) -> pa.RecordBatch:
        """Prepare parsed rows.

        Args:
            parsed: what :func:`dlrm.data.prepare.criteo_rows.parse_block` returned.

        Returns:
            label uint8, if there is one; I1 .. I13 float32; C1 .. C26 int32.

        Raises:
            ValueError: a value has no id, as the vocabulary has none for unseen values.
        """
        names = [name for name in ("label", *CRITEO_DENSE) if name in parsed.schema.names]
        columns = {name: parsed[name] for name in names}
        for name in CRITEO_CATEGORICAL:
            ids = self.indices[name].look_up(self._keys(parsed[name].dictionary.to_numpy()))
            if (ids < 0).any():
                raise ValueError(
                    f"{name}: a value has no id, as the data was prepared with --vocabulary all; "
                    "prepare it with --vocabulary train, and train again"
                )
            columns[name] = pa.array(ids).take(parsed[name].indices)
        fields = [pa.field(name, values.type, nullable=False) for name, values in columns.items()]
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))

    def _keys(self, keys: np.ndarray) -> np.ndarray:
        cap = self.meta.options.get("cap")
        return keys if cap is None else np.where(keys == MISSING, MISSING, keys % min(cap, 2**32))

    def find_files(self, inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """The files that files and patterns name, in order; each pattern sorted.

        Raises:
            FileNotFoundError: there is no such file.
        """
        found: list[Path] = []
        for given in inputs:
            matches = [Path(given)] if Path(given).is_file() else []
            matches = matches or [p for p in map(Path, sorted(glob(str(given)))) if p.is_file()]
            if not matches:
                raise FileNotFoundError(f"{given} is not a file; give raw rows of Criteo as text")
            found += matches
        return found

    def read(
        self,
        inputs: Sequence[str | os.PathLike[str]],
        *,
        keep: Sequence[str] = (),
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, NDArray[np.int64]]]:
        """As :meth:`dlrm.data.prepare.transform.TableTransform.read`, for logs of Criteo.

        Args:
            inputs: files as ``prepare_criteo.py`` takes them, or patterns; the label may be
                missing, in all rows of a file.
            keep: refused, as these rows have no other columns.
            skip_bad: leave out rows that do not parse, as ``--bad-rows skip`` does. They count in
                the numbers of the rows.
            block_bytes: size of the blocks that text is read in.
        """
        if keep:
            raise ValueError(f"rows of Criteo have no column {keep[0]!r} to keep: leave it out")
        files = self.find_files(inputs)
        blocks = (block for path in files for block in _blocks(path, block_bytes))
        done, prepare = 0, partial(self._prepare, skip_bad=skip_bad)
        for rows, positions, lines in map_in_order(prepare, blocks, cpu_count()):
            yield rows, rows.select([]), done + 1 + positions
            done += lines

    def _prepare(
        self, block: tuple[TextBlock, bool], *, skip_bad: bool
    ) -> tuple[pa.RecordBatch, NDArray[np.int64], int]:
        """The rows of a block, where they are in it, and how many lines it has."""
        own, labelled = block
        rows, bad = parse_block(own, self.meta.options["dense_transform"])
        positions = np.arange(own.lines)
        if bad.first:
            if not skip_bad:
                how = "" if labelled else " (with a label of 0 put before it)"
                raise ValueError(f"{bad.first[0]}{how}; correct the row")
            positions = np.array(bad.good_lines, np.int64)
        found = self.encode(rows if labelled else rows.drop_columns(["label"]))
        return found, positions, own.lines


def _hex_column(array: pa.Array, name: str) -> pa.DictionaryArray:
    """A column of texts as its keys.

    Raises:
        BadValue: a value is not hexadecimal.
    """
    array = decoded(array)
    if not is_text(array.type) and array.type != pa.null():
        raise BadValue(
            name, None, f"it holds {array.type}, not texts of hex digits; read it as text"
        )
    texts = array.cast(pa.string()).fill_null("").dictionary_encode()
    try:
        keys = hex_keys(texts.dictionary.cast(pa.binary()))
    except ValueError:
        good = pc.match_substring_regex(texts.dictionary, "^[0-9a-fA-F]{0,8}$")
        row = pc.index(good.take(texts.indices), False).as_py()
        value = shown(array[row].as_py())
        raise BadValue(name, row, f"{value} is not 1 to 8 hex digits; correct it") from None
    return pa.DictionaryArray.from_arrays(texts.indices, pa.array(keys))


def _blocks(path: Path, block_bytes: int) -> Iterator[tuple[TextBlock, bool]]:
    """The blocks of a file, and whether its rows have a label; a label of 0 is put before others.

    Raises:
        ValueError: it is damaged or empty.
    """
    labelled = True
    for block in BlockReader(path).blocks(block_bytes=block_bytes):
        if block.problem:
            raise ValueError(f"{block.problem}; give a file that has rows")
        if block.first_line == 1:
            labelled = block.data.partition(b"\n")[0].count(b"\t") != len(COLUMNS) - 2
        if not labelled:
            lines = block.data.removesuffix(b"\n").replace(b"\n", b"\n0\t")
            block = replace(block, data=b"0\t" + lines + b"\n")
        yield block, labelled
