"""Raw rows to a prepared directory: Parquet per split, vocabularies, transforms, ``meta.json``.

There are three passes, so that memory depends on the number of distinct values, not of rows:

1. read (:mod:`dlrm.data.prepare.spill`): parts of the files are converted and spilled to
   ``OUTPUT/.prepare/blocks``; a category is dictionary-encoded, with the distinct values of its
   block;
2. learn (:mod:`dlrm.data.prepare.learner`): feature by feature, the values of the training rows
   make a vocabulary or a scaling;
3. write (:mod:`dlrm.data.prepare.split_writer`): block by block, the rows are transformed and
   written to the splits.

A spilled block or what was learned of a feature gets its name only when it is complete, so that a
restart can reuse it. Results are made in ``OUTPUT/.prepare`` and moved to ``OUTPUT`` at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ...utils.atomic import atomic_write
from ...utils.cpus import cpu_count
from ..evidence import with_effects
from ..schema import META_FILE, Categorical, Meta
from .bad_rows import BadRowsRule
from .checks import (
    ClassCounts,
    count_classes,
    note_left_out,
    note_weights,
    require_both_classes,
    require_rows,
)
from .fingerprint import fingerprint
from .learner import EarlierIds, Learner
from .spill import spill_rows
from .split_writer import write_splits
from .splitting import make_splitter
from .table_rows import TableRows
from .text_blocks import BLOCK_BYTES
from .transform import Transform
from .vocabulary import read_vocabulary
from .workspace import BAD_ROWS_FILE, OPTIONS_FILE, TRANSFORM_FILE, Workspace

FORMAT = 4  # of the spilled blocks; increment it when a restart cannot reuse older ones


class RunOptions(TypedDict, total=False):
    """How a preparation works, which changes none of its results."""

    overwrite: bool
    """Replace what was prepared there from other inputs or with other options (default: no)."""
    workers: int | None
    """Threads; by default one per core that the process may use."""
    block_bytes: int
    """Size of the blocks of text that are converted and spilled (default: 16 MB)."""
    progress: bool
    """Show progress bars on standard error (default: yes)."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is prepared, and how."""

    source: TableRows
    transform: Transform
    """With the plan; what the rows have to tell is learned, unless there are earlier ids."""
    options: Mapping[str, Any]
    """As ``meta.json`` has them."""
    earlier: EarlierIds | None = None
    bad_rows: BadRowsRule = "stop"
    """``skip``: leave out rows that do not fit, at most half of all. ``skip-all``: any number."""

    def run(
        self,
        output: str | os.PathLike[str],
        **options: Unpack[RunOptions],
    ) -> Meta:
        """Prepare the rows, and return the contents of ``meta.json``.

        If it is killed and called again with the same arguments, it continues, and the results have
        the same bytes. No result gets its final name before the end.

        Raises:
            ValueError: a row or value doesn't fit, there are no rows to train on, ``output``
                holds other data, or another process is preparing it.
        """
        if self.earlier is not None:
            _require_usable(self.earlier, Path(output))
        key = {
            "format": [FORMAT, options.get("block_bytes", BLOCK_BYTES)],
            "options": {**self.options, "bad_rows": None},  # does not change what is spilled
            "ids_of": self.earlier and _state_of(self.earlier.directory),
        }
        inputs = self.source.paths
        overwrite = options.get("overwrite", False)
        with Workspace(Path(output), key, inputs=inputs, overwrite=overwrite) as work:
            if not work.finished:
                self._make(work, options)
            work.publish()
        return Meta.read(output)

    def _make(self, work: Workspace, options: RunOptions) -> None:
        """Make all results in the workspace."""
        workers, progress = options.get("workers"), options.get("progress", True)
        workers = workers or cpu_count()
        spilled = spill_rows(
            self.source,
            work,
            skip_bad=self.bad_rows != "stop",
            block_bytes=options.get("block_bytes", BLOCK_BYTES),
            workers=workers,
            progress=progress,
        )
        learns = self.earlier is None or self.earlier.grow
        require_rows(spilled, self.bad_rows, self.source.paths[0], learns=learns)

        # The rows of each split.
        plan, splitter = self.transform.plan, make_splitter(self.transform.plan, spilled)
        counts = count_classes(spilled, splitter, plan.label, plan.weight)
        if learns and plan.vocabulary == "train" and not counts["train"].rows.any():
            remedy = "leave --append-new out or " if self.earlier is not None else ""
            raise ValueError(
                f"no rows to learn from: {spilled.rows:,} rows were read and the split leaves none "
                f"for training; {remedy}choose another split"
            )
        require_both_classes(counts, plan, earlier=self.earlier is not None)
        note_weights(counts["train"])
        if plan.weight is not None and self.earlier is None:
            self.transform.mean_weight = counts["train"].mean_weight

        # What was learned, and the rows prepared by it.
        learner = Learner(
            blocks=spilled.blocks,
            splitter=splitter,
            work=work,
            transform=self.transform,
            earlier=self.earlier,
        )
        categorical = learner.learn_all(progress=progress)
        categorical = write_splits(learner, categorical, workers=workers, progress=progress)

        # All other results; meta.json is the last one.
        with atomic_write(work / BAD_ROWS_FILE) as temporary:
            temporary.write_text(json.dumps(spilled.bad.as_json(), indent=2) + "\n")
        meta = self._describe(work.directory, counts, categorical)
        if not plan.hexadecimal:  # all about Criteo's columns is known from the options
            self.transform.save(work.directory)
            with atomic_write(work / OPTIONS_FILE) as temporary:
                temporary.write_text(self.transform.plan.as_yaml())
        meta.write(work.directory)

    def _describe(
        self, directory: Path, counts: Mapping[str, ClassCounts], categorical: Sequence[Categorical]
    ) -> Meta:
        """The contents of ``meta.json``. Numbers that are left out are dropped from the plan."""
        plan = self.transform.plan
        meta = Meta(
            label=plan.label,
            weight=plan.weight,
            weight_ratio=counts["train"].weight_ratio,
            # Later rows have the numbers that a model of the earlier ones takes.
            dense=plan.dense_names if self.earlier is None else self.earlier.meta.dense,
            categorical=tuple(categorical),
            splits={name: part.split(f"{name}.parquet") for name, part in counts.items()},
            options=self.options,
            inputs=tuple(self.source.records()),
        )
        if meta.has_rows("train") and not plan.hashed:  # of which `auto` chooses no size
            paths = [directory / Meta.vocabulary_file(name) for name in meta.tables]
            # The row number is the id.
            ids = (read_vocabulary(path, ["count"])["count"].to_numpy() for path in paths)
            found = with_effects(directory, meta, ids, plan.found_numbers)
            if self.earlier is None:
                note_left_out(plan.found_numbers, found)
                self.transform.plan = plan.with_numbers(found.dense)
            meta = found if self.earlier is None else replace(found, dense=meta.dense)

        identity = fingerprint(directory, [*meta.tables], self.transform.rules())
        extends = () if self.earlier is None else self.earlier.meta.extended_by(identity)
        return replace(meta, fingerprint=identity, extends=extends)


def _require_usable(earlier: EarlierIds, output: Path) -> None:
    """Raise if results would replace the earlier data, or no run could tell that they extend it."""
    ids_of = earlier.directory
    if ids_of.resolve() == output.resolve():
        raise ValueError(f"--ids-of {ids_of} is also the output; give another --output")
    if earlier.grow and earlier.meta.fingerprint is None:
        raise ValueError(
            f"--append-new: {ids_of} has no {META_FILE} with a fingerprint; prepare it again"
        )


def _state_of(prepared: Path) -> list[Any]:
    """The path of a prepared directory, and when its files were written."""
    paths = [prepared / name for name in (TRANSFORM_FILE, META_FILE)]
    return [str(prepared.resolve()), [p.stat().st_mtime_ns for p in paths if p.exists()]]
