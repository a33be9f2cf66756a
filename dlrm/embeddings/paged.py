"""Tables cut into pages that lie on several devices of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.kernels.lookup.paged import Pages, lookup_pages, pages_of
from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.utils.local_shards import LocalShards, saved_weight
from dlrm.utils.messages import did_you_mean

PLACEMENTS = ("balanced", "cyclic")


class Paged(Embedding):
    """Dense tables in pages: row ``i`` is row ``i % page_size`` of page ``i // page_size``.

    A page lies in the memory of a GPU, in pinned host memory, or in plain host memory. Where the
    GPU that looks up can follow the addresses of all of them, one kernel does; elsewhere every
    device looks up its share. Weights and gradients are one of each per place, so that each place
    keeps its own optimizer state. What is computed, what is saved and the initial rows are those
    of ``dense``: saved on two devices, it loads on one.

    Args:
        page_size: rows of a page; the last page of a table is as long as it must be.
        devices: where pages lie, in equal shares: cuda:0, cuda:1, ...; host (pinned host memory,
            read by GPUs at its own address); cpu; or cuda:0+cuda:1 for a replica on each, which
            share the look-ups and learn alike. By default all lie where the model does. A device
            may be named more often for a larger share; each cpu is a place of its own.
        placement: balanced puts the hottest pages where access is cheapest (a GPU, host, cpu) and
            balances load and bytes among equals; cyclic puts page k on entry k % n of devices, so
            that a list with an entry for each page says where it lies.
    """

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        page_size: int = 65_536,
        devices: list[str] | None = None,
        placement: str = "balanced",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **common)
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; set --paged.page_size to 1 or more")
        if placement not in PLACEMENTS:
            raise ValueError(
                f"unknown placement {placement!r}{did_you_mean(placement, PLACEMENTS)}"
            )
        # As long as the longest table at most, that a number of 64 bits can tell any row.
        self.page_size = page_size = min(page_size, max(self.num_embeddings))
        self.moves = not devices
        """Whether ``.to`` moves the pages; those with a place of their own stay there."""
        counts = [-(-rows // page_size) for rows in self.num_embeddings]
        starts = [0, *accumulate(counts)]
        self._lengths = [
            min(page_size, rows - page * page_size)
            for rows, count in zip(self.num_embeddings, counts, strict=True)
            for page in range(count)
        ]
        places, entries = places_of(devices or ["cpu"])
        if placement == "cyclic":
            owners = cyclic(len(self._lengths), entries)
        else:
            loads = _loads(self.num_embeddings, page_size)
            owners = balanced(self._lengths, loads, places, entries)
        used = sorted(set(owners))
        self.places = tuple(places[place] for place in used)
        self._make_blocks([used.index(owner) for owner in owners])
        offsets = torch.tensor(starts[:-1]) * page_size
        self.register_buffer("_offsets", offsets, persistent=False)
        self._offsets: Tensor  # [F], of rows numbered page after page
        self.reset_parameters()

    @classmethod
    def here(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            places_of(options.get("devices") or ())
        except ValueError:
            return {name: value for name, value in options.items() if name != "devices"}
        return dict(options)

    def _make_blocks(self, owners: Sequence[int]) -> None:
        """Allocate each place's block of rows, one per replica, its pages behind one another."""
        sizes, firsts = [0] * len(self.places), []
        for owner, length in zip(owners, self._lengths, strict=True):
            firsts.append(sizes[owner])
            sizes[owner] += length
        self._names = []
        for index, (place, size) in enumerate(zip(self.places, sizes, strict=True)):
            names = [f"weight_{index}_{replica}" for replica in range(len(place))]
            for name, device in zip(names, place, strict=True):
                where = None if self.moves else device  # with the model: on the default device
                block = _block((size, self.embedding_dim), torch.get_default_dtype(), where)
                self.register_parameter(name, nn.Parameter(block))
            self._names.append(names)
        self._mark_replicas()
        self.register_buffer("_owner", torch.tensor(owners), persistent=False)
        self.register_buffer("_first", torch.tensor(firsts), persistent=False)
        self._owner: Tensor  # [pages]
        self._first: Tensor  # [pages]
        self._made: dict[torch.device, tuple[object, Pages]] = {}

    def _mark_replicas(self) -> None:
        """See :func:`dlrm.optim.gradient_norm`."""
        for blocks in self.blocks:
            for block in blocks:
                block.replica = block is not blocks[0]  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a copy, whose parameters have lost what they were marked with."""
        super().__setstate__(state)
        self._mark_replicas()

    @property
    def blocks(self) -> list[list[nn.Parameter]]:
        """The weights of each place, one per replica, ``[rows, D]``."""
        return [[getattr(self, name) for name in names] for names in self._names]

    def pages(self, device: torch.device) -> Pages:
        """The table of pages as ``device`` sees it; made again when a weight has moved."""
        blocks = self.blocks
        state = [(id(block), block.data_ptr()) for group in blocks for block in group]
        known, pages = self._made.get(device, (None, None))
        if pages is None or known != state:
            pages = pages_of(blocks, self.page_size, self._owner, self._first, device)
            self._made[device] = state, pages
        return pages

    def _slices(self) -> Iterator[tuple[list[Tensor], float]]:
        """The rows of each page in every replica, and the bound of its table's initial rows."""
        tables = [rows for rows in self.num_embeddings for _ in range(-(-rows // self.page_size))]
        where = zip(self._owner.tolist(), self._first.tolist(), strict=True)
        blocks = self.blocks
        for (owner, first), length, rows in zip(where, self._lengths, tables, strict=True):
            yield [block.data[first : first + length] for block in blocks[owner]], rows**-0.5

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows anew, as dense tables are drawn."""
        for replicas, bound in self._slices():
            drawn = torch.empty(replicas[0].shape, dtype=replicas[0].dtype)
            nn.init.uniform_(drawn, -bound, bound)
            for rows in replicas:
                rows.copy_(drawn)

    def vectors(self, tables: Tensor, ids: Tensor) -> Tensor:
        rows = ids + self._offsets[tables]
        return lookup_pages(self.pages(rows.device), rows, sparse=self.sparse)

    def lookup(self, ids: Tensor) -> Tensor:
        rows = (ids + self._offsets[:, None]).t().contiguous()  # [B, F]
        return lookup_pages(self.pages(rows.device), rows, sparse=self.sparse)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Take over the rows of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        pages = (page for weight in weights for page in weight.split(self.page_size))
        for (replicas, _), page in zip(self._slices(), pages, strict=True):
            for rows in replicas:
                rows.copy_(page)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table, ``host`` those in pinned host memory; every replica counts."""
        size = self.embedding_dim * self.blocks[0][0].element_size()
        pages = iter(zip(self._owner.tolist(), self._lengths, strict=True))
        footprint = []
        for table in self.num_embeddings:
            parts = {"weights": 0, "host": 0}
            for _ in range(-(-table // self.page_size)):
                owner, length = next(pages)
                for device in self.places[owner]:
                    parts["host" if device == "host" else "weights"] += length * size
            footprint.append({name: count for name, count in parts.items() if count})
        return footprint

    # Where the pages lie is no part of the state ---------------------------------------------

    def shards(self, tensors: Mapping[str, Tensor], *, per_row: bool = False) -> LocalShards:
        """Tensors laid out like the blocks of these names as one, in the order of the tables.

        They are the blocks, or states of an optimizer with an entry per weight or per row.
        """
        like = tensors[self._names[0][0]]
        parts, row = [], 0
        where = zip(self._owner.tolist(), self._first.tolist(), self._lengths, strict=True)
        for owner, first, length in where:
            parts.append(((row, 0), tensors[self._names[owner][0]][first : first + length]))
            row += length
        copies = [(tensors[first], tensors[n]) for first, *rest in self._names for n in rest]
        return LocalShards((row, 1 if per_row else self.embedding_dim), parts, like.dtype, copies)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save one ``weight [sum(V), D]``, as ``dense`` does; gathered on the CPU if need be."""
        (first, *_), *others = self.blocks
        if not others:
            destination[prefix + "weight"] = first if keep_vars else first.detach()
            return
        weight = torch.empty(sum(self.num_embeddings), self.embedding_dim, dtype=first.dtype)
        for to, ((rows, *_), _) in zip(weight.split(self._lengths), self._slices(), strict=True):
            to.copy_(rows)
        destination[prefix + "weight"] = weight

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        shape = sum(self.num_embeddings), self.embedding_dim
        weight = saved_weight(
            state_dict, prefix, shape, strict, missing_keys, unexpected_keys, error_msgs
        )
        if weight is not None:
            self.load_dense(weight.split(self.num_embeddings))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``.to`` and its kind do: pages with a place of their own take on the type alone."""
        if self.moves:
            return super()._apply(fn, recurse)
        parameters, self._parameters = self._parameters, {}
        super()._apply(fn, recurse)
        self._parameters = parameters
        for place, names in zip(self.places, self._names, strict=True):
            for device, name in zip(place, names, strict=True):
                old = getattr(self, name)
                dtype = fn(old.data[:0]).dtype
                if dtype != old.dtype:
                    old.data = _block(old.shape, dtype, device).copy_(old.data)
        return self

    def extra_repr(self) -> str:
        """Adds the rows of each place."""
        held = [
            f"{len(group[0]):,} rows on {group[0].device if self.moves else '+'.join(place)}"
            for place, group in zip(self.places, self.blocks, strict=True)
        ]
        return f"{super().extra_repr()}, page_size={self.page_size}, {', '.join(held)}"


def _block(shape: Sequence[int], dtype: torch.dtype, device: str | None) -> Tensor:
    """New memory at a place; ``host`` is plain memory where no GPU could read it."""
    if device != "host":
        return torch.empty(*shape, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        return torch.empty(*shape, dtype=dtype)
    return mapped_tensor(shape, dtype)[1]


def _loads(tables: Sequence[int], page_size: int) -> list[float]:
    """The expected look-ups of each page per sample, if ids are log-uniform, 0 the most frequent.

    Real ids are ordered by falling frequency and skewed about so.
    """
    loads = []
    for rows in tables:
        ends = [math.log1p(end) for end in (*range(0, rows, page_size), rows)]
        loads += [(end - begin) / ends[-1] for begin, end in pairwise(ends)]
    return loads


Place = tuple[str, ...]
"""The devices of a page: one, or one for each replica."""

COST = {"cuda": 0, "host": 1, "cpu": 2}
"""The order in which hot pages prefer memory: a GPU's own or its peers', what it reads through the
link, what it can't read."""


def places_of(devices: Sequence[str]) -> tuple[list[Place], list[int]]:
    """The distinct places that a list of devices names.

    Args:
        devices: as of :class:`dlrm.embeddings.paged.Paged`; each ``cpu`` is a place of its own.

    Returns:
        The places, and the place of each entry of the list.

    Raises:
        ValueError: no such device, or not on this machine.
    """
    places: list[Place] = []
    entries = []
    for text in devices:
        place = tuple(_device(name.strip(), text) for name in text.split("+"))
        if place not in places or set(place) == {"cpu"}:
            places.append(place)
            entries.append(len(places) - 1)
        else:
            entries.append(places.index(place))
    return places, entries


def _device(name: str, text: str) -> str:
    """A device's name with its index."""
    kind, _, index = name.partition(":")
    if name in ("cpu", "host"):
        return name
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise ValueError(
            f"paged.devices names {text!r}, each must be cuda:0 (or another number), host or cpu, "
            "or several with + between them"
        )
    number, there = int(index or 0), torch.cuda.device_count()
    if number >= there:
        raise ValueError(
            f"paged.devices names {text!r}, but this machine has {there or 'no'} CUDA "
            f"GPU{'s' * (there != 1)}: name others, or none for where the model lies"
        )
    return f"cuda:{number}"


def cyclic(pages: int, entries: Sequence[int]) -> list[int]:
    """Page k on entry k % n: the place of each page."""
    return [entries[page % len(entries)] for page in range(pages)]


def balanced(
    lengths: Sequence[int], loads: Sequence[float], places: Sequence[Place], entries: Sequence[int]
) -> list[int]:
    """Hot pages where access is cheapest, load and bytes balanced among equals.

    Pages are dealt out in the order of their load, each to a place of the cheapest memory that has
    not yet got its share of the rows; of several, to the one with the least load.

    Args:
        lengths: rows of each page.
        loads: expected look-ups of each page.
        places: the places.
        entries: places by number; one that occurs twice has a double share.

    Returns:
        The place of each page.
    """
    total = sum(lengths)
    shares = [entries.count(place) * total / len(entries) for place in range(len(places))]
    costs = [max(COST[device.partition(":")[0]] for device in place) for place in places]
    rows, load = [0] * len(places), [0.0] * len(places)
    owners = [0] * len(lengths)
    for page in sorted(range(len(lengths)), key=lambda page: -loads[page]):
        open_ = [place for place in range(len(places)) if rows[place] < shares[place]]
        owner = min(open_, key=lambda place: (costs[place], load[place], rows[place]))
        rows[owner] += lengths[page]
        load[owner] += loads[page] / len(places[owner])
        owners[page] = owner
    return owners
