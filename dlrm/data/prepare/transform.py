"""What a preparation learned of a table, to apply it to other rows.

A :class:`TableTransform` lies in ``transform.json`` and ``vocabulary/`` of a prepared directory.
Whoever has a copy of these can turn raw rows into what a model takes: the preparation itself, and
programs that score new rows, which need no label.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm.data.prepare.bad_rows import Converted, convert_good_rows
from dlrm.data.prepare.columns import ColumnPlan, Feature
from dlrm.data.prepare.convert import convert_rows, map_parts
from dlrm.data.prepare.files import Part, RawFile, find_files, no_header_hint, open_table
from dlrm.data.prepare.infer import json_types, read_types
from dlrm.data.prepare.numbers import Scaling, bucket_names, bucket_numbers
from dlrm.data.prepare.text_blocks import BLOCK_BYTES
from dlrm.data.prepare.vocabulary import TextVocabulary
from dlrm.data.schema import Categorical, Meta
from dlrm.utils.atomic import atomic_write
from dlrm.utils.cpus import cpu_count
from dlrm.utils.documents import read_json
from dlrm.utils.messages import did_you_mean

TRANSFORM_FILE = "transform.json"
VERSION = 1


@dataclass(kw_only=True)
class TableTransform:
    """Raw rows of a table to the columns of a prepared directory.

    Example::

        transform = TableTransform.load("data/mine")
        for prepared, keys in transform.read(["new.csv"], keep=["id"]):
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
    vocabularies: dict[str, TextVocabulary] = field(default_factory=dict)
    """Of each categorical feature."""

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
            dense features float32; categorical ones int32, or lists of int32; passed columns as
            they are.

        Raises:
            ValueError: a value does not fit the kind of its column, or a column is missing.
        """
        prepared = self.encode(convert_rows(self.plan, raw, required=False))
        label = self.plan.only("label")
        if label is None or label.name not in prepared.schema.names:
            return prepared
        nullable = pa.field(label.name, pa.uint8())
        at = prepared.schema.get_field_index(label.name)
        return prepared.set_column(at, nullable, prepared[label.name])

    def encode(
        self, rows: pa.RecordBatch, ids: Mapping[str, NDArray[np.int32]] | None = None
    ) -> pa.RecordBatch:
        """Prepare what :func:`dlrm.data.prepare.convert.convert_rows` returned.

        Args:
            rows: the converted rows.
            ids: for categories and lists, the ids of the entries of the dictionary, if they have
                been looked up already.
        """
        columns: dict[str, pa.Array] = {}
        for column in self.plan.columns:
            if column.kind == "label" and column.name in rows.schema.names:
                columns[column.name] = rows[column.name]
            elif column.kind == "weight" and column.name in rows.schema.names:
                weights = rows[column.name].to_numpy() / np.float32(self.mean_weight)
                columns[column.name] = pa.array(weights)
        for feature in self.plan.dense:
            columns[feature.name] = pa.array(self._scaled(feature, rows))
        for feature in self.plan.categorical:
            columns[feature.name] = self._ids(feature, rows, ids)
        for column in self.plan.columns:
            if column.kind == "pass" and column.name in rows.schema.names:
                columns[column.name] = rows[column.name]
        fields = [  # what is prepared has no null: it is read 1.4 times as fast
            pa.field(name, values.type, nullable=name in self.passed)
            for name, values in columns.items()
        ]
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))

    def _scaled(self, feature: Feature, rows: pa.RecordBatch) -> NDArray[np.float32]:
        return self.scalings[feature.name].apply(self.numbers(feature, rows))

    def numbers(self, feature: Feature, rows: pa.RecordBatch) -> NDArray[np.float64]:
        """The numbers of a dense or bucketed feature before they are transformed."""
        values = rows[feature.name].to_numpy()
        if feature.part != "age":
            return values
        return np.maximum(self.newest[feature.name] - values, 0)  # of later rows: no age

    def _ids(
        self,
        feature: Feature,
        rows: pa.RecordBatch,
        ids: Mapping[str, NDArray[np.int32]] | None,
    ) -> pa.Array:
        column, name = rows[feature.name], feature.name
        if feature.bucketed:
            edges = self.edges[name]
            of_bucket = self.vocabularies[name].ids(pa.array(bucket_names(edges)))
            return pa.array(of_bucket[bucket_numbers(column.to_numpy(), edges)])
        entries = column.flatten() if feature.multi_hot else column
        known = None if ids is None else ids.get(name)
        of_entry = self.vocabularies[name].ids(entries.dictionary) if known is None else known
        found = pa.array(of_entry).take(entries.indices)
        if not feature.multi_hot:
            return found
        lengths = pc.list_value_length(column).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        kind = pa.list_(pa.field("element", found.type, nullable=False))
        return pa.ListArray.from_arrays(pa.array(offsets), found, type=kind)

    @property
    def categorical(self) -> tuple[Categorical, ...]:
        """The categorical columns, as ``meta.json`` has them."""
        return tuple(
            Categorical(
                name=feature.name,
                cardinality=len(self.vocabularies[feature.name]),
                multi_hot=feature.multi_hot,
                oov_id=self.vocabularies[feature.name].oov_id,
            )
            for feature in self.plan.categorical
        )

    def _open(self, paths: Sequence[Path]) -> list[RawFile]:
        """The files; where names are given, their rows may be without a label."""
        options = self.plan.options
        try:
            return open_table(paths, options)
        except ValueError:
            label = self.plan.only("label")
            if options.names is None or label is None:
                raise
            bare = tuple(name for name in options.names if name != label.name)
            with suppress(ValueError):  # the first error is the one to report
                return open_table(paths, replace(options, names=bare))
            raise

    def find_files(self, inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """As :func:`dlrm.data.prepare.files.find_files`."""
        return find_files(inputs)

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
            inputs: files, directories or patterns of CSV, JSON lines or Parquet. They need all
                columns that features are made of; the label and others may be missing.
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
        files = self._open(find_files(inputs))
        types = dict(read_types(self.plan, files, keep, skip_bad=skip_bad))
        if files[0].format == "json":  # a row need not name what it has no value for
            there = {*json_types(files[0], skip_bad=skip_bad), *self.needed, *keep}
            types = {name: kind for name, kind in types.items() if name in there}
        else:
            names = files[0].names
            for name in types:
                if name not in names and (name in self.needed or name in keep):
                    raise ValueError(
                        f"{files[0].path} has no column {name!r}{did_you_mean(name, names)}"
                        f"{no_header_hint(files[0])}"
                    )
            types = {name: kind for name, kind in types.items() if name in names}

        def convert(raw: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
            return self.apply(raw), raw.select(list(keep))

        def prepare(
            _: int, part: Part
        ) -> tuple[Converted[tuple[pa.RecordBatch, pa.RecordBatch]], int]:
            if skip_bad:
                found = convert_good_rows(part, types, convert)
            else:
                raw = part.parse(types)
                found = Converted(convert(raw), np.arange(raw.num_rows))
            return found, len(found.good) + len(found.bad)

        parts = (part for file in files for part in file.parts(block_bytes))
        done = 0
        for _, found, rows in map_parts(parts, prepare, cpu_count()):
            yield *found.result, found.good + done + 1
            done += rows

    def _learned(self) -> dict[str, Any]:
        """What was learned besides the vocabularies, as plain values."""
        # In the order of the features: they were learned by threads, in any order.
        names = [feature.name for feature in self.plan.features]
        return {
            "scalings": {n: asdict(self.scalings[n]) for n in names if n in self.scalings},
            "newest": {n: self.newest[n] for n in names if n in self.newest},
            "edges": {n: self.edges[n].tolist() for n in names if n in self.edges},
        }

    def rules(self) -> dict[str, Any]:
        """All that the features of a row depend on besides the vocabularies, as plain values."""
        columns = {feature.column.name: feature.column for feature in self.plan.features}
        own = {name: asdict(column.options) for name, column in columns.items()}
        return {"columns": own, "missing": self.plan.options.missing, **self._learned()}

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
    def load(cls, directory: str | os.PathLike[str]) -> TableTransform:
        """Read what lies in ``directory``: a prepared one, or a copy of its transform.

        Raises:
            FileNotFoundError: there is no transform.
            ValueError: a file is damaged.
        """
        path = Path(directory) / TRANSFORM_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: {directory} was not made by scripts/prepare_table.py"
            )
        try:
            content: dict[str, Any] = read_json(path)
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']!r}, this program reads {VERSION}")
            made = cls(
                plan=ColumnPlan.from_json(content),
                scalings={name: Scaling(**own) for name, own in content["scalings"].items()},
                newest=dict(content["newest"]),
                mean_weight=float(content["mean_weight"]),
                edges={name: np.array(own, float) for name, own in content["edges"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a transform ({error!r}); prepare the data again"
            ) from None
        for feature in made.plan.categorical:
            file = Path(directory) / Meta.vocabulary_file(feature.name)
            made.vocabularies[feature.name] = TextVocabulary.read(file)
        return made
