"""The loaders of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.data.batch import Batch
from dlrm.data.days import require_same_columns
from dlrm.data.groups import Groups, read_groups
from dlrm.data.loader import BatchLoader
from dlrm.data.schema import META_FILE, Meta
from dlrm.data.shuffle import Shard
from dlrm.distributed.world import World

HELD_OUT = ("val", "test")
"""The splits that are not trained on."""


class HeldOutRows(NamedTuple):
    """Rows on which a model is evaluated."""

    loaders: Mapping[str, BatchLoader]
    """Of the splits, by name."""
    groups: Mapping[str, Groups]
    """The group of each of their rows, if AUC is to be measured by group."""
    seen: Callable[..., BatchLoader]
    """Opens a loader of rows that the model was trained on, with options such as its shuffle."""


class RunLoaders(NamedTuple):
    """Opens the loaders of a run, each for one of several processes."""

    world: World
    batch_size: int
    """Training samples per batch, over all processes."""
    eval_batch_size: int
    """The same in evaluations."""
    negatives: float
    """Share of the rows with label 0 that are trained on."""
    group: str | None
    """Column to measure AUC by."""
    options: Mapping[str, Any]
    """More arguments of ``BatchLoader``."""

    def training(
        self, data: str, epochs: int, follow: str | None = None
    ) -> BatchLoader | DayLoader:
        """The loader of the training rows of a prepared directory.

        Args:
            data: the directory.
            epochs: how often they are read.
            follow: if it is given, the days next to the directory follow, each read once.

        Raises:
            ValueError: the processes can't share a batch evenly, or there is none to train on; or
                as ``BatchLoader``.
        """
        if follow is not None:
            return DayLoader(Path(data), partial(self._open, negatives=self.negatives))
        return self._open(data, negatives=self.negatives, epochs=epochs)

    def held_out(self, data: str, meta: Meta) -> HeldOutRows:
        """The validation and the test rows of a prepared directory, where there are any."""
        loaders = {split: self._in_full(data, split) for split in filter(meta.has_rows, HELD_OUT)}
        groups = read_groups(data, meta, loaders, self.group)
        return HeldOutRows(loaders, groups, partial(self._open, data))

    def coming(self, data: str, meta: Meta, before: str) -> HeldOutRows:
        """The training rows of a day, as the split ``day``, and those of the day before it."""
        groups = read_groups(data, meta, ["train"], self.group)
        of_day = {"day": groups["train"]} if groups else {}
        seen = partial(self._open, before)
        return HeldOutRows({"day": self._in_full(data, "train")}, of_day, seen)

    def _in_full(self, data: str, split: str) -> BatchLoader:
        size = self.world.share(self.eval_batch_size, even=False)
        return self._loader(data, split, size, shuffle=False, drop_last=False)

    def _open(self, data: str, **options: Any) -> BatchLoader:
        size = self.world.share(self.batch_size, even=True)
        loader = self._loader(data, "train", size, **options)
        if not len(loader):
            raise ValueError("--loader.drop_last leaves no batch: lower --batch_size")

        # The free memory of each process differs a little.
        loader.windows = max(self.world.sizes(loader.windows, loader.device))
        return loader

    def _loader(self, data: str, split: str, batch_size: int, **options: Any) -> BatchLoader:
        return BatchLoader(
            data,
            split,
            batch_size=batch_size,
            shard=Shard(rank=self.world.rank, world_size=self.world.size),
            **{**self.options, **options},
        )


class DayLoader:
    """The training rows of one day after another, each once: an epoch is a day.

    Whatever it does not have itself is that of the :class:`~dlrm.data.loader.BatchLoader` of the
    current day.

    Args:
        first: prepared directory of the day that is read first, next to which the others are.
        open_day: opens the loader of a prepared directory.

    Attributes:
        path: of the current day.
    """

    def __init__(self, first: Path, open_day: Callable[[str], BatchLoader]) -> None:
        self._open_day = open_day
        self.path, self._first = first, first
        self._loader = open_day(str(first))
        self._first_meta = self._loader.meta
        self._waited = 0.0
        self._batches_before = 0  # of earlier days
        self._samples_before: float = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def open(self, path: Path, epoch: int) -> None:
        """Go to the day in ``path``.

        Raises:
            ValueError: it has other columns or ids than the first one; or as ``BatchLoader``.
        """
        self._loader.close()
        loader = self._open_day(str(path))
        require_same_columns(self._first, self._first_meta, path, loader.meta)
        ended = self._batches_before + len(self._loader)
        self._samples_before = self.samples(ended)
        self._batches_before = ended
        self._waited = self.wait_seconds
        self.path, self._loader = path, loader
        self._loader.set_epoch(epoch)

    @property
    def begun(self) -> bool:
        """Whether batches of the current day were read."""
        return bool(self._loader.state_dict()["position"])

    @property
    def wait_seconds(self) -> float:
        """How long the consumer has waited for batches of all days."""
        return self._waited + self._loader.wait_seconds

    def __len__(self) -> int:
        """Batches of the current day."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)

    def samples(self, batches: int) -> float:
        """Number of samples in the first batches of all days, as far as those are known: infinite
        beyond the current one.
        """
        batches -= self._batches_before
        if batches > len(self._loader):
            return math.inf
        rows = min(batches * self._loader.global_batch, self._loader.rows)
        return self._samples_before + rows

    def set_epoch(self, epoch: int) -> None:
        """Days are opened by :meth:`open`."""
        assert epoch == self.epoch

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """See :meth:`BatchLoader.state_dict`; the order names the day."""
        state = self._loader.state_dict(unused=unused)
        before = [self._batches_before, self._samples_before]
        return state | {"order": state["order"] | {"day": self.path.name, "before": before}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the day and at the position of ``state``.

        Raises:
            ValueError: there is no such day any more; or as ``BatchLoader``.
        """
        day = state["order"].get("day")
        path = self._first.parent / str(day)
        if not isinstance(day, str) or Path(day).name != day or not (path / META_FILE).is_file():
            raise ValueError(
                f"the run stopped in day {day!r:.100}, which is not in {self._first.parent} any "
                "more: restore it there"
            )
        self.open(path, state["epoch"])
        self._loader.load_state_dict(state)
        self._batches_before, self._samples_before = state["order"]["before"]


TrainingData = BatchLoader | DayLoader
"""The training rows of a run."""
