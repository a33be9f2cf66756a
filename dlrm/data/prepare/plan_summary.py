"""The summary of a table's columns, which is printed before the work."""

from __future__ import annotations

from ...utils.messages import listing, printable
from . import codes
from .column_options import TableOptions
from .columns import Column, ColumnPlan

MANY_COLUMNS, SHOWN = 50, 3  # with more columns, those alike share a line, which names some


def format_plan(plan: ColumnPlan) -> str:
    """The summary: a line for each column, or for many alike."""
    alike: dict[tuple[str, ...], list[Column]] = {}
    for column in plan.columns:
        look = column.found, column.kind, _becomes(column, plan.options)
        alone = (column.name,) if len(plan.columns) <= MANY_COLUMNS else ()
        alike.setdefault((*look, *alone), []).append(column)

    rows = [("column", "type", "kind", "becomes", "why")]
    for (found, kind, becomes, *_), columns in alike.items():
        names = printable(listing([column.name for column in columns], SHOWN))
        more = f"; and {len(columns) - 1:,} alike" if len(columns) > 1 else ""
        rows.append((names, found, kind, becomes, columns[0].why + more))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return "\n".join(lines)


def _becomes(column: Column, table: TableOptions) -> str:
    options = column.options
    if column.kind == "number":
        special = {"quantile": "a bucket", "log3": "0 before it"}
        missing = special.get(str(options.transform), "0 after it")
        return f"{options.transform}, missing: {missing}{', and a bucket' * options.bucketed}"
    if column.kind == "vector":
        buckets = ", and buckets" * options.bucketed
        return f"{options.size} numbers, {options.transform}, missing: 0 after it{buckets}"
    if column.kind in ("category", "list"):
        limits = {"min_count": options.min_count, "cap": options.cap, "hash": options.hash}
        told = [f"{name} {value}" for name, value in limits.items() if value not in (None, 1)]
        told += [f"separator {options.separator!r}"] if options.separator else []
        first = "ids" if column.kind == "category" else "lists of ids"
        return ", ".join([first, *told])
    if column.kind == "time":
        return " ".join(options.parts or ())
    if column.kind == "label":
        return printable(str(codes.label_rule(table, column.name)))
    return {"drop": "left out", "pass": "as it is"}.get(column.kind, "")
