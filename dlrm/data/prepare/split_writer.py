"""Pass 3: spilled rows are prepared and written to the Parquet file of their split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...utils.atomic import atomic_write
from ...utils.messages import listing, print_error
from ..parquet import column_limits
from ..schema import HASHED, SPLITS, Categorical
from ..threads import map_in_order
from .keys import DistinctIds
from .learner import Learner
from .rates import append_rates
from .spill import SpilledBlock, progress_bar
from .vocabulary import ZSTD

ROW_GROUP_ROWS = 1 << 17
LARGEST_DICTIONARY = 1 << 16  # with more ids than this, few repeat within a row group


def write_splits(
    learner: Learner, categorical: Sequence[Categorical], *, workers: int, progress: bool
) -> tuple[Categorical, ...]:
    """Write ``SPLIT.parquet`` of each split into the workspace, with what was learned. Returns the
    categorical columns; those of hashed ids with the number of different ones. A column of which a
    split has no value that was in the training rows is noted.
    """
    blocks, plan, work = learner.blocks, learner.transform.plan, learner.work
    training_rates, rates = learner.rates()

    # In threads, from ids that were looked up by value once.
    looked_up = {
        feature.name: learner.ids_of_entries(index, feature)
        for index, feature in enumerate(plan.features)
        if not feature.dense and not feature.bucketed and not plan.hashed
    }

    def encode(
        numbered: tuple[int, SpilledBlock],
    ) -> tuple[list[pa.RecordBatch], NDArray[np.bool_] | None]:
        index, block = numbered
        ids = {name: of_blocks[index] for name, of_blocks in looked_up.items()}
        rows = learner.transform.encode(block.read(), ids)
        codes, halves = learner.splitter.codes(block), learner.splitter.halves(block)
        of_rows = None if halves is None else halves[codes == 0]  # of the training rows
        selected = [codes == code for code in range(len(SPLITS))]
        # Most blocks are of one split.
        return [rows if s.all() else rows.filter(pa.array(s)) for s in selected], of_rows

    # Dictionaries pay off where values repeat within a row group.
    large = {column.name for column in categorical if column.cardinality > LARGEST_DICTIONARY}
    different = {c.name: DistinctIds() for c in categorical if c.cardinality == HASHED}

    # In order: a training row's rates count the rows before it, or those of the other half.
    with progress_bar("write", "rows", progress) as bar, ExitStack() as stack:
        bar.total = sum(block.rows for block in blocks)
        writers: dict[str, Callable[[pa.RecordBatch], None]] = {}
        for parts, halves in map_in_order(encode, enumerate(blocks), workers):
            for name, prepared in zip(SPLITS, parts, strict=True):
                if name == "train" and learner.learns:
                    part = append_rates(prepared, training_rates, plan.label, halves, workers)
                else:
                    part = append_rates(prepared, rates, threads=workers)
                if name not in writers:
                    repeating = [field for field in part.schema.names if field not in large]
                    writer = split_writer(work / f"{name}.parquet", part.schema, repeating)
                    writers[name] = stack.enter_context(writer)
                writers[name](part)

                for column, ids in different.items() if name == "train" else ():
                    own = part[column]
                    ids.add((own.flatten() if pa.types.is_list(own.type) else own).to_numpy())
            bar.update(sum(part.num_rows for part in parts))

    for split in SPLITS[1:] if blocks else ():
        _note_unseen(split, work / f"{split}.parquet", categorical)
    counts = {name: ids.count or None for name, ids in different.items()}
    return tuple(replace(column, values=counts.get(column.name)) for column in categorical)


def _note_unseen(split: str, path: Path, categorical: Sequence[Categorical]) -> None:
    """Note the columns of which no row of a split has a value of the training rows."""
    ids = {c.name: c.oov_id for c in categorical if c.oov_id is not None and not c.multi_hot}
    limits = column_limits(path, ids)
    if unseen := [name for name, found in limits.items() if found == {ids[name]}]:
        print_error(
            f"note: no row of the {split} split has a value of the training rows in "
            f"{listing(unseen)}: all count as unseen, so its metrics say nothing of these"
        )


@contextmanager
def split_writer(
    path: Path, schema: pa.Schema, repeating: Sequence[str]
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Yield a function that writes batches to a Parquet file, in row groups of equal size. Columns
    that are ``repeating`` get a dictionary."""
    pending = schema.empty_table()
    with (
        atomic_write(path) as temporary,
        pq.ParquetWriter(temporary, schema, use_dictionary=repeating, **ZSTD) as file,
    ):

        def write(rows: pa.RecordBatch) -> None:
            nonlocal pending
            if not rows.num_rows:
                return  # no rows of a block would keep all of it in memory
            pending = pa.concat_tables([pending, pa.Table.from_batches([rows])])
            while pending.num_rows >= ROW_GROUP_ROWS:
                file.write_table(pending.slice(0, ROW_GROUP_ROWS), ROW_GROUP_ROWS)
                pending = pending.slice(ROW_GROUP_ROWS)

        yield write
        if pending.num_rows:
            file.write_table(pending, ROW_GROUP_ROWS)
