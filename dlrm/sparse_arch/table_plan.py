"""Which table of a model is of which kind, and with which options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from dlrm.embeddings.registry import available
from dlrm.sparse_arch.auto import choose_tables
from dlrm.utils.messages import did_you_mean

Plan = list[tuple[str, dict[str, Any]]]  # kind and options of each table

AUTO = "auto"  # as a kind: each table has the kind and the size that the planner chooses
THRESHOLD = 2000  # rows of a table from which on it is compressed
MOST = 2**62  # bytes of a budget
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, dense_bytes: int) -> int:
    """``"20MB"``, ``"512KiB"``, ``"4000000"`` or, relative to dense tables, ``"100x"`` in bytes.

    Raises:
        ValueError: it is none of these, not positive, or more than any machine has.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    number = float(match[1]) if match else 0.0
    unit = match[2].upper() if match else ""
    if number > 0 and (unit or "B") in (*_UNITS, "X"):
        amount = dense_bytes / number if unit == "X" else number * _UNITS[unit or "B"]
        if amount < MOST:
            return int(amount)
    raise ValueError(f"{text!r} is no amount of memory: write 20MB, 512KiB, 4000000 or 100x")


def times(ratio: float) -> str:
    """``"100x"``: a ratio to dense tables as :func:`parse_bytes` reads it, in digits alone."""
    return f"{np.format_float_positional(ratio, trim='-')}x"


def plan(
    names: Sequence[str],
    num_embeddings: Sequence[int],
    embedding_dim: int,
    kind: str,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    threshold: int | None = None,
    largest: int | None = None,
    kinds: Mapping[str, str] | None = None,
    budget: str | None = None,
    counts: Callable[[], Sequence[Tensor]] | None = None,
    weight_bytes: int = 4,
) -> Plan:
    """Decide kind and options of every table.

    Args:
        names: feature names, for ``kinds`` and for options per table.
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        kind: of the tables that are chosen, or ``auto``; the others are dense.
        options: per kind; a value that is a mapping gives tables by name their own value
            (``{"rank": {"C3": 64, "default": 16}}``).
        threshold: tables of at least so many rows are chosen; by default 2000, and all of them
            where there is a budget.
        largest: instead, the so many largest tables are chosen.
        kinds: tables named here have the kind given here, whatever their size.
        budget: memory for all tables together, as :func:`parse_bytes` reads it; the options of
            the chosen tables follow from it.
        counts: gives how often each id of each table occurs; called where a budget depends on it.
        weight_bytes: 4 for tables in fp32, 2 in bf16, of which a budget buys twice as many.

    Raises:
        ValueError: unknown names, a negative ``largest``, a budget that cannot be met, or none for
            ``auto``.
    """
    kinds = dict(kinds or {})
    if largest is not None and largest < 0:
        raise ValueError(f"tables.largest is {largest}, it must not be negative")
    if kind == AUTO and budget is None:
        raise ValueError("--emb auto needs a budget: set --budget 20MB or --budget 100x")
    if threshold is None:
        threshold = THRESHOLD if budget is None else 0
    for one in {kind, *kinds.values()} - {AUTO}:
        if one not in (valid := available()):
            raise ValueError(f"unknown embedding kind {one!r}{did_you_mean(one, valid)}")
    for name in kinds:
        if name not in names:
            raise ValueError(f"tables.kinds names table {name!r}; the data has {', '.join(names)}")
    _check_table_names(names, options or {})
    order = sorted(range(len(names)), key=lambda table: -num_embeddings[table])
    picked = set(order[:largest]) if largest is not None else set(order)
    chosen = [
        table
        for table, name in enumerate(names)
        if name not in kinds
        and table in picked
        and (largest is not None or num_embeddings[table] >= threshold)
    ]
    result: Plan = [("dense", {})] * len(names)
    for table, name in enumerate(names):
        if table in chosen or name in kinds:
            table_kind = kinds.get(name, kind)
            result[table] = (table_kind, options_of(name, (options or {}).get(table_kind, {})))
    if budget is not None:
        if kinds:
            raise ValueError(
                "budget chooses among the tables of one kind; drop tables.kinds or budget"
            )
        given = (options or {}).get(kind, {})
        fitted = _fit(
            kind, chosen, num_embeddings, embedding_dim, budget, given, counts, weight_bytes
        )
        for table, (own, found) in zip(chosen, fitted, strict=True):
            result[table] = (own, {**result[table][1], **found} if own == kind else found)
    return result


def plan_for_this_machine(plan: Plan) -> Plan:
    """The plan of a trained model as this machine can hold it; see :meth:`Embedding.here`."""
    kinds = available()
    return [(kind, kinds[kind].here(options)) for kind, options in plan]


def _fit(
    kind: str,
    chosen: Sequence[int],
    num_embeddings: Sequence[int],
    embedding_dim: int,
    budget: str,
    options: Mapping[str, Any],
    counts: Callable[[], Sequence[Tensor]] | None,
    weight_bytes: int,
) -> Plan:
    """Kind and options of the chosen tables from what a budget leaves to them."""
    row = weight_bytes * embedding_dim
    limit = parse_bytes(budget, 4 * embedding_dim * sum(num_embeddings))
    dense = row * sum(rows for table, rows in enumerate(num_embeddings) if table not in chosen)
    if not chosen and dense <= limit:
        return []
    if dense >= limit:
        raise ValueError(
            f"a budget of {limit:,} bytes is used up by the dense tables alone ({dense:,} bytes): "
            "raise the budget, or let more tables be compressed with tables.threshold"
        )

    def known() -> list[Tensor] | None:
        seen = counts() if counts else None
        return None if seen is None else [seen[table] for table in chosen]

    sizes = [num_embeddings[table] for table in chosen]
    if kind == AUTO:
        seen = known()
        if seen is None:
            raise ValueError("--emb auto needs to know how often each id occurs: give plan counts")
        return choose_tables(sizes, embedding_dim, limit - dense, seen, weight_bytes=weight_bytes)
    cls = available()[kind]
    fixed = {
        key: value
        for key, value in options.items()
        if value is not None and key in inspect.signature(cls.for_budget).parameters
    }
    for key, value in fixed.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"with a budget all tables have one {kind}.{key}; give one value or drop budget"
            )
    seen = known() if cls.budget_by_counts else None
    fitted = cls.for_budget(
        sizes, embedding_dim, limit - dense, counts=seen, weight_bytes=weight_bytes, **fixed
    )
    return [("dense", {}) if found is None else (kind, found) for found in fitted]


def _check_table_names(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise where an option is given to a table that is not there."""
    for kind, own in options.items():
        for key, value in own.items():
            for name in value if isinstance(value, Mapping) else ():
                if name not in (*names, "default"):
                    raise ValueError(
                        f"{kind}.{key} names table {name!r}; the data has {', '.join(names)}"
                    )


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One table's options: mappings by table name are resolved, what is unset is left out."""
    own = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            value = value.get(name, value.get("default"))
        if value is not None:
            own[key] = value
    return own


def describe_plan(names: Sequence[str], num_embeddings: Sequence[int], chosen: Plan) -> str:
    """The kind and the options of every table, a line each."""
    kinds, options = zip(*chosen, strict=True)
    told = [", ".join(f"{name} {value}" for name, value in own.items()) for own in options]
    tables = pd.DataFrame({"table": names, "rows": num_embeddings, "kind": kinds, "options": told})
    return tables.to_string(index=False, formatters={"rows": "{:,}".format})


def by_table(
    names: Sequence[str], num_embeddings: Sequence[int], chosen: Plan
) -> dict[str, dict[str, Any]]:
    """Rows, kind and options of every table by its name; an option ``rows`` has its full name."""
    return {
        name: {"rows": rows, "kind": kind}
        | {f"{kind}.{key}" if key == "rows" else key: value for key, value in options.items()}
        for name, rows, (kind, options) in zip(names, num_embeddings, chosen, strict=True)
    }
