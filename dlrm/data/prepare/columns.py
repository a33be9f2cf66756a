"""The columns of a table as they were found or given, and the features that they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import yaml

from ...utils.validation import chosen, validate
from .column_options import ColumnOptions, TableOptions
from .rates import rate_names

SPLIT = "(split)"
"""Name of what the split of a row depends on, where rows are converted but not yet prepared."""

MOST_BUCKETED, FEW_BUCKETED = 100, 32
"""Numbers of a vector that all have buckets, and those of a longer one that have: each bucket is a
table, and hundreds take long and fit noise."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table."""

    name: str
    found: str
    """The type as it was found."""
    why: str
    """Why it is of this kind: given, or what was found."""
    options: ColumnOptions
    """With a kind, and all defaults filled in."""

    @property
    def kind(self) -> str:
        """The kind, which is always known."""
        assert self.options.kind is not None
        return self.options.kind

    @property
    def zone(self) -> str | None:
        """The time zone of its type, by whose clock later times count too."""
        return self.found.partition(", tz=")[2].rstrip("]") or None

    @property
    def numeric(self) -> bool:
        """Whether its values count as numbers, whatever they are used for."""
        if self.options.format is not None:  # digits such as 20240131
            return False
        numbers = ("int", "uint", "float", "double", "halffloat", "decimal")
        return self.kind == "number" or self.found.startswith(numbers)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature: one column, or one part of it, in the result."""

    name: str
    column: Column
    part: str = ""
    """Of a time or a vector, or the bucket of a number."""

    @property
    def dense(self) -> bool:
        """Whether it is a number; all others are ids."""
        if self.column.kind == "time":
            return self.part == "age"
        numeric = self.column.kind in ("number", "vector") and not self.part.endswith("bucket")
        return numeric and self.column.options.transform != "quantile"

    @property
    def bucketed(self) -> bool:
        """Whether it is a number whose buckets are ids."""
        return self.column.kind in ("number", "vector") and not self.dense

    @property
    def multi_hot(self) -> bool:
        """Whether each row has a list of ids."""
        return self.column.kind == "list"


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """The options with every column of the table, in its order."""

    options: TableOptions
    columns: tuple[Column, ...]
    hexadecimal: bool = False
    """Whether categories are up to 8 hex digits, which are counted and looked up as integers."""
    cap: int | None = None
    """Take hex digits modulo this before they are counted."""
    vocabulary: Literal["train", "all"] = "train"
    """The rows whose values get ids. With all, there is no id for others if each value has one."""

    def __post_init__(self) -> None:
        names = [*(f.name for f in self.categorical), *self.dense_names]
        names += [c.name for c in self.columns if c.kind in ("label", "weight", "pass")]
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(
                    f"{count} columns of the result would be called {name!r}; rename the column "
                    "of that name in the table, or leave out parts of the time, rates, or buckets"
                )

        self._check_vocabularies()

    def _check_vocabularies(self) -> None:
        """Check that columns with the vocabulary of another one can have it."""
        owners = {c.name: c.options for c in self.columns if c.kind in ("category", "list")}
        for name, options in [(c.name, c.options) for c in self.columns]:
            if options.vocabulary is None:
                continue
            where = f"column {name!r} has vocabulary {options.vocabulary!r}"
            owner = owners.get(options.vocabulary)
            if name not in owners or owner is None or owner.vocabulary is not None:
                raise ValueError(
                    f"{where}: both must be a category or list, and the other one must have a "
                    "vocabulary of its own"
                )
            for option in ("min_count", "cap", "hash"):
                if getattr(options, option) != (value := getattr(owner, option)):
                    raise ValueError(f"{where}, so its {option} must be the same, {value}")

    def same_vocabulary(self, feature: Feature) -> list[Feature]:
        """All features with its vocabulary."""
        return self._vocabularies[feature.column.options.vocabulary or feature.name]

    @cached_property
    def _vocabularies(self) -> dict[str, list[Feature]]:
        """The features of each vocabulary."""
        found: dict[str, list[Feature]] = {}
        for feature in self.categorical:
            owner = feature.column.options.vocabulary or feature.name
            found.setdefault(owner, []).append(feature)
        return found

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """All features, in the order of the columns."""
        return tuple(_features(self.columns))

    @cached_property
    def dense(self) -> tuple[Feature, ...]:
        """The features that are numbers."""
        return tuple(feature for feature in self.features if feature.dense)

    @cached_property
    def categorical(self) -> tuple[Feature, ...]:
        """The features that are ids."""
        return tuple(feature for feature in self.features if not feature.dense)

    @property
    def hashed(self) -> bool:
        """Whether ids are hashes of the values."""
        return self.options.ids == "hash"

    @cached_property
    def rated(self) -> tuple[str, ...]:
        """The features that are ids and also give numbers: their counts and rates. Those with one
        vocabulary are counted together, so they have none."""
        if not self.options.rates or self.hexadecimal or self.hashed:
            return ()
        features = (f for f in self.categorical if not f.multi_hot and not f.bucketed)
        return tuple(f.name for f in features if len(self.same_vocabulary(f)) == 1)

    @cached_property
    def dense_names(self) -> tuple[str, ...]:
        """The numbers of a prepared row."""
        plain = [feature.name for feature in self.dense]
        return (*plain, *(name for feature in self.rated for name in rate_names(feature)))

    @cached_property
    def found_numbers(self) -> tuple[str, ...]:
        """Those of columns of which the options do not say what they are."""
        return tuple(f.name for f in self.dense if not f.column.why.startswith("given"))

    def with_numbers(self, names: Collection[str]) -> ColumnPlan:
        """The plan without the numbers that were found and left out: later rows need not have
        them."""
        silent = {*self.found_numbers} - {*names}
        kept = (
            replace(column, options=ColumnOptions(kind="drop"))
            if column.kind == "number" and column.name in silent and not column.options.bucketed
            else column
            for column in self.columns
        )
        return replace(self, columns=tuple(kept))

    @cached_property
    def label(self) -> str:
        """The column of the label, which every table to learn from has."""
        (name,) = (column.name for column in self.columns if column.kind == "label")
        return name

    @cached_property
    def weight(self) -> str | None:
        """The column of sample weights, if there is one."""
        return next((column.name for column in self.columns if column.kind == "weight"), None)

    @cached_property
    def needed(self) -> tuple[Column, ...]:
        """The columns that are read."""
        split = self.options.split.column
        return tuple(c for c in self.columns if c.kind != "drop" or c.name == split)

    def as_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the same plan."""
        columns = [{**vars(column), "options": vars(column.options)} for column in self.columns]
        return {"options": asdict(self.options), "columns": columns}

    def as_yaml(self) -> str:
        """The options with every column, for ``--config``: the same table is prepared the same."""
        content = chosen(replace(self.options, columns={}))
        options = {column.name: chosen(column.options) for column in self.columns}
        content["columns"] = {
            name: each["kind"] if len(each) == 1 else each for name, each in options.items()
        }
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ColumnPlan:
        """A plan from what :meth:`as_json` returned.

        Raises:
            ValueError: the content is something else.
        """
        return validate(cls, dict(content))


def _features(columns: Sequence[Column]) -> Iterator[Feature]:
    for column in columns:
        if column.kind in ("number", "category", "list"):
            yield Feature(name=column.name, column=column)
            if column.options.bucketed and column.options.transform != "quantile":
                yield Feature(name=f"{column.name}_bucket", column=column, part="bucket")
        elif column.kind == "vector":
            parts = [str(place) for place in range(column.options.size or 0)]
            if column.options.bucketed:
                few = parts if len(parts) <= MOST_BUCKETED else parts[:FEW_BUCKETED]
                parts += [f"{part}_bucket" for part in few]
            for part in parts:
                yield Feature(name=f"{column.name}_{part}", column=column, part=part)
        elif column.kind == "time":
            for part in column.options.parts or ():
                yield Feature(name=f"{column.name}_{part}", column=column, part=part)
