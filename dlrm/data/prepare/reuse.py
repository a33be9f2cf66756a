"""Rows that come later: the plan and the vocabularies of an earlier preparation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlrm.data.prepare.column_options import ColumnOptions, SplitOptions
from dlrm.data.prepare.columns import Column, ColumnPlan, Feature
from dlrm.data.prepare.files import RawFile
from dlrm.data.prepare.passes import Block, Learner
from dlrm.data.prepare.splitting import Splitter
from dlrm.data.prepare.transform import TableTransform
from dlrm.data.prepare.vocabulary import extend_vocabulary
from dlrm.data.prepare.workspace import Workspace
from dlrm.data.schema import Meta
from dlrm.data.threads import map_in_order
from dlrm.utils.messages import did_you_mean


def plan_of_later_rows(
    known: ColumnPlan, files: Sequence[RawFile], split: SplitOptions
) -> tuple[ColumnPlan, list[str]]:
    """What the columns of a table are, if they are to become the features of an earlier one.

    Args:
        known: the plan of the earlier preparation.
        files: the files of the table, opened with the options of that plan.
        split: the split of these rows.

    Returns:
        The plan, and the names of columns that the earlier table did not have and that are left
        out.

    Raises:
        ValueError: a column is missing.
    """
    columns = []
    for column in known.columns:
        unused = column.kind == "split" and (split.by, split.column) != ("column", column.name)
        own = replace(column.options, kind="drop") if unused else column.options
        columns.append(replace(column, options=own))
    names = [column.name for column in columns]
    if split.column is not None and split.column not in names:
        if split.by == "time":
            raise ValueError(
                f"--split-by time:{split.column}: the earlier preparation has no such column"
                f"{did_you_mean(split.column, names)}"
            )
        own = ColumnOptions(kind="split")
        columns.append(Column(name=split.column, found="text", why="given", options=own))
    plan = ColumnPlan(options=replace(known.options, split=split), columns=tuple(columns))
    for file in files:
        for name in plan.needed if file.names else ():  # rows of JSON may leave out names
            if name not in file.names:
                raise ValueError(
                    f"{file.path} has no column {name!r}, which the earlier preparation has"
                    f"{did_you_mean(name, file.names)}"
                )
    there = {column.name for column in columns}
    return plan, [name for name in files[0].names if name not in there]


def extend_vocabularies(
    blocks: Sequence[Block],
    transform: TableTransform,
    splitter: Splitter,
    work: Workspace,
    forget: int | None,
) -> None:
    """Give ids to values of the training rows that have none yet.

    Numbers in buckets stay as they are, and so do scalings.

    Args:
        blocks: the rows.
        transform: that of the earlier preparation, whose vocabularies are replaced.
        splitter: says which rows are for training.
        work: gets the vocabularies.
        forget: see :func:`dlrm.data.preprocess.appending.extend_ids`.
    """
    learner = Learner(blocks=blocks, splitter=splitter, work=work, transform=transform)

    def extend(feature: Feature) -> None:
        values, counts = learner.count(feature)
        own = feature.column.options
        made = extend_vocabulary(
            transform.vocabularies[feature.name],
            values,
            counts,
            min_count=own.min_count or 1,
            cap=own.cap,
            forget=forget,
        )
        made.write(work / Meta.vocabulary_file(feature.name))
        transform.vocabularies[feature.name] = made

    features = [feature for feature in transform.plan.categorical if not feature.bucketed]
    for _ in map_in_order(extend, features, 2):  # two at a time, to bound the memory
        pass
