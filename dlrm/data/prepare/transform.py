"""A transform of raw rows, as a preparation learned it from the training rows.

A :class:`Transform` is stored with a prepared directory, in ``transform.json`` and ``vocabulary/``.
With a copy of these, raw rows become what a model takes: in the preparation itself, and in programs
that score new rows, which need no label. For rows of Criteo, only the vocabularies are learned; the
rest follows from the options in ``meta.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...utils.atomic import atomic_write
from ...utils.cpus import cpu_count
from ...utils.documents import read_json
from ...utils.messages import did_you_mean
from ..schema import CRITEO_CATEGORICAL, META_FILE, Meta
from .bad_rows import Converted
from .columns import ColumnPlan, Feature
from .convert import convert_rows
from .criteo_rows import criteo_plan, open_log
from .csv_layout import no_header_hint
from .files import RawFile, open_files, require_one_table, without_empty
from .infer import json_types, read_types
from .input_paths import find_files
from .keys import hashed_ids
from .numbers import Scaling, bucket_names, bucket_numbers
from .rates import Rates, append_rates
from .table_rows import FilePart, TableRows, map_parts
from .text_blocks import BLOCK_BYTES
from .vocabulary import Vocabulary
from .workspace import TRANSFORM_FILE

VERSION = 1
PreparedRows = tuple[pa.RecordBatch, pa.RecordBatch]
"""Prepared rows, and columns of theirs that are kept as they were."""


@dataclass(kw_only=True)
class Transform:
    """Raw rows to the columns of a prepared directory.

    Example::

        transform = Transform.load("data/mine")
        for prepared, keys, _ in transform.read(["new.csv"], keep=["id"]):
            ...  # prepared: the features, and the label if the file has one

    The order of the features is that of ``meta.json``: first all dense ones, then the categorical
    ones. A value that the training rows did not have gets the id of unseen values.
    """

    plan: ColumnPlan
    scalings: dict[str, Scaling] = field(default_factory=dict)
    """Of each dense feature."""
    newest: dict[str, float] = field(default_factory=dict)
    """For each age, the last day of the training rows, in days since 1970."""
    edges: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Of each number in buckets."""
    mean_weight: float = 1.0
    """Of the training rows; weights are divided by it, so that they don't change the step size."""
    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    """Of each categorical feature."""
    rates: dict[str, Rates] = field(default_factory=dict)
    """Of each feature that has rates, if the vocabularies were loaded."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns of the table that features are made of."""
        return tuple(dict.fromkeys(feature.column.name for feature in self.plan.features))

    @property
    def passed(self) -> tuple[str, ...]:
        """The columns that are passed through."""
        return tuple(column.name for column in self.plan.columns if column.kind == "pass")

    def apply(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Prepare raw rows.

        Args:
            raw: the columns of the table, of any type that fits their kinds. The label, the
                weight and passed columns may be missing.

        Returns:
            The columns that are there: label uint8, null where it is missing; weight float32;
            dense features float32; categorical ones int32, or int64 if they are hashed, or lists of
            these; passed columns as they are.

        Raises:
            ValueError: a value does not fit the kind of its column, or a column is missing.
        """
        return self.encode(convert_rows(self.plan, raw, required=False), scored=True)

    def encode(
        self,
        rows: pa.RecordBatch,
        ids: Mapping[str, NDArray[np.int32]] = MappingProxyType({}),
        *,
        scored: bool = False,
    ) -> pa.RecordBatch:
        """Prepare converted rows.

        Args:
            rows: what :func:`dlrm.data.prepare.convert.convert_rows` returned. Numbers in
                float32 are scaled already.
            ids: for categories and lists, the ids of the entries of the dictionary, if they
                have been looked up already.
            scored: whether the rows are to be scored, so that their label may be missing.
        """
        columns: dict[str, pa.Array] = {}
        there = set(rows.schema.names)
        for column in self.plan.columns:
            if column.kind == "label" and column.name in there:
                columns[column.name] = rows[column.name]
            elif column.kind == "weight" and column.name in there:
                weights = rows[column.name].to_numpy() / np.float32(self.mean_weight)
                columns[column.name] = pa.array(weights)

        # All numbers come before all ids, as in meta.json.
        for feature in self.plan.dense:
            numbers = rows[feature.name]
            if numbers.type != pa.float32():
                values = numbers.to_numpy()
                if feature.part == "age":  # 0 if later than the training rows
                    values = np.maximum(self.newest[feature.name] - values, 0)
                numbers = pa.array(self.scalings[feature.name].apply(values))
            columns[feature.name] = numbers
        for feature in self.plan.categorical:
            columns[feature.name] = self._ids(feature, rows, ids)

        # What is prepared has no null: it is read 1.4 times as fast.
        gaps = {self.plan.label} if scored and not self.plan.hexadecimal else ()
        passed = {name: rows[name] for name in self.passed if name in there}
        fields = [pa.field(n, array.type, nullable=n in gaps) for n, array in columns.items()]
        fields += [pa.field(n, array.type) for n, array in passed.items()]
        columns |= passed
        made = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
        return append_rates(made, self.rates)

    def _ids(
        self,
        feature: Feature,
        rows: pa.RecordBatch,
        ids: Mapping[str, NDArray[np.int32]],
    ) -> pa.Array:
        column, name = rows[feature.name], feature.name
        if feature.bucketed:
            edges = self.edges[name]
            of_bucket = self.vocabularies[name].ids(pa.array(bucket_names(edges)), name)
            return pa.array(of_bucket[bucket_numbers(column.to_numpy(), edges)])

        entries = column.flatten() if feature.multi_hot else column
        of_entry: NDArray[np.int32 | np.int64] | None = ids.get(name)
        if of_entry is None and self.plan.hashed:
            of_entry = hashed_ids(entries.dictionary)
        elif of_entry is None:
            of_entry = self.vocabularies[name].ids(entries.dictionary, name)
        found = pa.array(of_entry).take(entries.indices)
        if not feature.multi_hot:
            return found
        lengths = pc.list_value_length(column).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        kind = pa.list_(pa.field("element", found.type, nullable=False))
        return pa.ListArray.from_arrays(pa.array(offsets), found, type=kind)

    def read(
        self,
        inputs: Sequence[str | os.PathLike[str]],
        *,
        keep: Sequence[str] = (),
        skip_bad: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, NDArray[np.int64]]]:
        """Read and prepare the raw rows of files, in bounded memory.

        Args:
            inputs: files, directories or patterns of CSV, JSON lines or Parquet, or logs of Criteo.
                They need all columns that features are made of; the label and others may be
                missing.
            keep: columns to return as they are, such as keys of the rows.
            skip_bad: leave out rows that do not fit, as ``--bad-rows skip`` does. They count in
                the numbers of rows.
            block_bytes: size of the blocks that text is read in.

        Yields:
            What :meth:`apply` makes of some rows, their columns ``keep``, and the number of each
            row in all inputs, from 1.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, a column is missing, or a value does not fit; the error
                names the file, the row and the column.
        """
        source = self._source(find_files(inputs), keep, skip_bad)

        def prepare(_: int, part: FilePart) -> tuple[Converted[PreparedRows], int]:
            converted = source.convert(part, skip_bad=skip_bad)
            rows, kept = converted.result
            prepared = self.encode(rows, scored=True), kept
            return replace(converted, result=prepared), converted.count

        done = 0
        parts = map_parts(source, prepare, block_bytes=block_bytes, workers=cpu_count())
        for _, found, _ in parts:
            yield *found.result, found.good + done + 1
            done += found.count

    def _source(self, paths: Sequence[Path], keep: Sequence[str], skip_bad: bool) -> TableRows:
        """The rows of files that are to be scored: columns that no feature is made of may be
        missing."""
        plan, files = self.plan, self._open(paths)
        types = dict(read_types(plan, files, keep, skip_bad=skip_bad))
        if files[0].format == "json":  # a row need not name what it has no value for
            there = {*json_types(files[0], skip_bad=skip_bad), *self.needed, *keep}
        else:
            there, wanted = {*files[0].names}, {*self.needed, *keep}
            for name in types:
                if name not in there and name in wanted:
                    hint = did_you_mean(name, files[0].names, "its columns")
                    hint += no_header_hint(files[0].layout)
                    raise ValueError(f"{files[0].path} has no column {name!r}{hint}")
        types = {name: kind for name, kind in types.items() if name in there}
        return TableRows(files=files, plan=plan, types=types, keep=keep, required=False)

    def _open(self, paths: Sequence[Path]) -> list[RawFile]:
        """The files; where names are given, their rows may be without a label."""
        if self.plan.hexadecimal:
            logs = [open_log(path, scored=True) for path in without_empty(paths)]
            require_one_table(logs)
            return logs
        return open_files(paths, self.plan.options, optional=self.plan.label)

    def _learned(self) -> dict[str, Any]:
        """Everything learned besides the vocabularies, as plain values."""
        # In the order of the features: they were learned by threads, in any order.
        names = [feature.name for feature in self.plan.features]
        return {
            "scalings": {n: self.scalings[n].as_json() for n in names if n in self.scalings},
            "newest": {n: self.newest[n] for n in names if n in self.newest},
            "edges": {n: self.edges[n].tolist() for n in names if n in self.edges},
        }

    def rules(self) -> dict[str, Any]:
        """All that the features of a row depend on besides the vocabularies, as plain values."""
        if self.plan.hexadecimal:
            transform = "log3" if self.plan.options.transform == "log3" else "log1p"
            return {"dense_transform": transform, "cap": self.plan.cap}
        columns = {feature.column.name: feature.column for feature in self.plan.features}
        by_column = {name: dict(vars(column.options)) for name, column in columns.items()}
        for options in by_column.values():
            if options["vocabulary"] is None:  # as before there was such an option
                del options["vocabulary"]
        return {"columns": by_column, "missing": self.plan.options.missing, **self._learned()}

    def save(self, directory: Path) -> None:
        """Write ``transform.json``; the vocabularies are written when they are made."""
        content = {
            "version": VERSION,
            **self.plan.as_json(),
            **self._learned(),
            "mean_weight": self.mean_weight,
        }
        with atomic_write(directory / TRANSFORM_FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, vocabularies: bool = True) -> Transform:
        """Read what a prepared directory has, or a copy of its :func:`transform_files`.

        Args:
            directory: the directory.
            vocabularies: read these too, so that rows can be prepared.

        Raises:
            FileNotFoundError: there is no ``transform.json`` or ``meta.json``.
            ValueError: the directory was not made from raw rows, or a file is damaged.
        """
        path = Path(directory) / TRANSFORM_FILE
        if path.is_file():
            made = cls._from_json(path)
        else:
            meta = Meta.read(directory)
            if "dense_transform" not in meta.options or meta.tables != CRITEO_CATEGORICAL:
                raise ValueError(
                    f"{Path(directory) / META_FILE} was not made from raw rows by dlrm prepare: "
                    "only prepared rows can be scored"
                )
            made = cls.of_criteo(criteo_plan(meta.options))
        for feature in made.plan.categorical if vocabularies else ():
            file = Path(directory) / Meta.vocabulary_file(feature.name)
            made.vocabularies[feature.name] = Vocabulary.read(
                file, hexadecimal=made.plan.hexadecimal, data=directory
            )
            if feature.name in made.plan.rated:
                made.rates[feature.name] = Rates.of(made.vocabularies[feature.name], file)
        return made

    @classmethod
    def _from_json(cls, path: Path) -> Transform:
        try:
            content: dict[str, Any] = read_json(path)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r}, this program reads {VERSION}")
            return cls(
                plan=ColumnPlan.from_json(content),
                scalings={name: Scaling(**values) for name, values in content["scalings"].items()},
                newest=dict(content["newest"]),
                mean_weight=float(content["mean_weight"]),
                edges={name: np.array(values, float) for name, values in content["edges"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a transform ({error!r}); prepare the data again"
            ) from None

    @classmethod
    def of_criteo(cls, plan: ColumnPlan) -> Transform:
        """The transform of rows of Criteo, of which nothing is to be learned but vocabularies."""
        scaling = Scaling(transform=plan.options.transform)
        return cls(plan=plan, scalings={feature.name: scaling for feature in plan.dense})


def transform_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files of a prepared directory, relative to it, that :meth:`Transform.load` needs, and
    errors as there.

    Raises:
        FileNotFoundError: the directory has no ``meta.json``.
        ValueError: the data was not made from raw rows.
    """
    files = [Path(META_FILE)]
    if (Path(directory) / TRANSFORM_FILE).is_file():
        files.append(Path(TRANSFORM_FILE))
    plan = Transform.load(directory, vocabularies=False).plan
    return files + [Path(Meta.vocabulary_file(feature.name)) for feature in plan.categorical]
