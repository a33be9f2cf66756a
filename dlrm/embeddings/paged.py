"""Dense tables divided into pages, which may be on several devices of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from dlrm.embeddings.base import Common, Embedding
from dlrm.embeddings.common.context import NO_CONTEXT, LookupContext
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.kernels.lookup.paged import Pages, ReplicaParameter, pages_of
from dlrm.kernels.lookup.tables import TableRows, lookup, lookup_tables
from dlrm.kernels.offload.pinned_memory import mapped_tensor
from dlrm.utils.local_shards import LocalShards, saved_weight
from dlrm.utils.messages import did_you_mean
from dlrm.utils.offsets import row_offsets

PLACEMENTS = ("balanced", "cyclic")
MAX_PAGES = 1 << 22
ACCESS_COST = {"cuda": 0, "host": 1, "cpu": 2}
"""The order in which hot pages prefer memory: of a GPU, read by the GPU over the link, out of its
reach."""

DeviceGroup = tuple[str, ...]
"""The devices that hold a page: one, or one for each replica."""


class Paged(Embedding):
    """Dense tables in pages: row ``i`` is row ``i % page_size`` of page ``i // page_size``.

    A page is in the memory of a GPU, in pinned host memory, or in plain host memory. If the GPU
    that looks up can address all pages, a single kernel reads them; otherwise each device looks up
    its own part. Every device has one weight with one gradient, and its own optimizer state.
    Results, initial rows and checkpoints are the same as those of ``dense``: tables saved on two
    devices load on one.

    Args:
        page_size: rows of a page; the last page of a table may be shorter.
        devices: where pages are, in equal shares: cuda:0, cuda:1, ...; host (pinned host memory,
            which GPUs can read); cpu; or cuda:0+cuda:1 for a replica on each, which share the
            look-ups and get the same updates. By default all pages are on the model's device.
            Repeat a device to give it a larger share; every cpu counts as a separate device.
        placement: balanced puts the hottest pages where access is cheapest (a GPU, then host, then
            cpu) and balances load and bytes among equal devices; cyclic puts page k on entry k % n
            of devices, so that a list with an entry for each page decides for each.
    """

    grows = True

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

        # At most the longest table: every row number fits 64 bits.
        self.page_size = page_size = min(page_size, max(self.num_embeddings))
        self.follows_model = not devices
        """Whether ``.to`` moves the pages; pages with devices of their own stay there."""
        self._page_counts = [-(-rows // page_size) for rows in self.num_embeddings]
        if (pages := sum(self._page_counts)) > MAX_PAGES:
            raise ValueError(
                f"there are {pages:,} pages, at most {MAX_PAGES:,} are possible: increase "
                f"--paged.page_size, which is {page_size}"
            )
        self._lengths = [
            min(page_size, rows - page * page_size)
            for rows, count in zip(self.num_embeddings, self._page_counts, strict=True)
            for page in range(count)
        ]

        groups, entries = parse_devices(devices or ["cpu"])
        if placement == "cyclic":
            group_of_page = cyclic(len(self._lengths), entries)
        else:
            loads = _loads(self.num_embeddings, page_size)
            group_of_page = balanced(self._lengths, loads, groups, entries)

        used = sorted(set(group_of_page))
        self.device_groups = tuple(groups[group] for group in used)
        self._make_blocks([used.index(group) for group in group_of_page])
        offsets = row_offsets(self._page_counts) * page_size
        self.register_buffer("_offsets", offsets, persistent=False)
        self._offsets: Tensor  # [F], the first row of each table if all pages were of full length
        self.reset_parameters()

    @classmethod
    def options_on_this_machine(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            parse_devices(options.get("devices") or ())
        except ValueError:
            return {name: value for name, value in options.items() if name != "devices"}
        return dict(options)

    def _make_blocks(self, group_of_page: Sequence[int]) -> None:
        """Allocate one block of rows per device for the pages of its group, one after another."""
        sizes, firsts = [0] * len(self.device_groups), []
        for group, length in zip(group_of_page, self._lengths, strict=True):
            firsts.append(sizes[group])
            sizes[group] += length

        self._names = []
        for group, (devices, size) in enumerate(zip(self.device_groups, sizes, strict=True)):
            names = [f"weight_{group}_{replica}" for replica in range(len(devices))]
            for replica, (name, device) in enumerate(zip(names, devices, strict=True)):
                where = None if self.follows_model else device
                block = _new_block((size, self.embedding_dim), torch.get_default_dtype(), where)
                kind = ReplicaParameter if replica else nn.Parameter
                self.register_parameter(name, kind(block))
            self._names.append(names)

        self._spans = list(zip(group_of_page, firsts, self._lengths, strict=True))
        """The device group of each page, its first row in the blocks there, and its length."""
        self.register_buffer("_group", torch.tensor(group_of_page), persistent=False)
        self.register_buffer("_first", torch.tensor(firsts), persistent=False)
        self._group: Tensor  # [pages], the device group of each page
        self._first: Tensor  # [pages], its first row in the blocks of its group
        self._made: dict[torch.device, tuple[object, Pages]] = {}

    @property
    def blocks(self) -> list[list[nn.Parameter]]:
        """The weights of each device group, one per replica, ``[rows, D]``."""
        return [[getattr(self, name) for name in names] for names in self._names]

    def pages(self, device: torch.device) -> Pages:
        """The page table as ``device`` sees it; made again when a weight has moved."""
        blocks = self.blocks
        state = [(id(block), block.data_ptr()) for group in blocks for block in group]
        known, pages = self._made.get(device, (None, None))
        if pages is None or known != state:
            pages = pages_of(blocks, self.page_size, self._group, self._first, device)
            self._made[device] = state, pages
        return pages

    def _rows_of_pages(self) -> Iterator[list[Tensor]]:
        """The rows of each page in every replica."""
        blocks = self.blocks
        for group, first, length in self._spans:
            yield [block.data[first : first + length] for block in blocks[group]]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the rows like those of dense tables."""
        if self.blocks[0][0].is_meta:  # which has sizes, but no values
            return
        pages = self._rows_of_pages()
        for table, count in zip(self.num_embeddings, self._page_counts, strict=True):
            for replicas in islice(pages, count):
                drawn = torch.empty(replicas[0].shape, dtype=replicas[0].dtype)
                nn.init.uniform_(drawn, -initial_bound(table), initial_bound(table))
                for rows in replicas:
                    rows.copy_(drawn)

    def vectors(self, tables: Tensor, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        rows = ids + self._offsets[tables]
        pages = self.pages(rows.device)
        return lookup(pages, rows, sparse=self.sparse, context=context)

    def lookup(self, ids: Tensor, context: LookupContext = NO_CONTEXT) -> Tensor:
        pages, tables = self.pages(ids.device), TableRows(self._offsets)
        return lookup_tables(pages, tables, ids, sparse=self.sparse, context=context)

    @torch.no_grad()
    def load_dense(self, weights: Sequence[Tensor]) -> None:
        """Copy the rows of dense tables, each ``[V, D]``."""
        self._check_dense(weights)
        pages = (page for weight in weights for page in weight.split(self.page_size))
        for replicas, page in zip(self._rows_of_pages(), pages, strict=True):
            for rows in replicas:
                rows.copy_(page)

    def footprint(self) -> list[dict[str, int]]:
        """Bytes of each table, those in pinned host memory as ``host``; every replica counts."""
        size = self.embedding_dim * self.blocks[0][0].element_size()
        pages = iter(self._spans)
        footprint = []
        for count in self._page_counts:
            parts = {"weights": 0, "host": 0}
            for group, _, length in islice(pages, count):
                for device in self.device_groups[group]:
                    parts["host" if device == "host" else "weights"] += length * size
            footprint.append({name: part for name, part in parts.items() if part})
        return footprint

    # The state does not depend on where the pages are ----------------------------------------

    def shards(self, tensors: Mapping[str, Tensor], *, per_row: bool = False) -> LocalShards:
        """Tensors laid out like the blocks as shards of one tensor, in the order of the tables.

        Args:
            tensors: by the name of the block: the blocks themselves, or an optimizer state with an
                entry per weight or per row.
            per_row: there is an entry per row.
        """
        like = tensors[self._names[0][0]]
        parts, row = [], 0
        for group, first, length in self._spans:
            parts.append(((row, 0), tensors[self._names[group][0]][first : first + length]))
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
        for to, (rows, *_) in zip(weight.split(self._lengths), self._rows_of_pages(), strict=True):
            to.copy_(rows)
        destination[prefix + "weight"] = weight

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if strict:
            unexpected += {n for n in state_dict if n.startswith(prefix)} - {f"{prefix}weight"}
        shape = sum(self.num_embeddings), self.embedding_dim
        weight = saved_weight(state_dict, prefix, shape, missing, errors)
        if weight is not None:
            self.load_dense(weight.split(self.num_embeddings))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Also for ``.to``: pages with devices of their own change their dtype only."""
        if self.follows_model:
            return super()._apply(fn, recurse)
        parameters, self._parameters = self._parameters, {}
        super()._apply(fn, recurse)
        self._parameters = parameters
        for devices, names in zip(self.device_groups, self._names, strict=True):
            for device, name in zip(devices, names, strict=True):
                old = getattr(self, name)
                dtype = fn(old.data[:0]).dtype
                if dtype != old.dtype:
                    old.data = _new_block(old.shape, dtype, device).copy_(old.data)
                    old.grad = None if old.grad is None else old.grad.to(dtype)
        return self

    def extra_repr(self) -> str:
        """Adds the rows on each device."""
        held = [
            f"{len(blocks[0]):,} rows on "
            f"{blocks[0].device if self.follows_model else '+'.join(devices)}"
            for devices, blocks in zip(self.device_groups, self.blocks, strict=True)
        ]
        return f"{super().extra_repr()}, page_size={self.page_size}, {', '.join(held)}"


def parse_devices(devices: Sequence[str]) -> tuple[list[DeviceGroup], list[int]]:
    """The distinct device groups in a list of devices.

    Args:
        devices: as in :class:`Paged`; every ``cpu`` counts as a group of its own.

    Returns:
        The groups, and the index of the group of each entry of the list.

    Raises:
        ValueError: there is no such device, or not on this machine.
    """
    groups: list[DeviceGroup] = []
    entries = []
    for text in devices:
        group = tuple(_device(name.strip(), text) for name in text.split("+"))
        if group not in groups or set(group) == {"cpu"}:
            groups.append(group)
            entries.append(len(groups) - 1)
        else:
            entries.append(groups.index(group))
    return groups, entries


def cyclic(pages: int, entries: Sequence[int]) -> list[int]:
    """The device group of each page: page k goes to entry k % n."""
    return [entries[page % len(entries)] for page in range(pages)]


def balanced(
    lengths: Sequence[int],
    loads: Sequence[float],
    groups: Sequence[DeviceGroup],
    entries: Sequence[int],
) -> list[int]:
    """Put hot pages where access is cheapest, and balance load and bytes among equals.

    Pages are assigned in order of falling load, each to a group with the cheapest memory that has
    not reached its share of the rows yet; among several, to the one with the least load.

    Args:
        lengths: rows of each page.
        loads: expected look-ups of each page.
        groups: the device groups.
        entries: indices of groups; a group that occurs twice has a double share.

    Returns:
        The device group of each page.
    """
    total = sum(lengths)
    capacity = [entries.count(group) * total / len(entries) for group in range(len(groups))]
    costs = [max(ACCESS_COST[name.partition(":")[0]] for name in group) for group in groups]
    rows, load = [0] * len(groups), [0.0] * len(groups)
    group_of_page = [0] * len(lengths)
    for page in sorted(range(len(lengths)), key=lambda page: -loads[page]):
        open_ = [group for group in range(len(groups)) if rows[group] < capacity[group]]
        best = min(open_, key=lambda group: (costs[group], load[group], rows[group]))
        rows[best] += lengths[page]
        load[best] += loads[page] / len(groups[best])
        group_of_page[page] = best
    return group_of_page


def _device(name: str, text: str) -> str:
    """A device's name with its index."""
    kind, _, index = name.partition(":")
    if name in ("cpu", "host"):
        return name
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise ValueError(
            f"paged.devices contains {text!r}; each must be cuda:0 (or another number), host or "
            "cpu, or several of them joined with +"
        )
    number, there = int(index or 0), torch.cuda.device_count()
    if number >= there:
        raise ValueError(
            f"paged.devices contains {text!r}, but this machine has {there or 'no'} CUDA "
            f"GPU{'s' * (there != 1)}: choose others, or none to use the model's device"
        )
    return f"cuda:{number}"


def _loads(tables: Sequence[int], page_size: int) -> list[float]:
    """The expected look-ups of each page per sample if ids are log-uniform, 0 the most frequent.

    Real ids, in order of falling frequency, are skewed about as much.
    """
    loads = []
    for rows in tables:
        ends = [math.log1p(end) for end in (*range(0, rows, page_size), rows)]
        loads += [(end - begin) / ends[-1] for begin, end in pairwise(ends)]
    return loads


def _new_block(shape: Sequence[int], dtype: torch.dtype, device: str | None) -> Tensor:
    """New memory on a device; ``host`` is plain memory where there is no GPU to read it."""
    if device != "host":
        return torch.empty(*shape, dtype=dtype, device=device)
    if not torch.cuda.is_available():
        return torch.empty(*shape, dtype=dtype)
    return mapped_tensor(shape, dtype)[1]
