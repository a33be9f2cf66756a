"""Train a DLRM whose sparse architecture is swapped by one flag: ``python train.py --emb tt``."""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml

from dlrm.config.build import build_model, build_optimizers
from dlrm.config.cli import note_plan, parse, refuse_with_resume, resumed_path
from dlrm.config.model_spec import auto_plan, model_spec
from dlrm.config.options import changed_options
from dlrm.config.schema import RunConfig
from dlrm.data import synthetic
from dlrm.data.prepare.raw_rows import keep_transform
from dlrm.distributed.interruption import Interruption
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.optim import Schedule
from dlrm.sparse_arch.table_plan import format_table_plan
from dlrm.training import metrics, profiling, report, run_directory, tracking
from dlrm.training.best_model import BestModel
from dlrm.training.checkpoint.run_checkpoints import RunCheckpoints
from dlrm.training.checkpoint.timer import CheckpointTimer
from dlrm.training.data_parallel import GradientReducer, state_bytes
from dlrm.training.fine_tuning import NewRows, Trained, auc_lost, fit, go_on
from dlrm.training.held_out import HeldOut
from dlrm.training.loaders import make_loader
from dlrm.training.prefetch import PreparedBatch
from dlrm.training.step import TrainStep
from dlrm.utils.device import pick_device
from dlrm.utils.program import exit_status


class Run:
    """One training run: its parts, built from the configuration, and the loop over them."""

    def __init__(self, config: RunConfig, resolved: str, world: World) -> None:
        self.config, self.resolved, self.world = config, resolved, world
        self.options = yaml.safe_load(resolved)
        self.device = world.join(pick_device(config.device))
        new = Path(config.output) / (config.name or run_directory.new_name(config.emb))
        self.checkpoints = RunCheckpoints(new, config.resume, world, keep=config.keep_checkpoints)
        self.directory, resumed = self.checkpoints.directory, self.checkpoints.resumed
        if config.data == RunConfig.data and world.first:
            synthetic.write_demo(config.data)
        world.wait()
        loader = partial(make_loader, config.data, world, self.device)
        options = asdict(config.loader) | {"seed": config.seed}
        self.train_data = loader("train", config.batch_size, options)
        self.meta = self.train_data.meta
        splits = filter(self.meta.has_rows, ("val", "test"))  # opened now, so that damage is seen
        loaders = {s: loader(s, config.eval_batch_size, options) for s in splits}
        self.spec = model_spec(config, self.meta)
        if resumed:
            resumed.require_spec(self.spec)
        torch.manual_seed(config.seed)
        self.model, self.sharding = build_model(config, self.spec, self.meta, world)
        self.trained: Trained | None = None  # the model of --init_from, until it is evaluated
        if config.init_from and not resumed:
            start = NewRows(config.new_rows, config.seed)
            self.trained = fit(self.model, config.init_from, config.data, self.meta, world, start)
        self.optimizers = build_optimizers(config.optim, self.model)
        optimizer_bytes = state_bytes(self.model, self.optimizers[1], world)
        self.sizes = report.embedding_sizes(self.model, optimizer_bytes)
        self.schedule = Schedule(self.optimizers, **config.optim.schedule)
        self.step = TrainStep(
            self.model,
            self.optimizers,
            precision=config.precision,
            clip_norm=config.optim.clip_norm,
            mode=config.step,
            deterministic=config.deterministic,
            reducer=GradientReducer.of(self.model, self.optimizers[1], world),
        )
        self.interruption = Interruption(world)
        seen = partial(loader, "train", config.batch_size, options | {"shuffle": False})
        self.held_out = HeldOut(self.model, loaders, seen, self.interruption, config.precision)
        self.steps, self.epoch = 0, 0
        epoch = len(self.train_data)
        self.last_step, self.eval_every = config.steps_for(epoch), config.eval_every_for(epoch)
        self.best = BestModel(self.eval_every, config.patience_for(epoch // self.eval_every))
        self.fitted: dict[str, float] = {}  # metrics after --init_from, before any step
        self.validated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the last
        self.loss: torch.Tensor | None = None  # of the last step
        self.shown: dict[str, str] = {}  # in the progress line
        self.clock = profiling.Clock(self.train_data, resumed.state.clock if resumed else {})
        parts = self.model, self.optimizers, self.train_data
        self.checkpoints.attach(*parts, spec=self.spec, config=self.options)
        if resumed:
            state = self.checkpoints.restore(config.batch_size)
            self.steps, self.epoch, self.fitted = state.steps, state.epoch, state.fitted
            self.best.auc, self.best.step = state.best, state.best_step
            self.validated, self.schedule.fine_tune = state.validated, state.fine_tune
            self.step.losses.load(state.losses)
        self.checkpoints.begin()
        step, place = self.steps if resumed else None, self.directory
        self.finished = world.from_first(lambda: tracking.finished(place, step, resolved))
        active = world.first and not self.finished
        self.tracker = tracking.Tracker(place, step=step, active=active)

    def train(self) -> dict[str, float]:
        """Train, evaluate, and return the final metrics."""
        config, data, silent = self.config, self.train_data, not self.world.first
        if not silent:
            self._print_plan()
        if self.finished:  # and resumed with the same options: nothing is left to do
            report.print_summary(self.finished, self.directory, silent=silent)
            return self.finished
        if self.trained:
            self._begin_fine_tuning(self.trained)
        self.trained = None
        if self.steps % self.eval_every == 0 < self.steps:  # interrupted before or in it
            self._validate()
        self.last_step = self.best.last_step(self.validated[0], self.last_step, silent=silent)
        traced = config.profile and self.world.first
        profiler = profiling.Profiler(self.directory, self.device, active=traced)
        self.model.train()
        timer = CheckpointTimer(config.checkpoint_every, self.world, self.steps)
        done, last = data.samples(self.steps), data.samples(self.last_step)
        with profiling.progress_bar(last, done, self.step.mode, silent=silent) as progress:
            self.clock.start()
            for prepared in self._batches():
                self.schedule.set(self.steps)
                self.steps += 1
                logging = self.steps % config.log_every == 0
                out = self.step(prepared, norms=logging)  # forward, loss, backward, update
                self.loss = out["loss"]
                self.clock.samples += prepared.batch.total_size
                progress.update(prepared.batch.total_size)
                profiler.step()
                if self.steps % config.populate_every == 0:
                    renewed = self.model.sparse_arch.renew_caches(self.optimizers[1])
                    self.tracker.log(self.steps, renewed)
                if logging:
                    self._log(out)
                if self.steps % self.eval_every == 0:
                    with self.clock.paused():
                        self._validate()
                    self.last_step = self.best.last_step(self.steps, self.last_step, silent=silent)
                elif config.checkpoint and timer.due(self.steps):
                    with self.clock.paused():
                        self._save()
                if logging or self.steps == self.validated[0]:
                    progress.set_postfix(dict(sorted(self.shown.items())), refresh=False)
                self.interruption.check(self._stop)
            self.clock.stop()
        self.tracker.texts(profile=profiler.close())
        return self._finish()

    def _batches(self) -> Iterator[PreparedBatch]:
        """The batches of the epochs that are left, up to the last step."""
        while self.steps < self.last_step:
            self.train_data.set_epoch(self.epoch)
            for prepared in self.step.prefetcher(self.train_data):
                yield prepared
                if self.steps >= self.last_step:
                    return
            self.epoch += 1

    def _log(self, out: dict[str, torch.Tensor]) -> None:
        out = out | {"loss": self.step.losses.take()}  # the mean since the last log
        values = {f"train/{name}": float(value) for name, value in out.items()}
        values |= self.model.sparse_arch.cache_stats()
        if self.steps < self.last_step:  # those of the last step are final metrics
            values |= self.clock.lap() | profiling.peak_memory(self.device)
        self.tracker.log(self.steps, values | self.schedule.rates())
        self.shown["loss"] = f"{values['train/loss']:.4f}"
        metrics.require_finite(values["train/loss"], self.steps)

    def _validate(self) -> dict[str, float]:
        """Evaluate on validation, and keep the latest and the best state."""
        if self.validated[0] != self.steps:
            self._keep(self._evaluate("val"))
        return self.validated[1]

    def _keep(self, values: dict[str, float]) -> None:
        self.validated = self.steps, values
        if values:
            self.tracker.log(self.steps, tracking.named("val", values))
            self.shown["val AUC"] = f"{values['auc']:.4f}"
        if not self.held_out.diverged:
            better = self.best.offer(self.steps, values)
            if self.config.checkpoint:
                self._save(better=better)

    def _begin_fine_tuning(self, trained: Trained) -> None:
        """Evaluate the fitted tables, which may be the best ones, and choose learning rates."""
        self.fitted = tracking.named("fitted", self._evaluate("test"))
        self.tracker.log(0, self.fitted)
        before, after = self._evaluate("val", trained.model), self._evaluate("val")
        lost, epochs = auc_lost(before, after), self.last_step / len(self.train_data)
        factor, anew = go_on(self.model, trained.data, self.config.data, lost, epochs)
        self.schedule.fine_tune = self.config.optim.fine_tune or factor
        report.print_fine_tuning(lost, self.schedule.fine_tune, anew, silent=not self.world.first)
        self._keep(self._evaluate("val") if anew else after)

    def _evaluate(self, split: str, model: DLRM | None = None) -> dict[str, float]:
        return self.held_out.evaluate(split, self.steps, self._stop, model=model)

    def _finish(self) -> dict[str, float]:
        val, test = self._validate(), self._evaluate("test")
        if self.held_out.diverged:
            self.tracker.log(self.steps, tracking.named("test", test))
            raise ValueError(self.held_out.diverged)
        final = {"best_step": float(self.best.step)} if 0 <= self.best.step < self.steps else {}
        if final and self.config.checkpoint:  # the weights of that step are the result
            final |= tracking.named("last", test)
            val, test = self.checkpoints.load_best(self.model), self._evaluate("test")
        final |= tracking.named("test", test)
        best = {f"test/best_possible_{k}": v for k, v in self.meta.planted.get("test", {}).items()}
        final |= best | self.fitted | self.sizes | self.clock.total()
        final |= profiling.peak_memory(self.device)
        self.tracker.log(self.steps, final)
        final |= tracking.named("val", val)  # logged when it was evaluated
        about = report.about(self.steps, self.meta, self.spec["plan"])
        changed = changed_options(self.options, available())
        self.tracker.finish(self.options, final, changed, **about)
        report.print_summary(final, self.directory, silent=not self.world.first)
        return final

    def _print_plan(self) -> None:
        run_directory.write_config(self.directory, self.resolved)
        keep_transform(self.config.data, self.directory / run_directory.PREPARATION)
        tables = format_table_plan(self.meta.tables, self.meta.cardinalities, self.spec["plan"])
        sharding = self.sharding.text if self.sharding else ""
        self.tracker.texts(config=self.resolved, tables=tables, sharding=sharding)
        self.tracker.log(self.steps, self.sizes)
        note_plan(self.config, self.spec, self.sizes["embeddings/compression"])
        opening = report.opening(self.config.emb, self.model, self.meta.splits, self.sizes)
        shown = sharding, auto_plan(self.config, self.meta, self.spec, tables), opening
        print(*filter(None, shown), sep="\n")

    def _save(self, *, better: bool = False) -> None:
        if self.loss is not None:  # a diverged state must not replace a good one
            metrics.require_finite(float(self.loss), self.steps)
        self.checkpoints.save(
            unused=self.step.prefetcher.samples_held,
            better=better,
            steps=self.steps,
            epoch=self.epoch,
            best=self.best.auc,
            best_step=self.best.step,
            fitted=self.fitted,
            fine_tune=self.schedule.fine_tune,
            validated=self.validated,
            clock=self.clock.state(),
            losses=self.step.losses.state(),
        )

    def _stop(self) -> None:
        """Leave an interrupted run so that it can be resumed."""
        if (
            self.config.checkpoint
            and self.checkpoints.saved != self.steps
            and not self.held_out.diverged
        ):
            self._save()
        self.tracker.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    world, hint = World.from_environment(), partial(str, "nothing was changed")

    def work() -> None:
        nonlocal hint
        world.rendezvous()
        saved = run_directory.saved_options(resumed_path(arguments))
        with world.print_once():
            config, resolved = parse([*arguments, *saved], available())
        refuse_with_resume(arguments, config.resume)
        with profiling.out_of_memory_advice(config.data, config.model.embedding_dim):
            run = Run(config, resolved, world)
            hint = partial(run_directory.resume_hint, run.directory, saving=config.checkpoint)
            run_directory.write_to(run.directory, run.train)

    threading.excepthook = tracking.quiet_tensorboard_thread
    try:
        return exit_status(work, lambda: f"interrupted; {hint()}", world.print_error_once)
    finally:
        world.leave()


if __name__ == "__main__":
    sys.exit(main())
