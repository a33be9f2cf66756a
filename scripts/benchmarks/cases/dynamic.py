"""Time tables for any ids on a GPU: a whole step, with and without new ids, and the index alone.

    python scripts/benchmarks/run.py dynamic --output benchmarks/dynamic_h200.json

The shape is that of NVIDIA's dynamicemb and of FBGEMM: 1,048,576 look-ups from a power law of
exponent 1.05 over 24 million ids, dim 128, fp32, forward, backward and update, captured; and ten
tables that share the ids and the look-ups. dynamicemb takes 1.92 ms with SGD and 2.19 ms with Adam
on an H100 (10 tables, all ids known), FBGEMM's static table 0.96 and 1.35. ``dense`` here is the
same step with a static table.

``known``: every id has a row, at a load of 0.9. ``new``: 5% of the look-ups are of ids never seen
before; the table is full, so that each of them evicts another. ``index``: only the index, which
finds all ids, or gives slots to ids that are all new, in empty tables or in full ones. ``host``:
both steps of one table with rows in host memory, of which the GPU caches 10%. ``kaggle``: steps of
the Kaggle model with such tables, and with dense ones.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrm.data.schema import HASHED
from dlrm.embeddings import Embedding, build
from dlrm.embeddings.dynamic import Dynamic
from dlrm.kernels.dynamic.hashing import mix
from dlrm.optim import RULES, RowOptimizer
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import EXPONENT, power_law
from scripts.benchmarks.cases.offload import measure_windows
from scripts.benchmarks.cases.step import BUDGET, Case, measure_one

NEEDS_GPU = True
SMALL = "--parts tables host --rows 2000 --lookups 320 --dim 8 --rules sgd --tables 2 --windows 2"
INPUTS = 4  # different batches in rotation
LOAD = 0.9
NEW = 0.05  # of the look-ups
SHARE = 0.1  # of the rows in host memory that the GPU caches
CHUNK = 1 << 20  # ids that are placed at a time
FIRST_NEW = 1 << 40  # ids from here on were never seen
KAGGLE = Case(
    model="kaggle", kind="dynamic", rule="sgd", dtype="fp32", precision="bf16", mode="auto",
    batch=16384, ids="skewed",
)  # fmt: skip
PARTS = ("tables", "host", "kaggle")


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--rows", type=count_arg, default=24_000_000, help="ids of all tables")
    add("--lookups", type=count_arg, default=1 << 20)
    add("--dim", type=count_arg, default=128)
    add("--tables", type=count_arg, nargs="+", default=[1, 10])
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--windows", type=count_arg, default=20, help="that fill the cache of rows on the host")
    add("--rules", nargs="+", choices=RULES, default=["sgd", "adam"])


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure the parts that were asked for."""
    torch.manual_seed(0)
    record.note(unit="ms", rows=options.rows, lookups=options.lookups, exponent=EXPONENT)
    for tables in options.tables if "tables" in options.parts else ():
        for rule in options.rules:
            row = {"tables": tables, "rule": rule, "dim": options.dim}
            record.add(row | dense_step(options, tables, rule) | steps(options, tables, rule))
            harness.release()
        record.add({"tables": tables} | index_alone(options, tables), to="index")
        harness.release()
    for rule in options.rules if "host" in options.parts else ():
        record.add({"rule": rule, "share": SHARE} | host_steps(options, rule), to="host")
        harness.release()
    for size, kind in itertools.product((2048, 16384, 65536), ("dense", "dynamic")):
        if "kaggle" in options.parts:
            case = replace(KAGGLE, kind=kind, batch=size)
            given = argparse.Namespace(device=options.device, cap=None, budget=BUDGET)
            record.add(measure_one(case, given), to="kaggle")
            harness.release()


def draw(options: argparse.Namespace, tables: int, scrambled: bool) -> list[Tensor]:
    """Batches ``[F, B]`` of ids of a power law; scrambled ones have 64 bits."""
    shape, rows = (tables, options.lookups // tables), options.rows // tables
    drawn = [
        power_law(rows, options.lookups, options.device)[: shape[0] * shape[1]]
        for _ in range(INPUTS)
    ]
    return [(mix(ids + 1) if scrambled else ids).view(shape) for ids in drawn]


def works_of(
    group: Embedding, rule: str, batches: list[Tensor], change: Callable[[Tensor], object]
) -> list[Callable[[], None]]:
    """A step for each batch: forward, backward and update."""
    optimizer = RowOptimizer(group.parameters(), rule, lr=0.01)
    shape = (batches[0].shape[1], len(batches[0]), group.embedding_dim)
    grad = torch.randn(shape, device=batches[0].device)

    def step(ids: Tensor) -> None:
        change(ids)
        group(ids).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return [partial(step, ids) for ids in batches]


def dense_step(options: argparse.Namespace, tables: int, rule: str) -> dict[str, float]:
    """The step of static tables."""
    with torch.device(options.device):
        sizes = [options.rows // tables] * tables
        group = build("dense", sizes, options.dim, check_ids=False)
    works = works_of(group, rule, draw(options, tables, scrambled=False), id)
    return {"dense": harness.captured_milliseconds(works)}


def filled(
    options: argparse.Namespace, tables: int, load: float, share: float | None = None
) -> Dynamic:
    """Dynamic tables, to whose ids others are added until they have so many of their slots."""
    rows = options.rows // tables
    with torch.device(options.device):
        sizes, room = [HASHED] * tables, int(rows / LOAD)
        group = Dynamic(sizes, options.dim, rows=room, cache_share=share, check_ids=False)
        ids = mix(torch.arange(1, rows + 1))
    for part in ids.split(max(1, CHUNK // tables)):
        group.place(part.expand(tables, -1))
    extra, begin = sum(group.num_slots) - rows * tables, -(2**40)
    if load > LOAD:  # some find their buckets full and evict others
        with torch.device(options.device):
            more = torch.arange(begin, begin + 2 * extra // tables)
        for part in more.split(max(1, CHUNK // tables)):
            group.place(part.expand(tables, -1))
    return group


def steps(options: argparse.Namespace, tables: int, rule: str) -> dict[str, float]:
    """The steps of dynamic tables, all ids known, and some of them new."""
    group = filled(options, tables, LOAD)
    found = {"load": group.id_counts()["inserted"] / sum(group.num_slots)}
    batches = draw(options, tables, scrambled=True)
    before = group.id_counts()
    found["known"] = harness.captured_milliseconds(works_of(group, rule, batches, id))
    after = group.id_counts()
    looked_up = after["found"] - before["found"]
    rest = after["inserted"] - before["inserted"] + after["not_placed"] - before["not_placed"]
    # At this load a rare id finds its buckets full, and has a shared row.
    harness.require(rest <= 1 + 0.001 * looked_up, f"{rest} look-ups of known ids found no row")
    del group
    harness.release()

    group = filled(options, tables, 1.0)
    before = group.id_counts()
    renew = Renewal(batches[0], NEW)
    found["new"] = harness.captured_milliseconds(works_of(group, rule, batches, renew))
    after = group.id_counts()
    arrived = after["inserted"] - before["inserted"]
    found["evicted_share"] = (after["evicted"] - before["evicted"]) / max(arrived, 1)
    return found


def host_steps(options: argparse.Namespace, rule: str) -> dict[str, Any]:
    """Steps of one table with rows in host memory, all ids known, and some of them new."""
    found: dict[str, Any] = {}
    for name, load in (("known", LOAD), ("new", 1.0)):
        group = filled(options, 1, load, SHARE)
        batch = draw(options, 1, scrambled=True)[0]
        renew = Renewal(batch, NEW)

        def draw_window(
            size: int, load: float = load, renew: Renewal = renew, count: int = batch.numel()
        ) -> list[Tensor]:
            drawn = [power_law(options.rows, count, options.device) for _ in range(size)]
            window = [mix(ids + 1)[None] for ids in drawn]
            for ids in window if load > LOAD else ():
                renew(ids)
            return window

        of_window = measure_windows(group, rule, draw_window, batch.numel(), options.windows)
        found |= {f"{name}_{key}": value for key, value in of_window.items()}
        counts = group.id_counts()
        harness.require(counts["not_placed"] <= 0.01 * counts["found"], "ids found no room")
        del group, batch, renew, draw_window
        harness.release()
    return found


class Renewal:
    """Replaces a part of the ids of a batch by ids never seen before, each time others."""

    def __init__(self, like: Tensor, share: float) -> None:
        self.count = max(1, round(share * like.shape[1]))
        self.next = torch.arange(len(like) * self.count, device=like.device).view(len(like), -1)
        self.next += FIRST_NEW

    def __call__(self, ids: Tensor) -> None:
        ids[:, : self.count] = self.next
        self.next += self.next.numel()


def index_alone(options: argparse.Namespace, tables: int) -> dict[str, float]:
    """Billions of ids a second that the index finds, inserts, and inserts by evicting others."""
    rates = {}
    for name, load, share in (("found", LOAD, 0.0), ("inserted", 0.0, 1.0), ("evicted", 1.0, 1.0)):
        small = argparse.Namespace(**vars(options) | {"dim": 1})
        group = filled(small, tables, load)
        ready = group.reset_parameters if name == "inserted" else None
        batches = draw(options, tables, scrambled=True)
        renew = Renewal(batches[0], share)
        work = partial(place_new, group, renew) if share else partial(find, group)
        works = [partial(work, ids) for ids in batches]
        rates[name] = batches[0].numel() / harness.captured_milliseconds(works, ready) / 1e6
        del group, work, works, ready
        harness.release()
    return {f"G_{name}_per_second": rate for name, rate in rates.items()}


def find(group: Dynamic, ids: Tensor) -> None:
    """Find ids ``[F, B]``."""
    group.local_rows(group._tables[:, None], ids)


def place_new(group: Dynamic, renew: Renewal, ids: Tensor) -> None:
    """Give rows to ids ``[F, B]`` that are all new."""
    renew(ids)
    group.place(ids)
