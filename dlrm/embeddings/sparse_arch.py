"""The sparse architecture of a model: which table is of which kind, and their joint look-up."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.embeddings import available, build
from dlrm.embeddings.base import Embedding

Plan = list[tuple[str, dict[str, Any]]]

THRESHOLD = 2000  # rows of a table from which on it is compressed
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class SparseArch(nn.Module):
    """A list of groups of tables, each of one kind.

    The groups' vectors are not put behind one another: the interaction reads them where they lie,
    feature ``f`` being number ``order[f]`` of them, counted through the groups.

    Args:
        num_embeddings: rows of each table, in feature order.
        embedding_dim: length of a row.
        plan: kind and options of each table; see :func:`plan`. Tables with equal ones form a group.
        check_ids: see :class:`~dlrm.embeddings.base.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        plan: Plan,
        *,
        check_ids: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings = tuple(num_embeddings)
        self.embedding_dim = embedding_dim
        members: dict[str, list[int]] = {}
        for slot, entry in enumerate(plan):
            members.setdefault(repr(entry), []).append(slot)
        self.slots = list(members.values())
        self.groups = nn.ModuleList(
            build(
                plan[slots[0]][0],
                [num_embeddings[slot] for slot in slots],
                embedding_dim,
                check_ids=check_ids,
                **plan[slots[0]][1],
            )
            for slots in self.slots
        )
        order = torch.tensor([slot for slots in self.slots for slot in slots])
        self.register_buffer("order", order.argsort(), persistent=False)
        for index, slots in enumerate(self.slots):
            self.register_buffer(f"_slots_{index}", torch.tensor(slots), persistent=False)
        self.order: Tensor  # [F]

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> list[Tensor]:
        """Look up every table.

        Args:
            ids, offsets, per_sample_weights: of all features, as in ``Embedding.forward``.

        Returns:
            The vectors of each group, ``[B, F_g, D]``.
        """
        if len(self.groups) == 1:
            return [self.groups[0](ids, offsets, per_sample_weights)]
        return [
            group(*self._share(index, ids, offsets, per_sample_weights))
            for index, group in enumerate(self.groups)
        ]

    def in_order(self, vectors: list[Tensor]) -> Tensor:
        """The groups' vectors in one ``[B, F, D]``, in the order of the features."""
        return torch.cat(vectors, dim=1).index_select(1, self.order)

    def _share(
        self, index: int, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The part of the batch that concerns the tables of one group."""
        slots = getattr(self, f"_slots_{index}")
        if offsets is None:
            return ids[slots], None, None if weights is None else weights[slots]
        batch = (offsets.numel() - 1) // len(self.num_embeddings)
        bounds = offsets[::batch].tolist() if batch else [0] * (len(self.num_embeddings) + 1)
        spans = [slice(bounds[slot], bounds[slot + 1]) for slot in self.slots[index]]
        lengths = offsets.diff().view(-1, batch)[slots].view(-1)
        return (
            torch.cat([ids[span] for span in spans]),
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            None if weights is None else torch.cat([weights[span] for span in spans]),
        )

    def embeddings(self) -> list[tuple[Embedding, list[int]]]:
        """Each group with the features whose tables it holds."""
        return list(zip(self.groups, self.slots, strict=True))  # type: ignore[arg-type]

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table by part, in feature order."""
        tables: list[dict[str, int]] = [{} for _ in self.num_embeddings]
        for group, slots in self.embeddings():
            for slot, parts in zip(slots, group.footprint(), strict=True):
                tables[slot] = parts
        return tables

    def cache_stats(self) -> dict[str, float]:
        """Share of the training look-ups that the caches of the groups answered, if any has one."""
        caches = [group.cache_stats() for group, _ in self.embeddings()]
        lookups = sum(stats.get("lookups", 0) for stats in caches)
        hits = sum(stats.get("hits", 0) for stats in caches)
        return {"cache/hit_rate": hits / lookups} if lookups else {}

    def sizes(self) -> dict[str, float]:
        """Bytes by part and in all, and the compression: how many times larger dense tables are.

        Compression is measured against the same tables uncompressed in fp32, and counts all that
        is kept for look-ups.
        """
        parts: dict[str, float] = {}
        for table in self.footprint():
            for part, size in table.items():
                parts[f"{part}_bytes"] = parts.get(f"{part}_bytes", 0.0) + size
        total = sum(parts.values())
        dense = 4 * self.embedding_dim * sum(self.num_embeddings)
        return {**parts, "bytes": total, "compression": dense / total}


def parse_bytes(text: str, dense_bytes: int) -> int:
    """``"20MB"``, ``"512KiB"``, ``"4000000"`` or, relative to dense tables, ``"100x"`` in bytes.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    number = float(match[1]) if match else 0.0
    unit = match[2].upper() if match else ""
    if number > 0 and unit == "X":
        return int(dense_bytes / number)
    if number > 0 and (unit or "B") in _UNITS:
        return int(number * _UNITS[unit or "B"])
    raise ValueError(f"{text!r} is no amount of memory: write 20MB, 512KiB, 4000000 or 100x")


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
    counts: Sequence[Tensor] | None = None,
) -> Plan:
    """Decide kind and options of every table.

    Args:
        names: feature names, for ``kinds`` and for options per table.
        num_embeddings: rows of each table.
        embedding_dim: length of a row.
        kind: of the tables that are chosen; the others are dense.
        options: per kind; a value that is a mapping gives tables by name their own value
            (``{"rank": {"C3": 64, "default": 16}}``).
        threshold: tables of at least so many rows are chosen; by default 2000, and all of them
            where there is a budget.
        largest: instead, the so many largest tables are chosen.
        kinds: tables named here have the kind given here, whatever their size.
        budget: memory for all tables together, as :func:`parse_bytes` reads it; the options of
            the chosen tables follow from it.
        counts: how often each id of each table occurs, for kinds whose budget needs it.

    Raises:
        ValueError: unknown names, a negative ``largest``, or a budget that cannot be met.
    """
    kinds = dict(kinds or {})
    if largest is not None and largest < 0:
        raise ValueError(f"tables.largest is {largest}, it must not be negative")
    if threshold is None:
        threshold = THRESHOLD if budget is None else 0
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
            result[table] = (table_kind, _options_of(name, (options or {}).get(table_kind, {})))
    if budget is None:
        return result
    if kinds:
        raise ValueError("budget chooses among the tables of one kind; drop tables.kinds or budget")
    row = 4 * embedding_dim
    limit = parse_bytes(budget, row * sum(num_embeddings))
    dense = row * sum(rows for table, rows in enumerate(num_embeddings) if table not in chosen)
    if dense >= limit or not chosen:
        raise ValueError(
            f"a budget of {limit:,} bytes is used up by the dense tables alone ({dense:,} bytes): "
            "raise the budget, or let more tables be compressed with tables.threshold"
        )
    for_budget = available()[kind].for_budget
    fixed = {
        key: value
        for key, value in (options or {}).get(kind, {}).items()
        if value is not None and key in inspect.signature(for_budget).parameters
    }
    for key, value in fixed.items():
        if isinstance(value, Mapping):
            raise ValueError(
                f"with a budget all tables have one {kind}.{key}; give one value or drop budget"
            )
    fitted = for_budget(
        [num_embeddings[table] for table in chosen],
        embedding_dim,
        limit - dense,
        counts=None if counts is None else [counts[table] for table in chosen],
        **fixed,
    )
    for table, found in zip(chosen, fitted, strict=True):
        if found is None:
            result[table] = ("dense", {})
        else:
            result[table] = (kind, {**result[table][1], **found})
    return result


def _check_table_names(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise where an option is given to a table that is not there."""
    for kind, own in options.items():
        for key, value in own.items():
            for name in value if isinstance(value, Mapping) else ():
                if name not in (*names, "default"):
                    raise ValueError(
                        f"{kind}.{key} names table {name!r}; the data has {', '.join(names)}"
                    )


def _options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One table's options: mappings by table name are resolved, what is unset is left out."""
    own = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            value = value.get(name, value.get("default"))
        if value is not None:
            own[key] = value
    return own
