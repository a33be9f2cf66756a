"""The table plan of a model: the kind of each table, and its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dlrm.data.evidence import Effects
from dlrm.embeddings.common.budget import DTYPES, MANY_IDS, Budget, row_bytes
from dlrm.embeddings.registry import available
from dlrm.sparse_arch.auto import choose_tables
from dlrm.utils.messages import align_right, did_you_mean, format_bytes, printable

TablePlan = list[tuple[str, dict[str, Any]]]
"""Kind and options of each feature's table. A feature that uses the table of another one has the
kind ``shared`` and the option ``with``, the number of that feature."""

SHARED = "shared"
AUTO = "auto"  # as a kind: choose the kind and the size of each table
THRESHOLD = 2000  # by default, tables with fewer rows stay dense
MAX_BYTES = 2**62
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class KnownIds:
    """What is known of the ids of each feature."""

    counts: Callable[[], Sequence[Tensor]] | None = None
    """Returns how often each id occurs; called if a budget needs it."""
    effects: Callable[[], Sequence[Effects]] | None = None
    """Returns how much the ids say about the label; called for ``auto``. Default: equally much."""
    values: Sequence[int | None] | None = None
    """About how many ids occur, where ids are hashes."""
    ordered: bool = True
    """Whether ids are in order of falling frequency, as some kinds need them."""
    owners: Sequence[int] | None = None
    """The feature whose table each one uses. Default: each has its own."""


UNKNOWN = KnownIds()


def make_table_plan(
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
    dtype: str = "fp32",
    ids: KnownIds = UNKNOWN,
    trained: bool = False,
) -> TablePlan:
    """Decide the kind and the options of every table.

    Args:
        names: feature names, for ``kinds`` and for options by table.
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        kind: kind of the tables to compress, or ``auto``; all other tables are dense.
        options: the options of each kind; a value that is a mapping has one value for each table
            (``{"rank": {"C3": 64, "default": 16}}``).
        threshold: compress tables with at least this many rows; by default 2000, and all tables if
            there is a budget.
        largest: compress this number of tables, the largest ones, instead.
        kinds: the kind of single tables by name, whatever their size.
        budget: memory for all tables together, as :func:`parse_bytes` reads it; it decides the
            options of the tables to compress.
        dtype: type of the tables, one of :data:`~dlrm.embeddings.common.budget.DTYPES`; ``auto``
            gives tables this type or one of fewer bits, as the option ``dtype``.
        ids: what is known of the ids of each feature.
        trained: whether the tables will be fitted to trained ones, for ``auto``.

    Raises:
        ValueError: unknown names, a budget that cannot be met, ``auto`` without a budget, or a kind
            that needs ids in another order.
    """
    # The plan is that of the features with a table of their own.
    owners = ids.owners or range(len(names))
    features = sorted(set(owners))
    names = [names[feature] for feature in features]
    num_embeddings = [num_embeddings[feature] for feature in features]

    options, kinds = options or {}, kinds or {}
    _check_names(names, kind, kinds, options)
    if kind == AUTO and budget is None:
        raise ValueError("--emb auto needs a budget: set --budget 20MB or --budget 100x")
    if budget is not None and kinds:
        raise ValueError("budget and tables.kinds exclude each other: drop one of them")

    # The tables to compress; all others stay dense.
    if threshold is None:
        threshold = THRESHOLD if budget is None else 0
    by_size = sorted(range(len(names)), key=lambda table: -num_embeddings[table])
    large = (table for table in by_size if num_embeddings[table] >= threshold)
    chosen = sorted(large if largest is None else by_size[:largest])
    plan: TablePlan = []
    for table, name in enumerate(names):
        table_kind = kinds.get(name, kind if table in chosen else "dense")
        plan.append((table_kind, options_of_table(name, options.get(table_kind, {}))))
    _require_known_ids(names, num_embeddings, plan)
    if not ids.ordered:
        _require_any_order([kind] if kind == AUTO else [table_kind for table_kind, _ in plan])

    def of_chosen(every: Sequence[Any] | None) -> Sequence[Any] | None:
        return every and [every[features[table]] for table in chosen]

    # Dense tables take their bytes of a budget first.
    left = _left_of(budget, chosen, num_embeddings, embedding_dim, dtype)
    if left:
        sizes = [num_embeddings[table] for table in chosen]
        by_counts = kind == AUTO or available()[kind].budget_by_counts
        counts = of_chosen(ids.counts()) if ids.counts and by_counts else None
        effects = of_chosen(ids.effects()) if ids.effects and kind == AUTO else None
        rest = Budget(sizes, embedding_dim, left, counts, dtype, of_chosen(ids.values))
        fitted = _fit_options(kind, rest, options.get(kind, {}), effects, trained=trained)
        for table, (one, found) in zip(chosen, fitted, strict=True):
            plan[table] = (one, {**plan[table][1], **found} if one == kind else found)

    entries = dict(zip(features, plan, strict=True))
    return [entries.get(f, (SHARED, {"with": owner})) for f, owner in enumerate(owners)]


def _require_known_ids(
    names: Sequence[str], num_embeddings: Sequence[int], plan: TablePlan
) -> None:
    """Raise for kinds that have a row for each id, of which nobody knows how many there are."""
    for name, rows, (kind, _) in zip(names, num_embeddings, plan, strict=True):
        if rows >= MANY_IDS and (kind == AUTO or not available()[kind].any_ids):
            raise ValueError(
                f"the ids of {name} are hashes, for which --emb {kind} has no table: set --emb "
                "dynamic, or prepare the data with --ids vocabulary"
            )


def _require_any_order(kinds: Sequence[str]) -> None:
    """Raise for kinds that need ids in order of falling frequency."""
    classes = available()
    for kind in kinds:
        if kind == AUTO or classes[kind].by_frequency:
            raise ValueError(
                f"--emb {kind} needs ids in order of falling frequency, but values of later days "
                "were appended to these (--append-new): choose another kind, such as dense, tt or "
                "cafe, or prepare the rows of all days together"
            )


def options_of_table(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one table: resolve mappings by table name, leave out unset options."""
    resolved = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            value = value.get(name, value.get("default"))
        if value is not None:
            resolved[key] = value
    return resolved


def owners_of(plan: TablePlan) -> list[int]:
    """For each feature, the one whose table it uses."""
    return [options["with"] if kind == SHARED else f for f, (kind, options) in enumerate(plan)]


def with_pooling(
    plan: TablePlan, names: Sequence[str], lists: Sequence[str], pooling: Mapping[str, str]
) -> TablePlan:
    """A plan in which the rows of lists are pooled as given.

    Args:
        plan: of the features ``names``.
        names: the features.
        lists: those with lists of ids.
        pooling: ``sum``, ``mean`` or ``max`` by feature, or for the others as ``default``.

    Raises:
        ValueError: a name is not that of a list, or lists of one table are pooled differently.
    """
    for name in pooling:
        if name not in (*lists, "default"):
            raise ValueError(
                f"tables.pooling names {name!r}, which has no lists of ids"
                f"{did_you_mean(name, [*lists, 'default'])}"
            )
    modes: dict[int, str] = {}
    for feature, table in enumerate(owners_of(plan)):
        if (name := names[feature]) in lists:
            mode = pooling.get(name, pooling.get("default", "sum"))
            if modes.setdefault(table, mode) != mode:
                raise ValueError(
                    f"tables.pooling pools {name!r} by {mode}, but another list with the same "
                    f"table by {modes[table]}: pool both alike, or set --tables.share false"
                )
    return [
        (kind, options if modes.get(f, "sum") == "sum" else {**options, "mode": modes[f]})
        for f, (kind, options) in enumerate(plan)
    ]


def without_speed(plan: TablePlan) -> TablePlan:
    """A plan without the options that change nothing but the speed."""
    kinds = available()
    left_out = [kinds[kind].of_speed if kind in kinds else () for kind, _ in plan]
    return [
        (kind, {name: value for name, value in options.items() if name not in names})
        for (kind, options), names in zip(plan, left_out, strict=True)
    ]


def plan_for_this_machine(plan: TablePlan) -> TablePlan:
    """The table plan of a trained model with the devices of this machine."""
    kinds = available()
    return [
        (kind, options if kind == SHARED else kinds[kind].options_on_this_machine(options))
        for kind, options in plan
    ]


def format_table_plan(
    names: Sequence[str],
    num_embeddings: Sequence[int],
    plan: TablePlan,
    sizes: Sequence[int] | None = None,
) -> str:
    """Return the name, rows, kind and options of every table as text, one table per line.

    With ``sizes``, the bytes of each table are listed too.
    """
    kinds, options = zip(*_named(plan, names), strict=True)
    texts = [", ".join(f"{name} {value}" for name, value in each.items()) for each in options]
    columns = [
        ["table", *map(printable, names)],
        ["rows", *(f"{rows:,}" if rows < MANY_IDS else "any" for rows in num_embeddings)],
        *([["bytes", *map(format_bytes, sizes)]] if sizes else []),
        ["kind", *kinds],
        ["options", *map(printable, texts)],
    ]
    return align_right(list(zip(*columns, strict=True)))


def table_plan_by_name(
    names: Sequence[str], num_embeddings: Sequence[int], plan: TablePlan
) -> dict[str, dict[str, Any]]:
    """Rows, kind and options of every table by name; an option ``rows`` has its full name."""
    return {
        name: {"rows": rows, "kind": kind}
        | {f"{kind}.{key}" if key == "rows" else key: value for key, value in options.items()}
        for name, rows, (kind, options) in zip(
            names, num_embeddings, _named(plan, names), strict=True
        )
    }


def _named(plan: TablePlan, names: Sequence[str]) -> TablePlan:
    """The plan with the name of each feature whose table is shared."""
    return [
        (kind, {"with": names[options["with"]]} if kind == SHARED else options)
        for kind, options in plan
    ]


def parse_bytes(text: str, dense_bytes: int) -> int:
    """Bytes of ``"20MB"``, ``"512KiB"``, ``"4000000"`` or, relative to dense tables, ``"100x"``.

    Raises:
        ValueError: the text is none of these, not positive, or larger than any memory.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    number = float(match[1]) if match else 0.0
    unit = match[2].upper() if match else ""
    if number > 0 and (unit or "B") in (*_UNITS, "X"):
        amount = dense_bytes / number if unit == "X" else number * _UNITS[unit or "B"]
        if amount < MAX_BYTES:
            return int(amount)
    raise ValueError(f"{text!r} is not an amount of memory: write 20MB, 512KiB, 4000000 or 100x")


def format_ratio(ratio: float) -> str:
    """A ratio to dense tables as :func:`parse_bytes` reads it, ``"100x"``, without an exponent."""
    return f"{np.format_float_positional(ratio, trim='-')}x"


def _check_names(
    names: Sequence[str],
    kind: str,
    kinds: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise on kinds and tables that do not exist."""
    valid = available()
    for one in {kind, *kinds.values()} - {AUTO}:
        if one not in valid:
            raise ValueError(f"unknown embedding kind {one!r}{did_you_mean(one, valid)}")
    for name in kinds:
        if name not in names:
            raise ValueError(f"tables.kinds names table {name!r}; the data has {', '.join(names)}")
    for kind_name, values in options.items():
        for key, value in values.items():
            for name in value if isinstance(value, Mapping) else ():
                if name not in (*names, "default"):
                    raise ValueError(
                        f"{kind_name}.{key} names table {name!r}; the data has {', '.join(names)}"
                    )


def _left_of(
    budget: str | None,
    chosen: Sequence[int],
    num_embeddings: Sequence[int],
    embedding_dim: int,
    dtype: str,
) -> int:
    """The bytes of a budget that dense tables leave to the chosen ones; 0 without either."""
    if budget is None:
        return 0
    if budget.strip()[-1:] in ("x", "X") and max(num_embeddings) >= MANY_IDS:
        raise ValueError(
            f"a budget of {budget} is relative to dense tables, but ids are hashes, and nobody "
            "knows how many there are: give bytes, such as --budget 20MB"
        )
    limit = parse_bytes(budget, 4 * embedding_dim * sum(num_embeddings))
    dense_rows = (rows for table, rows in enumerate(num_embeddings) if table not in chosen)
    dense = row_bytes(embedding_dim, dtype) * sum(dense_rows)
    if dense > limit or (chosen and dense == limit):
        raise ValueError(
            f"--budget {budget} is {limit:,} bytes, of which dense tables take {dense:,}, so none "
            "are left to others: raise it, or compress more tables with a lower tables.threshold"
        )
    return limit - dense if chosen else 0


def _fit_options(
    kind: str,
    tables: Budget,
    options: Mapping[str, Any],
    effects: Sequence[Effects] | None,
    *,
    trained: bool,
) -> TablePlan:
    """The options of tables of a kind: those that the user set, and others that fit a budget."""
    if kind == AUTO:  # which may choose fewer bits
        dtypes = DTYPES[DTYPES.index(tables.dtype) :]
        return choose_tables(tables, effects, dtypes=dtypes, trained=trained)
    cls = available()[kind]
    accepted = inspect.signature(cls.for_budget).parameters
    fixed = {k: value for k, value in options.items() if value is not None and k in accepted}
    for key, value in fixed.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"with a budget all tables have the same {kind}.{key}: give one value, or drop the "
                "budget"
            )
    found = cls.for_budget(tables, **fixed)
    return [("dense", {}) if chosen is None else (kind, chosen) for chosen in found]
