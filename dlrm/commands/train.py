"""Train a DLRM whose sparse architecture is swapped by one flag: ``python train.py --emb tt``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from tqdm import tqdm

from dlrm.config import pace
from dlrm.config.build import build_model, build_optimizers, weight_odds
from dlrm.config.cli import parse, refuse_with_resume, resumed_path
from dlrm.config.model_spec import ModelSpec, auto_plan, model_spec, note_plan
from dlrm.config.options import changed_options
from dlrm.config.schema import RunConfig
from dlrm.data import synthetic
from dlrm.data.frequencies import IdStatistics
from dlrm.data.prepare.raw_rows import keep_transform
from dlrm.data.schema import Meta
from dlrm.distributed.interruption import Interruption
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.optim import Schedule
from dlrm.sparse_arch.table_plan import format_table_plan
from dlrm.training import metrics, profiling, report, run_directory, tracking
from dlrm.training.best_model import Validations
from dlrm.training.checkpoint.run_checkpoints import RunCheckpoints
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.fine_tuning import Trained, auc_lost, fit, rates_after_fit
from dlrm.training.held_out import HeldOut
from dlrm.training.loaders import RunLoaders
from dlrm.training.modes import hash_ahead, seed_dropout
from dlrm.training.prefetch import PreparedBatch
from dlrm.training.step import TrainStep
from dlrm.utils.device import pick_device
from dlrm.utils.program import exit_status


def train_on_batch(step: TrainStep, batch: PreparedBatch, norms: bool) -> dict[str, torch.Tensor]:
    """Train on a batch. In mode ``graph``, this is captured and replayed as one CUDA graph."""
    with step.context(batch, norms) as context:
        logits = step.forward(batch.batch, context)
        loss = step.loss(logits, batch.batch)
        out = step.backward(loss, batch.batch, context, norms=norms)
        step.update()
    return out


class Run:
    """One training run: its parts, built from the configuration, and the loop over them."""

    def __init__(
        self, config: RunConfig, resolved: str, world: World, began: float = 0, silent: bool = False
    ) -> None:
        self.config, self.options = config, yaml.safe_load(resolved)
        self.world = world
        self.silent = silent or not world.first
        device = world.join(pick_device(config.device))
        hashing = hash_ahead(device)
        new = Path(config.output) / (config.name or run_directory.new_name(config.emb))
        keep, period = config.keep_checkpoints, config.checkpoint_every
        self.checkpoints = RunCheckpoints(new, config.resume, world, keep=keep, every=period)
        resumed = self.checkpoints.resumed

        if config.data == RunConfig.data and world.first:
            synthetic.write_demo(config.data)
        world.wait()
        meta = Meta.read(config.data, allow_outside=config.loader.allow_outside)
        size = pace.batch_size(config, meta, world.size, self.checkpoints.batch_size)
        sizes = size, config.eval_batch_size
        options = asdict(config.loader) | {"seed": config.seed, "device": device}
        self.loaders = RunLoaders(world, *sizes, config.negatives, config.group, options)
        data = config.data, pace.epochs(config, meta), config.follow
        self.train_data = self.loaders.training(*data)
        held_out = self.loaders.held_out(config.data, meta)  # opened now, so that damage is seen

        ids = IdStatistics(config.data, meta)
        spec = model_spec(config, meta, ids)
        if resumed:
            resumed.require_spec(spec)
        torch.manual_seed(config.seed)
        self.model, sharding = build_model(config, spec, meta, world, ids.counts)
        self.trained: Trained | None = None  # the model of --init_from, until it is evaluated
        if config.init_from and not resumed:
            given = self.model, config.init_from, config.data, meta, world
            self.trained = fit(*given, new_rows=config.new_rows, seed=config.seed)

        optimizers, odds = build_optimizers(config.optim, self.model), weight_odds(config, meta)
        self.schedule = Schedule(optimizers, **config.optim.schedule)
        hashing.join()
        self.step = TrainStep(
            self.model,
            optimizers,
            precision=config.precision,
            clip_norm=config.optim.clip_norm,
            mode=config.step,
            deterministic=config.deterministic,
            reducer=GradientReducer.of(self.model, optimizers[1], world),
            odds=odds / config.negatives,
        )

        evaluated = self.model, config.precision, config.calibrate, odds
        self.held_out = HeldOut(*evaluated, Interruption(world), held_out)
        self.validations = Validations(*pace.validations(config, meta, len(self.train_data)))
        before = resumed.state.clock if resumed else {}
        self.clock = profiling.Clock(self.train_data, self.step.graphs, began, before)

        parts = self.model, optimizers, self.train_data, spec, self.options
        self.progress = self.checkpoints.begin(*parts, batch_size=size)
        self.schedule.fine_tune = self.progress.fine_tune
        self.step.losses.load(self.progress.losses)

        step, path = self.progress.steps if resumed else None, self.checkpoints.directory
        self.finished = world.from_first(lambda: tracking.finished(path, step, self.options))
        self.tracker = tracking.Tracker(path, step=step, active=world.first and not self.finished)
        self._print_plan(resolved, spec, sharding.text if sharding else "")

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.checkpoints.directory

    @property
    def steps(self) -> int:
        """Steps that the model was trained for."""
        return self.progress.steps

    def train(self) -> dict[str, float]:
        """Train, evaluate, and return the final metrics."""
        config, data = self.config, self.train_data
        if self.finished:  # and resumed with the same options: nothing is left to do
            self._say(report.summary(self.finished, self.directory, kept=config.checkpoint))
            return self.finished
        if self.trained:
            self._begin_fine_tuning(self.trained)
        self.trained = None
        if self.validations.due(self.steps):  # interrupted before or in it
            self._validate()
        self._say(self.validations.stop_early(self.progress))

        # What is shown and measured on the way.
        traced = config.profile and self.world.first
        profiler = profiling.Profiler(self.directory, self.step.device, active=traced)
        self.model.train()
        done, last = data.samples(self.steps), data.samples(self.validations.last_step)
        shown: dict[str, str] = {}
        with profiling.progress_bar(last, done, self.step.mode, silent=self.silent) as bar:
            self.clock.begin("train")
            for batch in self._batches():
                self.schedule.set(self.steps)
                if config.model.dropout:
                    seed_dropout(config.seed, self.steps, self.world.rank)
                logging = (self.steps + 1) % config.log_every == 0
                out = self.step(batch, norms=logging, run=train_on_batch)

                self.checkpoints.writer.check()
                self.progress.steps += 1
                self.clock.samples += batch.batch.total_size
                bar.update(batch.batch.total_size)
                profiler.step()

                if self.steps % config.populate_every == 0:
                    renewed = self.model.sparse_arch.renew_caches(self.step.optimizers[1])
                    self.tracker.log(self.steps, renewed)
                if logging:
                    shown |= self._log(out)

                if validating := self.validations.due(self.steps):
                    values = self._validate()
                    shown |= {"val AUC": f"{values['auc']:.4f}"} if values else {}
                    self._say(self.validations.stop_early(self.progress))
                elif config.checkpoint and self.checkpoints.timer.due(self.steps):
                    self._save()
                if logging or validating:
                    bar.set_postfix(dict(sorted(shown.items())), refresh=False)
                self.held_out.interruption.check(self._stop)
            self.clock.begin("end")
        self.tracker.texts(profile=profiler.close())
        return self._finish()

    def _batches(self) -> Iterator[PreparedBatch]:
        """The batches of the epochs that are left, up to the last step."""
        while self.steps < self.validations.last_step and self._begin_epoch():
            for batch in self.step.prefetcher(self.train_data):
                yield batch
                if self.steps >= self.validations.last_step:
                    return
            self.progress.epoch += 1

    def _begin_epoch(self) -> bool:
        """Get ready for the next epoch; returns whether there is one."""
        self.train_data.set_epoch(self.progress.epoch)
        return True

    def _log(self, out: dict[str, torch.Tensor]) -> dict[str, str]:
        """Log what a step returned, and more; returns what the progress bar shows of it."""
        out = out | {"loss": self.step.losses.take()}  # the mean since the last log
        values = {f"train/{name}": float(value) for name, value in out.items()}
        values |= self.model.sparse_arch.cache_stats() | self.model.sparse_arch.id_counts()
        if self.steps < self.validations.last_step:  # those of the last step are final metrics
            values |= self.clock.lap() | profiling.peak_memory(self.step.device)
        self.tracker.log(self.steps, values | self.schedule.rates())
        metrics.require_finite(values["train/loss"], self.steps)
        return {"loss": f"{values['train/loss']:.4f}"}

    def _validate(self) -> dict[str, float]:
        """Evaluate on validation, and keep the latest and the best state."""
        if self.progress.validated[0] != self.steps:
            self._keep(self._evaluate("val"))
        return self.progress.validated[1]

    def _keep(self, values: dict[str, float]) -> None:
        self.tracker.log(self.steps, tracking.named("val", values))
        diverged = bool(self.held_out.diverged)  # its state replaces no good one
        latest = diverged or bool(self.config.follow)
        self.validations.note(self.progress, values, self.held_out.loss, latest=latest)
        if self.config.checkpoint and not diverged:
            self._save()

    def _begin_fine_tuning(self, trained: Trained) -> None:
        """Evaluate the fitted tables, which may be the best ones, and choose learning rates."""
        fitted = tracking.named("fitted", self._evaluate("test"))
        self.tracker.log(0, fitted)
        before, after = self._evaluate("val", trained.model), self._evaluate("val")
        lost, epochs = auc_lost(before, after), self.validations.last_step / len(self.train_data)
        factor, fresh = rates_after_fit(self.model, trained.data, self.config.data, lost, epochs)

        factor = self.config.optim.fine_tune or factor
        self.schedule.fine_tune = self.progress.fine_tune = factor
        self.progress.fitted = fitted
        self._say(report.fine_tuning(lost, factor, fresh))
        self._keep(self._evaluate("val") if fresh else after)

    def _evaluate(self, split: str, model: DLRM | None = None) -> dict[str, float]:
        with self.clock.part("test" if split == "test" else "validate"):
            return self.held_out.evaluate(split, self.steps, self._stop, model=model)

    def _finish(self) -> dict[str, float]:
        val, test, best_step = self._validate(), self._evaluate("test"), self.progress.best_step
        if self.held_out.diverged:
            self.tracker.log(self.steps, tracking.named("test", test))
            raise ValueError(self.held_out.diverged)

        final = {"best_step": float(best_step)} if 0 <= best_step < self.steps else {}
        if final and self.config.checkpoint:  # the weights of that step are the result
            with self.clock.part("checkpoint"):
                best = self.checkpoints.load_best(self.model, best_step)
            if best is None:  # it is lost
                final = {}
            else:
                final |= tracking.named("last", test)
                val, test = best, self._evaluate("test")
        final |= tracking.named("test", test) | self.tracker.days(self.steps)

        planted = self.train_data.meta.planted.get("test", {})
        final |= {f"test/best_possible_{name}": value for name, value in planted.items()}
        self.tracker.plots(self.steps, self.held_out.plots)
        with self.clock.part("checkpoint"):
            self.checkpoints.writer.wait()
        final |= self.progress.fitted | self._sizes() | self.clock.total()
        final |= profiling.peak_memory(self.step.device) | self.checkpoints.writer.costs()

        self.tracker.log(self.steps, final)
        final |= tracking.named("val", val)  # logged when it was evaluated
        made = {"steps": self.steps, "batch_size": self.loaders.batch_size}
        metadata = made | report.about(self.train_data.meta, self.checkpoints.spec["plan"])
        changed = changed_options(self.options, available())
        self.tracker.finish(self.options, final, changed, **metadata)
        self._say(report.summary(final, self.directory, kept=self.config.checkpoint))
        return final

    def _sizes(self) -> dict[str, float]:
        """Bytes of the embeddings; every process must call this function."""
        return report.embedding_sizes(self.model, self.step.optimizers[1], self.world)

    def _print_plan(self, resolved: str, spec: ModelSpec, sharding: str) -> None:
        config, meta, sizes = self.config, self.train_data.meta, self._sizes()
        if not self.world.first:
            return
        run_directory.write_config(self.directory, resolved)
        keep_transform(config.data, self.directory / run_directory.PREPARATION)
        tables = format_table_plan(meta.tables, meta.cardinalities, spec["plan"])
        self.tracker.texts(config=resolved, tables=tables, sharding=sharding)
        self.tracker.log(self.steps, sizes)

        note_plan(config, spec, sizes["embeddings/compression"])
        steps, epochs = pace.planned(config, meta, len(self.train_data), self.loaders.batch_size)
        opening = report.opening(config.emb, self.model, meta.splits, sizes, steps)
        sampled = report.negatives(meta.splits["train"], self.train_data.rows)
        shown = sharding, auto_plan(config, meta, tables), opening, epochs, sampled
        print(*filter(None, shown), sep="\n")

    def _save(self) -> None:
        if (loss := self.step.last_loss) is not None:  # a diverged state replaces no good one
            metrics.require_finite(float(loss), self.steps)
        self.progress.clock = self.clock.state()
        self.progress.losses = self.step.losses.state()
        with self.clock.part("checkpoint"):
            held, last = self.step.prefetcher.samples_held, self.steps >= self.validations.last_step
            self.checkpoints.save(self.progress, unused=held, last=last)

    def _say(self, text: str) -> None:
        if text and not self.silent:
            with tqdm.external_write_mode():  # above the progress bar
                print(text, flush=True)  # days may pass before the next line

    def _stop(self) -> None:
        """Leave an interrupted run so that it can be resumed."""
        saved = self.checkpoints.saved == self.steps
        if self.config.checkpoint and not saved and not self.held_out.diverged:
            self._save()
        self.checkpoints.writer.wait()
        self.tracker.close()


def main(arguments: Sequence[str], began: float = 0) -> int:
    """Run the program, in a process that ``began`` then or now; returns its exit status."""
    world, hint = World.from_environment(), partial(str, "nothing was changed")

    def work() -> None:
        from dlrm.commands.follow import FollowingRun  # which is a Run

        nonlocal hint
        world.rendezvous()
        saved = run_directory.saved_options(resumed_path(arguments))
        with world.print_once():
            config, resolved = parse([*arguments, *saved], available())
        refuse_with_resume(arguments, config.resume)
        with profiling.out_of_memory_advice(config.data, config.model.embedding_dim):
            run = (FollowingRun if config.follow else Run)(config, resolved, world, began)
            hint = partial(run_directory.resume_hint, run.directory, saving=config.checkpoint)
            run_directory.write_to(run.directory, run.train)

    threading.excepthook = tracking.quiet_tensorboard_thread
    try:
        return exit_status(work, lambda: f"interrupted; {hint()}", world.print_error_once)
    finally:
        world.leave()
