"""Train a DLRM whose sparse architecture is swapped by one flag: ``python train.py --emb tt``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from tqdm import tqdm

from dlrm import checkpoint, metrics
from dlrm.cli import parse
from dlrm.config import HOUSEKEEPING, RunConfig
from dlrm.data import synthetic
from dlrm.data.counts import read_counts
from dlrm.data.criteo import CriteoLoader
from dlrm.data.schema import META_FILE, Meta
from dlrm.distributed import pick_device
from dlrm.embeddings import available
from dlrm.embeddings.plan import plan
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, Schedule
from dlrm.step import TrainStep
from dlrm.tracking import Clock, Profiler, Tracker, memory

DEMO = RunConfig().data


class Run:
    """One training run: its parts, built from the configuration, and the loop over them."""

    def __init__(self, config: RunConfig, resolved: str) -> None:
        self.config, self.resolved = config, resolved
        self.device = pick_device(config.device)
        self.directory = self._directory()
        if config.data == DEMO and not (Path(DEMO) / META_FILE).exists():
            print(f"making synthetic demo data in {DEMO} (first use)")
            synthetic.write_demo(DEMO)
        self.train_data = self._loader("train", config.batch_size)
        self.meta = self.train_data.meta
        if not len(self.train_data):
            raise ValueError("--loader.drop_last leaves no batch at all: lower --batch_size")
        self.recipe = recipe(config, self.meta)
        restored = checkpoint.load(config.resume, recipe=self.recipe) if config.resume else None
        torch.manual_seed(config.seed)
        self.model = DLRM(**self.recipe).to(self.device)
        if config.init_from and not restored:
            self.model.load_trained(checkpoint.load_model(config.init_from, self.device)[0])
        self.optimizers = self._optimizers()
        self.schedule = Schedule(self.optimizers, **config.optim.schedule)
        self.step = TrainStep(
            self.model,
            self.optimizers,
            precision=config.precision,
            clip_norm=config.optim.clip_norm,
            mode=config.step,
        )
        self.steps = self.epoch = 0
        self.best = float("-inf")
        self.fitted: dict[str, float] = {}  # metrics after --init_from, before any step
        self.validated: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the last
        if restored:
            self._restore(restored)
        self.tracker = Tracker(self.directory, step=self.steps if restored else None)

    def train(self) -> dict[str, float]:
        """Train, evaluate, and return the final metrics."""
        config = self.config
        self._announce()
        eval_every = config.eval_every or max(len(self.train_data) // 4, 1)
        last_step = config.max_steps or float("inf")
        rows = self.train_data.rows
        if config.init_from and not self.steps:
            self.fitted = {f"fitted/{k}": v for k, v in self._evaluate("test").items()}
            self.tracker.log(0, self.fitted)
        profiler = Profiler(self.directory, self.device) if config.profile else None
        clock = Clock(self.train_data)
        self.model.train()
        with tqdm(
            total=min(config.epochs * rows, last_step * config.batch_size),
            initial=self.epoch * rows + self.train_data.state_dict()["position"],
            unit=" samples",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 15,
        ) as progress:
            for epoch in range(self.epoch, config.epochs):
                self.epoch = epoch
                if self.steps >= last_step:
                    break
                self.train_data.set_epoch(self.epoch)
                for batch in self.train_data:
                    self.schedule.set(self.steps)
                    self.steps += 1
                    logging = self.steps % config.log_every == 0
                    out = self.step(batch, norms=logging)
                    clock.samples += batch.size
                    progress.update(batch.size)
                    if profiler:
                        profiler.step()
                    if self.steps % config.populate_every == 0:
                        self._populate_caches()
                    if logging:
                        self._log(out, clock, progress)
                    if self.steps % eval_every == 0:
                        with clock.paused():
                            self._validate()
                    if self.steps >= last_step:
                        break
        if profiler:
            self.tracker.text("profile", profiler.close())
        return self._finish(clock)

    def _log(self, out: dict[str, torch.Tensor], clock: Clock, progress: tqdm) -> None:
        values = {f"train/{name}": float(value) for name, value in out.items()}
        values |= clock.lap() | self.model.sparse_arch.cache_stats() | memory(self.device)
        for name, optimizer in zip(("dense", "embeddings"), self.optimizers, strict=True):
            values[f"lr/{name}"] = float(optimizer.param_groups[0]["lr"])
        self.tracker.log(self.steps, values)
        progress.set_postfix(loss=f"{values['train/loss']:.4f}", refresh=False)
        if not torch.isfinite(out["loss"]):
            raise ValueError(
                f"the loss is {values['train/loss']} at step {self.steps}: lower --optim.lr, or "
                "set --optim.warmup_steps or --optim.clip_norm"
            )

    def _validate(self) -> dict[str, float]:
        """Evaluate on validation, and keep the latest and the best state."""
        if self.validated[0] == self.steps:
            return self.validated[1]
        values = self._evaluate("val")
        self.validated = self.steps, values
        if values:
            self.tracker.log(self.steps, {f"val/{k}": v for k, v in values.items()})
        if self.config.checkpoint:
            better = values.get("auc", float("-inf")) > self.best
            if better:
                self.best = values["auc"]
            # the best first: if killed in between, the resumed run gets here again
            for name in [checkpoint.BEST] * better + [checkpoint.LATEST]:
                checkpoint.save(self.directory / "checkpoints" / name, self._state())
        return values

    def _evaluate(self, split: str) -> dict[str, float]:
        if not self.meta.splits.get(split) or not self.meta.splits[split].rows:
            return {}
        batches = self._loader(split, self.config.eval_batch_size)
        bf16 = self.config.precision == "bf16"
        return metrics.classification(*metrics.predict(self.model, batches, bf16=bf16))

    def _finish(self, clock: Clock) -> dict[str, float]:
        speed = clock.total() if clock.samples else {}
        splits = {"val": self._validate(), "test": self._evaluate("test")}
        final = {f"{split}/{k}": v for split, values in splits.items() for k, v in values.items()}
        final |= self.fitted | self._embedding_sizes() | speed | memory(self.device)
        planted = self.meta.planted.get("test", {})
        final |= {f"test/best_possible_{name}": value for name, value in planted.items()}
        self.tracker.log(self.steps, final)
        unused = available().keys() - {kind for kind, _ in self.recipe["plan"]}
        self.tracker.finish(yaml.safe_load(self.resolved), final, HOUSEKEEPING | unused)
        print(pd.Series(final).map("{:,.6g}".format).to_string())
        print(f"results in {self.directory}; tensorboard --logdir {self.directory.parent}")
        return final

    def _loader(self, split: str, batch_size: int) -> CriteoLoader:
        loader, training = self.config.loader, split == "train"
        return CriteoLoader(
            self.config.data,
            split,
            batch_size=batch_size,
            shuffle=loader.shuffle and training,
            seed=self.config.seed,
            window=loader.window,
            readers=loader.readers,
            prefetch=loader.prefetch,
            drop_last=loader.drop_last and training,
            device=self.device,
        )

    def _optimizers(self) -> list[RowOptimizer]:
        optim = self.config.optim
        embeddings_lr = optim.lr if optim.embeddings_lr is None else optim.embeddings_lr
        dense, embeddings = self.model.dense_parameters(), self.model.sparse_arch.parameters()
        parts = (dense, optim.dense, optim.lr), (embeddings, optim.embeddings, embeddings_lr)
        return [RowOptimizer(p, rule, lr=lr, **optim.options_of(rule)) for p, rule, lr in parts]

    def _directory(self) -> Path:
        if self.config.resume:
            return checkpoint.find(self.config.resume).parent.parent
        name = self.config.name or f"{self.config.emb}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = Path(self.config.output) / name
        if directory.exists():
            raise ValueError(f"{directory} exists: choose another --name, or --resume {directory}")
        return directory

    def _announce(self) -> None:
        (self.directory / "config.yaml").write_text(self.resolved)
        self.tracker.text("config", self.resolved)
        sizes = self._embedding_sizes()
        self.tracker.log(self.steps, sizes)
        parameters = sum(p.numel() for p in self.model.dense_parameters())
        print(
            f"{self.config.emb} on {self.device}: {self.train_data.rows:,} training rows, "
            f"{parameters:,} dense weights, embeddings {sizes['embeddings/bytes'] / 1e6:.2f} MB "
            f"({sizes['embeddings/compression']:.1f}x)"
        )

    def _embedding_sizes(self) -> dict[str, float]:
        """Bytes of the embeddings and of their optimizer state, which no ratio counts."""
        state = self.optimizers[1].state_bytes(self.model.sparse_arch.parameters())
        sizes = self.model.sparse_arch.sizes() | {"optimizer_bytes": float(state)}
        return {f"embeddings/{name}": size for name, size in sizes.items()}

    def _populate_caches(self) -> None:
        """Renew the caches of rows; rows that change owner start with fresh optimizer state."""
        for index, (group, _) in enumerate(self.model.sparse_arch.embeddings()):
            report = group.cache_populate()
            if report is None:
                continue
            for name, rows in report.reset.items():
                self.optimizers[1].reset_rows(group.get_parameter(name), rows)
            values = {f"cache/{name}_{index}": value for name, value in report.values().items()}
            self.tracker.log(self.steps, values)

    def _state(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "config": self.resolved,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "loader": self.train_data.state_dict(),
            "steps": self.steps,
            "epoch": self.epoch,
            "best": self.best,
            "random": torch.get_rng_state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.train_data.load_state_dict(state["loader"])
        self.steps, self.epoch, self.best = state["steps"], state["epoch"], state["best"]
        torch.set_rng_state(state["random"])


def recipe(config: RunConfig, meta: Meta) -> dict[str, Any]:
    """The arguments of the model, as the checkpoint keeps them."""
    tables = asdict(config.tables)
    return {
        "num_dense": len(meta.dense),
        "num_embeddings": list(meta.cardinalities),
        "tables_dtype": tables.pop("dtype"),
        "plan": plan(
            [column.name for column in meta.categorical],
            meta.cardinalities,
            config.model.embedding_dim,
            config.emb,
            options=config.methods,
            **tables,
            budget=config.budget,
            counts=lambda: read_counts(config.data, meta),
        ),
        **asdict(config.model),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    kinds = available()
    config, resolved = parse(arguments, kinds)
    run = None
    try:
        if config.resume:
            saved = checkpoint.find(config.resume).parent.parent / "config.yaml"
            config, resolved = parse([*arguments, f"--config={saved}"], kinds)
        run = Run(config, resolved)
        run.train()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {checkpoint.way_on(run.directory if run else None)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
