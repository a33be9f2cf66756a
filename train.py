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

from dlrm.config.cli import note_plan, parse, refuse_with_resume, resumed_path
from dlrm.config.model_spec import model_spec
from dlrm.config.optimizers import optimizer_specs
from dlrm.config.options import changed_options
from dlrm.config.schema import RunConfig
from dlrm.data import synthetic
from dlrm.data.fingerprint import require_same_ids
from dlrm.data.frequencies import read_frequencies
from dlrm.data.raw_rows import keep_transform
from dlrm.distributed.interruption import Interruption
from dlrm.distributed.sharding_plan import make_sharding_plan
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, Schedule
from dlrm.sparse_arch.table_plan import AUTO, format_table_plan
from dlrm.training import metrics, profiling, report, run_directory, tracking
from dlrm.training.checkpoint import load_model
from dlrm.training.data_parallel import GradientReducer, state_bytes
from dlrm.training.held_out import HeldOut
from dlrm.training.loaders import make_loader
from dlrm.training.prefetch import PreparedBatch
from dlrm.training.run_checkpoints import RunCheckpoints
from dlrm.training.step import TrainStep
from dlrm.utils.device import pick_device
from dlrm.utils.program import exit_status


class Run:
    """One training run: its parts, built from the configuration, and the loop over them."""

    def __init__(self, config: RunConfig, resolved: str, world: World) -> None:
        self.config, self.resolved, self.world = config, resolved, world
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
        # Opened here, so that a damaged file is reported before training.
        splits = filter(self.meta.has_rows, ("val", "test"))
        loaders = {s: loader(s, config.eval_batch_size, options) for s in splits}
        if not len(self.train_data):
            raise ValueError("--loader.drop_last leaves no batch: lower --batch_size")
        self.spec = model_spec(config, self.meta)
        if resumed:
            resumed.require_spec(self.spec)
        torch.manual_seed(config.seed)
        counts = (lambda: read_frequencies(config.data, self.meta)) if self.meta.multi_hot else None
        rule, tables = config.optim.embeddings, self.meta.tables
        self.sharding = make_sharding_plan(
            world, tables, self.spec, counts, rule, **asdict(config.sharding)
        )
        self.model = DLRM(**self.spec, sharding=self.sharding).to(self.device)
        if config.init_from and not resumed:
            trained, state = load_model(config.init_from, self.device, world=world)
            require_same_ids(config.data, self.meta, state.fingerprint, config.init_from)
            self.model.load_trained(trained)
        both = self.model.dense_parameters(), self.model.sparse_arch.parameters()
        specs = zip(both, optimizer_specs(config.optim), strict=True)
        self.optimizers = [RowOptimizer(own, rule, lr=lr, **o) for own, (rule, lr, o) in specs]
        self.state_bytes = state_bytes(self.model, self.optimizers[1], world)
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
        self.steps, self.saved, self.epoch, self.best = 0, -1, 0, float("-inf")
        self.last_step = min(config.max_steps or 2**31, config.epochs * len(self.train_data))
        self.fitted: dict[str, float] = {}  # metrics after --init_from, before any step
        self.validated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the last
        self.loss: torch.Tensor | None = None  # of the last step
        self.shown: dict[str, str] = {}  # in the progress line
        self.clock = profiling.Clock(self.train_data, resumed.state.clock if resumed else {})
        parts = self.model, self.optimizers, self.train_data
        self.checkpoints.attach(*parts, spec=self.spec, config=resolved)
        if resumed:
            state = self.checkpoints.restore(config.batch_size)
            self.steps, self.epoch, self.best = state.steps, state.epoch, state.best
            self.saved, self.fitted, self.validated = state.steps, state.fitted, state.validated
            self.step.losses.load(state.losses)
        self.checkpoints.begin()
        step, place = self.steps if resumed else None, self.directory
        self.finished = world.from_first(lambda: tracking.finished(place, step, resolved))
        silent = self.finished or not world.first
        self.tracker = (tracking.NoTracker if silent else tracking.Tracker)(place, step=step)

    def train(self) -> dict[str, float]:
        """Train, evaluate, and return the final metrics."""
        config, data = self.config, self.train_data
        if self.world.first:
            self._print_plan()
        if self.finished:  # and resumed with the same options: nothing is left to do
            return self._report(self.finished)
        eval_every = config.eval_every or max(len(data) // 4, 1)
        if config.init_from and not self.steps:
            self.fitted = {f"fitted/{k}": v for k, v in self._evaluate("test").items()}
            self.tracker.log(0, self.fitted)
        if self.steps % eval_every == 0 < self.steps:  # interrupted before or in its evaluation
            self._validate()
        traced = config.profile and self.world.first
        profiler = profiling.Profiler(self.directory, self.device, active=traced)
        self.model.train()
        done, last = data.samples(self.steps), data.samples(self.last_step)
        with profiling.progress_bar(last, done, silent=not self.world.first) as progress:
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
                if self.steps % eval_every == 0:
                    with self.clock.paused():
                        self._validate()
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
        for name, optimizer in zip(("dense", "embeddings"), self.optimizers, strict=True):
            values[f"lr/{name}"] = float(optimizer.param_groups[0]["lr"])
        self.tracker.log(self.steps, values)
        self.shown["loss"] = f"{values['train/loss']:.4f}"
        metrics.require_finite(values["train/loss"], self.steps)

    def _validate(self) -> dict[str, float]:
        """Evaluate on validation, and keep the latest and the best state."""
        if self.validated[0] == self.steps:
            return self.validated[1]
        values = self._evaluate("val")
        self.validated = self.steps, values
        if values:
            self.tracker.log(self.steps, {f"val/{k}": v for k, v in values.items()})
            self.shown["val AUC"] = f"{values['auc']:.4f}"
        if self.config.checkpoint and not self.held_out.diverged:
            better = values.get("auc", float("-inf")) > self.best
            self.best = values["auc"] if better else self.best
            self._save(better=better)
        return values

    def _evaluate(self, split: str) -> dict[str, float]:
        return self.held_out.evaluate(split, self.steps, self._stop)

    def _finish(self) -> dict[str, float]:
        val = {f"val/{k}": v for k, v in self._validate().items()}  # logged there
        final = {f"test/{k}": v for k, v in self._evaluate("test").items()}
        best = {f"test/best_possible_{k}": v for k, v in self.meta.planted.get("test", {}).items()}
        final |= best | self.fitted | self._embedding_sizes() | self.clock.total()
        final |= profiling.peak_memory(self.device)
        self.tracker.log(self.steps, final)
        if self.held_out.diverged:
            raise ValueError(self.held_out.diverged)
        final, options = val | final, yaml.safe_load(self.resolved)
        about = report.about(self.steps, self.meta, self.spec["plan"])
        self.tracker.finish(options, final, changed_options(options, available()), **about)
        return self._report(final)

    def _report(self, final: dict[str, float]) -> dict[str, float]:
        if self.world.first:
            print(report.summary(final, self.directory))
        return final

    def _print_plan(self) -> None:
        run_directory.write_config(self.directory, self.resolved)
        keep_transform(self.config.data, self.directory / run_directory.PREPARATION)
        tables = format_table_plan(self.meta.tables, self.meta.cardinalities, self.spec["plan"])
        sharding, sizes = self.sharding.text if self.sharding else "", self._embedding_sizes()
        self.tracker.texts(config=self.resolved, tables=tables, sharding=sharding)
        self.tracker.log(self.steps, sizes)
        note_plan(self.config, self.spec, sizes["embeddings/compression"])
        opening = report.opening(self.config.emb, self.model, self.train_data.rows, sizes)
        shown = sharding, tables if self.config.emb == AUTO else "", opening
        print(*filter(None, shown), sep="\n")

    def _embedding_sizes(self) -> dict[str, float]:
        """Bytes of the embeddings, and of their optimizer state, which the ratio leaves out."""
        sizes = self.model.sparse_arch.sizes() | {"optimizer_bytes": float(self.state_bytes)}
        return {f"embeddings/{name}": size for name, size in sizes.items()}

    def _save(self, *, better: bool = False) -> None:
        if self.loss is not None:  # a diverged state must not replace a good one
            metrics.require_finite(float(self.loss), self.steps)
        self.checkpoints.save(
            unused=self.step.prefetcher.samples_held,
            better=better,
            steps=self.steps,
            epoch=self.epoch,
            best=self.best,
            fitted=self.fitted,
            validated=self.validated,
            clock=self.clock.state(),
            losses=self.step.losses.state(),
        )
        self.saved = self.steps

    def _stop(self) -> None:
        """Leave an interrupted run so that it can be resumed."""
        if self.config.checkpoint and self.saved != self.steps and not self.held_out.diverged:
            self._save()
        self.tracker.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    world, hint = World.from_environment(), partial(str, "nothing was changed")

    def work() -> None:
        nonlocal hint
        world.rendezvous()
        saved = []
        if resumed := resumed_path(arguments):
            saved = [f"--config={run_directory.run_directory(resumed) / run_directory.CONFIG}"]
        with world.print_once():
            config, resolved = parse([*arguments, *saved], available())
        refuse_with_resume(arguments, config.resume)
        with profiling.out_of_memory_advice(config.data, config.model.embedding_dim):
            run = Run(config, resolved, world)
            hint = partial(run_directory.resume_hint, run.directory, saving=config.checkpoint)
            run.train()

    threading.excepthook = tracking.quiet_tensorboard_thread
    try:
        return exit_status(work, lambda: f"interrupted; {hint()}", world.print_error_once)
    finally:
        world.leave()


if __name__ == "__main__":
    sys.exit(main())
