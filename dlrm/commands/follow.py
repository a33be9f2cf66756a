"""A training run that follows days: ``dlrm train --follow DIR``."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

from dlrm.commands.train import Run
from dlrm.config.schema import RunConfig
from dlrm.data.days import day_names, is_empty, is_later, next_day
from dlrm.data.schema import META_FILE, Meta
from dlrm.distributed.world import World
from dlrm.training import tracking
from dlrm.training.loaders import DayLoader


class FollowingRun(Run):
    """A run in which an epoch is a day: it evaluates each before it trains on it, saves after it,
    and waits for the next one. Its latest state is the result.
    """

    train_data: DayLoader

    def __init__(self, config: RunConfig, resolved: str, world: World, began: float = 0) -> None:
        super().__init__(config, resolved, world, began)
        self._past = {Path(config.data).name, *(x["day"] for x in self.tracker.logged_days())}
        if self.train_data.path != Path(config.data):  # resumed in a later day
            self._held_out_of_day()

    @property
    def _days(self) -> Path:
        return self.train_data.path.parent

    def _held_out_of_day(self) -> None:
        """Evaluate on the validation and test rows of the current day from now on."""
        data, meta = str(self.train_data.path), self.train_data.meta
        self.held_out.use(self.loaders.held_out(data, meta))

    # A day ------------------------------------------------------------------------------------

    def _begin_epoch(self) -> bool:
        before, config = self.train_data.path, self.config
        if self.train_data.epoch < self.progress.epoch:
            self._validate()  # and save the state after the day before
            if config.follow_export:
                self._export(Path(config.follow_export))
            with self.clock.part("data_wait"):
                day = self._next_day()
            if day is None:
                self.validations.last_step = self.steps
                return False
            self.train_data.open(day, self.progress.epoch)

        # A resumed run has evaluated its day.
        if not self.train_data.begun:
            self._evaluate_day(before)
        return True

    def _evaluate_day(self, before: Path) -> None:
        """Evaluate the model on the rows that it is about to be trained on.

        Raises:
            ValueError: it has diverged.
        """
        day, config = self.train_data.path, self.config
        text = f"day {day.name}: {self.train_data.rows:,} rows"
        others = sum(
            part.rows for name, part in self.train_data.meta.splits.items() if name != "train"
        )
        text += f" (and {others:,} of other splits)" if others else ""
        if self.steps or config.init_from:
            self.held_out.use(self.loaders.coming(str(day), self.train_data.meta, str(before)))
            values = self._evaluate("day")

            # In the entry of the step that follows, which goes if that step is trained again.
            self.tracker.log(self.steps + 1, tracking.named("day", values), day=day.name)
            if self.held_out.diverged:
                raise ValueError(f"{day}: {self.held_out.diverged}")
            auc = values["auc"]
            shown = "no AUC, as all labels are equal," if math.isnan(auc) else f"AUC {auc:.4f}"
            text += f", {shown} before training on them"
            self._held_out_of_day()
        self._say(text)

    def _export(self, directory: Path) -> None:
        """Export the state after a day as soon as it is saved, while training continues."""
        # They bring PyTorch's compiler, which takes a second.
        from dlrm.export.days import export_day, in_own_process

        run, day = self.checkpoints.run, self.train_data.path.name
        arguments = self.directory, run, self.steps, directory, day
        self.checkpoints.writer.then(partial(in_own_process, export_day, *arguments))

    # The next day -----------------------------------------------------------------------------

    def _next_day(self) -> Path | None:
        """Wait for the next day; None if there is none, and the run is not to wait."""
        wait, after, noted = self.config.follow_wait, self.train_data.path.name, False
        self._past.add(after)
        while True:
            # The first process looks, so that all go to the same day.
            path, complete = self.world.from_first(partial(next_day, self._days, after))
            if path is not None and complete:
                after = path.name
            self.world.from_first(partial(self._note_left_out, after))
            if path is not None and complete:
                if _has_rows(path):
                    return path
                self._say(f"day {after}: no rows, it is left out")
                continue

            # None is ready: say so once, and wait or end.
            missing = f"{path} has no {META_FILE} yet (prepare it, or remove it)"
            what = missing if path else f"no day after {after}"
            if not wait:
                self._say(f"{what}: the run ends; --resume {self.directory} continues it")
                return None
            if not noted:
                self._say(f"{what}: looking again every {wait} s")
                noted = True
            self._pause(wait)

    def _note_left_out(self, current: str) -> None:
        """Name the days before the current one that were not complete when their turn came:
        while the run was stopped, too.
        """
        for name in day_names(self._days):
            if name in self._past or not is_later(current, name):
                continue
            self._past.add(name)
            day = self._days / name
            if not (day / META_FILE).is_file() or not is_empty(day):
                why = f"it was not complete when {current} was read, and days are read in order"
                self._say(f"day {name}: left out, as {why}")

    def _pause(self, seconds: int) -> None:
        for _ in range(seconds):
            time.sleep(1)
            self.checkpoints.writer.check()
            self.held_out.interruption.check(self._stop)


def _has_rows(day: Path) -> bool:
    """Whether a day has training rows; False for one without any rows.

    Raises:
        ValueError: all of its rows are for validation or test.
    """
    if is_empty(day):
        return False
    if not Meta.read(day, allow_outside=True).has_rows("train"):
        raise ValueError(
            f"{day} has no training rows, only those of other splits: prepare it with --split 1 0 0"
        )
    return True
