"""Which page of a table lies where, within one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
