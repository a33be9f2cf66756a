"""Pass 2: the scaling or the vocabulary of each feature, from the training rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...utils.atomic import atomic_write
from ...utils.documents import read_json
from ..schema import HASHED, META_FILE, Categorical, Meta
from ..threads import map_in_order
from .checks import note_features
from .columns import Feature
from .keys import count_values
from .numbers import (
    FLOAT32_MAX,
    Scaling,
    Summary,
    bucket_edges,
    bucket_names,
    bucket_numbers,
    fit_scaling,
    summarise,
)
from .rates import Rates
from .spill import SpilledBlock, entries_of, progress_bar
from .splitting import Splitter
from .transform import Transform
from .vocabulary import TEXT, Vocabulary, extend_ids, make_vocabulary, texts_of
from .workspace import Workspace

CHUNK_BYTES = 1 << 28  # of the values of blocks that are merged at a time


@dataclass(frozen=True, kw_only=True)
class EarlierIds:
    """The prepared directory whose ids rows get."""

    directory: Path
    grow: bool = False
    """Whether values of the training rows that it does not list get ids too."""
    evict_after: int | None = None
    """See :func:`dlrm.data.prepare.vocabulary.extend_ids`."""

    @cached_property
    def meta(self) -> Meta:
        """The description of the directory."""
        return Meta.read(self.directory)

    @classmethod
    def given(cls, ids_of: str | Path | None, grow: bool, evict_after: int | None) -> Self | None:
        """The earlier ids that options name, of which some need others; None if all ids are new.

        Raises:
            ValueError: an option needs another one.
        """
        if grow and ids_of is None:
            raise ValueError("--append-new needs --ids-of, the data whose ids come first")
        if evict_after is not None and not grow:
            raise ValueError("--forget needs --append-new: ids become free only for new values")
        if ids_of is None:
            return None
        return cls(directory=Path(ids_of), grow=grow, evict_after=evict_after)


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Learns features from spilled rows; what is finished is in files that a restart reuses."""

    blocks: Sequence[SpilledBlock]
    splitter: Splitter
    work: Workspace
    transform: Transform
    """Gets everything that is learned, except the vocabularies of values."""
    earlier: EarlierIds | None = None
    """Whose ids are used; then numbers are known already."""

    def learn_all(self, *, progress: bool) -> tuple[Categorical, ...]:
        """Learn all features, and return the categorical columns.

        Leaves the vocabularies in the workspace and the id of each dictionary entry of each block
        in ``ids/NUMBER``, int32, one block after another.

        Raises:
            ValueError: no feature has a value in any training row, or a value has no id.
        """
        plan, every = self.transform.plan, []
        with progress_bar("learn", "features", progress) as bar:
            bar.total = len(plan.features)
            # Two features at a time, whatever the number of cores, to bound the memory.
            for learned in map_in_order(self._learn, enumerate(plan.features), 2):
                every.append(learned)
                bar.update()
        note_features(plan.features, every)
        return tuple(Categorical(**each["categorical"]) for each in every if "categorical" in each)

    def _learn(self, numbered: tuple[int, Feature]) -> dict[str, Any]:
        """Learn one feature, unless an earlier run did; what is learned is in the transform."""
        index, feature = numbered
        done = self.work / "ids" / f"{index}.json"
        if not done.exists():
            learned = self._learned(index, feature)
            with atomic_write(done) as temporary:
                temporary.write_text(json.dumps(learned))
        learned = read_json(done)

        name = feature.name
        if "scaling" in learned:
            self.transform.scalings[name] = Scaling(**learned["scaling"])
        if "newest" in learned:
            self.transform.newest[name] = learned["newest"]
        if "edges" in learned:
            self.transform.edges[name] = np.array(learned["edges"], float)
        if feature.bucketed:
            vocabulary = self.work / Meta.vocabulary_file(name)
            self.transform.vocabularies[name] = Vocabulary.read(vocabulary)
        return dict(learned)

    def _learned(self, index: int, feature: Feature) -> dict[str, object]:
        """What is learned of a feature, as plain values."""
        if feature.dense:
            known = feature.name in self.transform.scalings
            return {} if known else self._learn_number(feature)

        # Hashes need no vocabulary; an empty one keeps the files of all directories alike.
        file = Meta.vocabulary_file(feature.name)
        learned: dict[str, object] = {}
        hashed = self.transform.plan.hashed and not feature.bucketed
        if hashed:
            made = Vocabulary(values=pa.array([], TEXT), counts=np.zeros(0, np.int64), oov_id=None)
        elif not feature.bucketed:
            made, learned["empty"] = self._learn_values(index, feature)

        # Buckets, which are those of the earlier data if there is any.
        elif self.earlier is None:
            made, learned["edges"] = self._learn_buckets(feature)
            learned["empty"] = not _has_value(made.values, made.counts)
        else:
            made = Vocabulary.read(self.earlier.directory / file)

        made.write(self.work / file)
        described = Categorical(
            name=feature.name,
            cardinality=HASHED if hashed else len(made),
            multi_hot=feature.multi_hot,
            oov_id=made.oov_id,
            vocabulary=feature.column.options.vocabulary,
        )
        return learned | {"categorical": asdict(described)}

    def _learn_number(self, feature: Feature) -> dict[str, object]:
        learned: dict[str, object] = {}
        if feature.part == "age":
            newest = max(float(np.nanmax(x, initial=-np.inf)) for x in self._training(feature))
            newest = max(newest, np.finfo(np.float64).min)
            self.transform.newest[feature.name] = learned["newest"] = newest
        summary = self._summary(feature)
        transform = "log" if feature.part == "age" else feature.column.options.transform or "auto"
        scaling = fit_scaling(transform, summary)
        if 0 < scaling.limit < FLOAT32_MAX:
            learned["far"] = self._far(feature, scaling)
        learned["empty"] = summary.missing == summary.rows
        return learned | {"scaling": asdict(scaling)}

    def _far(self, feature: Feature, scaling: Scaling) -> list[float]:
        """How many numbers of all rows are limited, one of them, and what it counts as; or none."""
        count, example = 0, 0.0
        for block in self.blocks:
            values = block.column(feature.name).to_numpy()
            far = scaling.beyond(values)
            count += len(far)
            example = float(far[0]) if len(far) else example
        limit = scaling.center + np.copysign(scaling.limit * scaling.scale, example)
        return [count, example, float(limit)] if count else []

    def _learn_buckets(self, feature: Feature) -> tuple[Vocabulary, list[float]]:
        edges = bucket_edges(self._summary(feature), feature.column.options.buckets)
        counts = np.zeros(len(edges) + 2, np.int64)
        for values in self._training(feature):
            counts += np.bincount(bucket_numbers(values, edges), minlength=len(counts))
        names = pa.array(bucket_names(edges))
        order = pc.sort_indices(names)
        return make_vocabulary(names.take(order), counts[order.to_numpy()]), edges.tolist()

    def _summary(self, feature: Feature) -> Summary:
        rows = sum(int(self.splitter.training(block).sum()) for block in self.blocks)
        return summarise(self._training(feature), rows)

    def _training(self, feature: Feature) -> Iterator[NDArray[np.float64]]:
        """The numbers of the training rows, in blocks; of a time its age, once it is known."""
        for block in self.blocks:
            values = block.column(feature.name).to_numpy()
            if feature.name in self.transform.newest:
                values = np.maximum(self.transform.newest[feature.name] - values, 0)
            yield values[self.splitter.training(block)]

    def _learn_values(self, index: int, feature: Feature) -> tuple[Vocabulary, bool]:
        """Give ids to the values of a category or list, and to the entries of each block. Returns
        also whether no row that is counted has a value."""
        plan, options = self.transform.plan, feature.column.options
        min_count, most = options.min_count or 1, options.cap

        # The values of all features with this vocabulary. Nothing here keeps what a chunk has,
        # 0.3 GB, longer than it takes to add it.
        chunks = (
            (
                (block.dictionary(each) for block in blocks),
                (self._occurrences(each, block) for block in blocks),
            )
            for each in plan.same_vocabulary(feature)
            for blocks in self._chunks(each)
        )
        values, counts = count_values(chunks, pa.int64() if plan.hexadecimal else TEXT)

        # Their ids, and those of the entries of each block.
        empty = not plan.hexadecimal and not _has_value(values, counts)
        if self.earlier is None:
            oov = plan.vocabulary == "train" or min_count > 1
            made = make_vocabulary(values, counts, min_count=min_count, most=most, oov=oov)
        else:
            made = self._earlier_ids(feature, values, counts)
        del values, counts  # up to hundreds of millions of values in Terabyte

        with atomic_write(self.work / "ids" / str(index)) as path, path.open("wb") as file:
            for blocks in self._chunks(feature):
                entries = pa.concat_arrays([block.dictionary(feature) for block in blocks])
                # Not with tofile, which silently drops the last bytes if the disk is full.
                file.write(made.ids(entries, feature.name, often=False).data)
        if feature.name in plan.rated:
            made = self._with_positives(index, feature, made)
        return made, empty and self.earlier is None

    def _with_positives(self, index: int, feature: Feature, made: Vocabulary) -> Vocabulary:
        """Add the positives of each id to a vocabulary. Keep the counts before these rows, or those
        for each half of them with the other half."""
        size, parts = len(made), 1 if self.splitter.in_order else 2
        totals = np.zeros((2, parts * size), np.int64)  # rows and positives of each id
        before = np.zeros(size, np.int64)
        if self.earlier is not None:
            file = self.earlier.directory / Meta.vocabulary_file(feature.name)
            before = Rates.of(made, file).positives

        if self.learns:
            for block, ids in zip(self.blocks, self.ids_of_entries(index, feature), strict=True):
                rows = self.splitter.training(block)
                own_ids = ids[block.column(feature.name).indices.to_numpy()[rows]]
                if (halves := self.splitter.halves(block)) is not None:
                    own_ids = own_ids.astype(np.int64) + size * halves[rows]
                np.add.at(totals[0], own_ids, 1)
                labels = block.column(self.transform.plan.label).to_numpy()
                np.add.at(totals[1], own_ids, labels[rows])

        by_half = totals.reshape(2, parts, size)
        counts, positives = by_half.sum(axis=1)
        known = np.stack([made.counts - counts, before])[:, None]
        if parts == 2:
            known = known + by_half[:, ::-1]
        np.save(self.work / "ids" / f"{index}.npy", known.reshape(2, -1))
        return replace(made, positives=before + positives)

    @property
    def learns(self) -> bool:
        """Whether the training rows are counted, or those of earlier data alone."""
        return self.earlier is None or self.earlier.grow

    def ids_of_entries(self, index: int, feature: Feature) -> list[NDArray[np.int32]]:
        """The ids of the entries of the dictionary of each block, once they are learned."""
        ends = list(accumulate(block.entries[feature.name] for block in self.blocks))
        path = self.work / "ids" / str(index)
        every = np.memmap(path, np.int32, "r") if ends[-1] else np.empty(0, np.int32)
        return np.split(every, ends[:-1])

    def rates(self) -> tuple[dict[str, Rates], dict[str, Rates]]:
        """The rates of training rows, which count on, and those of all other rows."""
        training, others = {}, {}
        for index, feature in enumerate(self.transform.plan.features):
            if feature.name in self.transform.plan.rated:
                path = self.work / Meta.vocabulary_file(feature.name)
                rates = Rates.of(Vocabulary.read(path), path)
                counts, positives = np.load(self.work / "ids" / f"{index}.npy")
                others[feature.name] = rates
                training[feature.name] = replace(rates, counts=counts, positives=positives)
        return training, others

    def _earlier_ids(
        self, feature: Feature, values: pa.Array, counts: NDArray[np.int64]
    ) -> Vocabulary:
        """The vocabulary of the earlier preparation, perhaps with new values."""
        assert self.earlier is not None
        name, earlier, options = feature.name, self.earlier, feature.column.options
        made = Vocabulary.read(
            earlier.directory / Meta.vocabulary_file(name),
            hexadecimal=self.transform.plan.hexadecimal,
            data=earlier.directory,
        )
        (described,) = (c for c in earlier.meta.categorical if c.name == name)
        if len(made) != described.cardinality:
            raise ValueError(
                f"{earlier.directory / Meta.vocabulary_file(name)} can't be the vocabulary: it has "
                f"{len(made)} rows, {META_FILE} says {described.cardinality}; prepare "
                f"{earlier.directory} again"
            )

        if earlier.grow:
            made = extend_ids(
                made,
                values,
                counts,
                min_count=options.min_count or 1,
                most=options.cap,
                evict_after=earlier.evict_after,
            )

        # Earlier data that has an id for each of its values may have none for others.
        if made.oov_id is None and (unknown := made.find(values, often=False) < 0).any():
            missing = values.take(pa.array(np.flatnonzero(unknown)))
            raise ValueError(
                f"{name}: {len(missing)} values, such as {texts_of(missing[:1])[0].as_py()!r}, "
                f"have no id in {earlier.directory}, which was prepared with --vocabulary all and "
                "has no out-of-vocabulary id: prepare it with --vocabulary train"
            )
        return made

    def _occurrences(self, feature: Feature, block: SpilledBlock) -> NDArray[np.int64]:
        """How often each dictionary entry of a block occurs in the rows that are counted."""
        column = block.column(feature.name)
        entries = entries_of(column)
        every_row = self.transform.plan.vocabulary == "all"
        counted = np.ones(block.rows, bool) if every_row else self.splitter.training(block)
        if feature.multi_hot:  # all entries of a row are counted, or none
            counted = np.repeat(counted, pc.list_value_length(column).to_numpy())
        indices = entries.indices.to_numpy()[counted]
        return np.bincount(indices, minlength=len(entries.dictionary))

    def _chunks(self, feature: Feature) -> Iterator[list[SpilledBlock]]:
        """Consecutive blocks whose dictionaries have some ``CHUNK_BYTES`` together."""
        chunk: list[SpilledBlock] = []
        size = 0
        for block in self.blocks:
            chunk.append(block)
            size += block.sizes[feature.name]
            if size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _has_value(values: pa.Array, counts: NDArray[np.int64]) -> bool:
    """Whether any counted row has a value that is not missing."""
    counted = values.filter(pa.array(counts > 0))
    return counted[:2].to_pylist() not in ([], [""])
