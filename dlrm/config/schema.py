"""The schema of a run: frozen dataclasses whose fields are the options of the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dlrm.kernels.update.rules import OPTIONS, make_rule

HOUSEKEEPING = {
    *("name", "output", "resume", "checkpoint", "profile", "log_every", "eval_every"),
    *("device", "deterministic", "loader.readers", "loader.prefetch", "eval_batch_size"),
}
"""Options that make no difference to a run's results."""


def _require(**rules: tuple[bool, str]) -> None:
    """Raise one error that lists every option whose rule does not hold."""
    broken = [f"{name} {text}" for name, (holds, text) in rules.items() if not holds]
    if broken:
        raise ValueError("; ".join(broken))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the model."""

    embedding_dim: int = 16
    """Length of an embedding row."""
    bottom_mlp: tuple[int, ...] = (512, 256, 64)
    """Hidden sizes of the bottom MLP; a last layer of embedding_dim outputs follows."""
    top_mlp: tuple[int, ...] = (512, 256)
    """Hidden sizes of the top MLP; a last layer of one output follows."""
    interaction: Literal["dot", "dcn"] = "dot"
    """How features meet: pairwise dot products, or the low-rank cross network of DCN-V2."""
    cross_layers: int = 3
    """Layers of the cross network (dcn)."""
    cross_rank: int = 512
    """Rank of a layer of the cross network (dcn)."""

    def __post_init__(self) -> None:
        _require(
            embedding_dim=(self.embedding_dim >= 1, f"is {self.embedding_dim}, at least 1 needed"),
            bottom_mlp=(min(self.bottom_mlp, default=1) >= 1, "has a size below 1"),
            top_mlp=(min(self.top_mlp, default=1) >= 1, "has a size below 1"),
            cross_layers=(self.cross_layers >= 1, f"is {self.cross_layers}, at least 1 needed"),
            cross_rank=(self.cross_rank >= 1, f"is {self.cross_rank}, at least 1 needed"),
        )


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """Which tables are of the kind that --emb names; the others are dense."""

    threshold: int | None = None
    """Tables of at least so many rows; by default 2000, and 0 with --budget."""
    largest: int | None = None
    """Instead of the threshold: the so many largest tables."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Tables by name with a kind of their own, as in {C3: tt, C12: qr}."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the embeddings' parameters; bf16 halves them and is rounded by chance, its optimizer
    state stays fp32."""

    def __post_init__(self) -> None:
        _require(
            threshold=(
                (self.threshold or 0) >= 0 and None in (self.threshold, self.largest),
                f"is {self.threshold}, it can't be negative, and must be null if largest is set",
            ),
            largest=((self.largest or 0) >= 0, f"is {self.largest}, it can't be negative"),
        )


Rule = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "rmsprop", "adamax", "adadelta"
]
RULE_OPTIONS = ("betas", "eps", "momentum", "weight_decay", "alpha", "rho")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizers of the dense part and of the embeddings, and the learning-rate schedule."""

    dense: Rule = "adagrad"
    """Optimizer of the MLPs and the interaction."""
    embeddings: Rule = "adagrad"
    """Optimizer of the embeddings; it updates only the rows that a batch touched."""
    lr: float = 0.015
    """Learning rate of the dense part, and of the embeddings unless they have their own."""
    embeddings_lr: float | None = None
    """Learning rate of the embeddings; lr if not set."""
    betas: tuple[float, float] | None = None
    """Decay of the moments of Adam, AdamW and Adamax; 0.9 and 0.999 if not set."""
    eps: float | None = None
    """Added to the denominator (not in sgd); 1e-8 if not set, 1e-6 for Adadelta."""
    momentum: float | None = None
    """Momentum of sgd and rmsprop; 0 if not set."""
    weight_decay: float | None = None
    """Share of a weight that is added to its gradient where it is updated; with AdamW taken off the
    weight itself, times the learning rate. 0 if not set, 0.01 for AdamW."""
    alpha: float | None = None
    """Decay of rmsprop's squared gradients; 0.99 if not set."""
    rho: float | None = None
    """Decay of Adadelta's squared gradients and steps; 0.9 if not set."""
    clip_norm: float | None = None
    """Scale all gradients down to this norm together; not clipped if not set."""
    warmup_steps: int = 50
    """Steps over which the learning rates rise linearly."""
    decay_start: int | None = None
    """Step at which a polynomial decay begins; never if not set."""
    decay_steps: int = 1
    """Steps over which the learning rates fall to zero."""
    decay_power: float = 2.0
    """Power of the decay."""

    def __post_init__(self) -> None:
        _require(
            **{
                name: (0 <= (value or 0) < math.inf, f"is {value}, it must be finite, 0 or more")
                for name, value in {
                    "lr": self.lr,
                    "embeddings_lr": self.embeddings_lr,
                    "decay_start": self.decay_start,
                    "decay_power": self.decay_power,
                }.items()
            },
            clip_norm=(self.clip_norm is None or self.clip_norm > 0, "must be above 0"),
            warmup_steps=(self.warmup_steps >= 0, "can't be negative"),
            decay_steps=(
                self.decay_steps == 1 or (self.decay_steps > 1 and self.decay_start is not None),
                f"is {self.decay_steps}, it must be at least 1, and 1 without decay_start",
            ),
            **{
                name: (
                    getattr(self, name) is None
                    or any(name in OPTIONS[rule] for rule in (self.dense, self.embeddings)),
                    f"is set, but neither {self.dense} nor {self.embeddings} has a use for it",
                )
                for name in RULE_OPTIONS
            },
        )
        for rule in (self.dense, self.embeddings):
            make_rule(rule, **self.options_of(rule))

    @property
    def schedule(self) -> dict[str, Any]:
        """The arguments of :class:`~dlrm.optim.Schedule`."""
        return {
            "warmup": self.warmup_steps,
            "decay_start": self.decay_start,
            "decay_steps": self.decay_steps,
            "power": self.decay_power,
        }

    @property
    def parts(self) -> list[tuple[str, float, dict[str, Any]]]:
        """Rule, learning rate and options: of the dense part, and of the embeddings."""
        embeddings_lr = self.lr if self.embeddings_lr is None else self.embeddings_lr
        rules = (self.dense, self.lr), (self.embeddings, embeddings_lr)
        return [(rule, lr, self.options_of(rule)) for rule, lr in rules]

    def options_of(self, rule: str) -> dict[str, Any]:
        """The options that are set and that ``rule`` has a use for."""
        options = {name: getattr(self, name) for name in RULE_OPTIONS if name in OPTIONS[rule]}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How Parquet becomes batches."""

    shuffle: bool = True
    """Shuffle the training rows by seed and epoch: the row groups, and a window of them mixed."""
    window: int = 8
    """Row groups whose rows are mixed at a time."""
    readers: int | None = None
    """Threads that decode row groups in the background; by default half of the cores, up to 8, or,
    with a GPU, three quarters, up to 12."""
    prefetch: int = 4
    """Batches that are made ahead."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is short."""

    def __post_init__(self) -> None:
        _require(
            window=(self.window >= 1, f"is {self.window}, at least 1 needed"),
            readers=(
                self.readers is None or self.readers >= 1,
                f"is {self.readers}, at least 1 needed",
            ),
            prefetch=(self.prefetch >= 1, f"is {self.prefetch}, at least 1 needed"),
        )


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How tables are spread over the processes of torchrun: paged ones, and dense ones of many
    rows. All others are replicated, and their gradients summed."""

    by: Literal["auto", "replicate", "table", "row", "column"] = "auto"
    """Hold tables whole, cut by rows, or cut by columns; auto balances bytes and look-ups."""
    tables: dict[str, str] = field(default_factory=dict)
    """Tables by name with a way of their own, as in {C3: column, C12: replicate}."""
    threshold: int | None = None
    """Dense tables of fewer rows are replicated; by default those of less than 6 MB."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Type in which vectors and their gradients travel between processes; rows that peers read are
    read as they are."""
    exchange: Literal["auto", "peers", "collective"] = "auto"
    """How they travel: peers read and write each other's memory, each distinct row once; auto does
    so where the GPUs of one host reach each other, and elsewhere uses collectives."""

    def __post_init__(self) -> None:
        ways = ("auto", "replicate", "table", "row", "column")
        _require(
            threshold=((self.threshold or 0) >= 0, f"is {self.threshold}, it can't be negative"),
            tables=(
                set(self.tables.values()) <= {*ways},
                f"is {self.tables}, each must be one of {', '.join(ways)}",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    emb: str = "dense"
    """Kind of the embeddings, or auto: each table has the kind and the size that make the most of
    --budget."""
    budget: str | None = None
    """Memory for all embeddings, as 20MB or, relative to dense tables, 100x; the options of the
    kind follow from it."""
    data: str = "data/demo"
    """Directory made by scripts/prepare_criteo.py or scripts/make_synthetic.py. The default is
    synthetic and made on first use."""
    output: str = "runs"
    """Directory of the runs."""
    name: str | None = None
    """Name of the run's directory in output; by default the kind and the time."""
    resume: str | None = None
    """Run directory or checkpoint to go on from, with the run's own configuration, but for options
    that are given here, as --epochs 2."""
    init_from: str | None = None
    """Run directory or checkpoint of a trained model, as a rule a dense one, to compress: its MLPs
    are taken over, and the embeddings of the kinds chosen here are fitted to its tables."""
    seed: int = 0
    """Seed of the initialisation and the shuffling."""
    epochs: int = 1
    """Passes over the training rows."""
    max_steps: int | None = None
    """Stop after so many steps."""
    batch_size: int = 512
    """Samples per step, over all processes."""
    eval_batch_size: int = 16384
    """Samples per batch in evaluations."""
    eval_every: int | None = None
    """Steps between evaluations on the validation split; by default a quarter of an epoch."""
    log_every: int = 50
    """Steps between two log entries."""
    populate_every: int = 200
    """Steps between two renewals of a cache of rows, for kinds that have one switched on."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of the matrix products in the MLPs and the interaction: fp32, tf32 (on GPUs) or bfloat16."""
    step: Literal["auto", "eager", "compile", "graph"] = "auto"
    """How a step runs: eager, with compiled MLPs, or compiled and captured as a CUDA graph; auto
    is graph on a GPU, compile where tables lie on other devices as well, and eager on a CPU."""
    deterministic: bool = False
    """Equal seeds give equal bits on a GPU too, where sums otherwise depend on which of many
    threads comes first; costs some speed."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    profile: bool = False
    """Write a torch.profiler trace of a few steps and a table of the costliest operations."""
    checkpoint: bool = True
    """Keep the latest state of the run on disk, and the best by AUC on the validation split."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of each embedding kind, from --<kind>.<option>."""

    def __post_init__(self) -> None:
        positive = ("epochs", "batch_size", "eval_batch_size", "log_every", "populate_every")
        optional = ("max_steps", "eval_every")
        values = {name: getattr(self, name) for name in (*positive, *optional)}
        _require(
            **{
                name: (
                    value is None or 1 <= value < 2**31,
                    f"is {value}, it must be 1 .. 2**31 - 1",
                )
                for name, value in values.items()
            },
            seed=(0 <= self.seed < 2**63, f"is {self.seed}, it must be 0 .. 2**63 - 1"),
            data=(self.data != "", "is empty, it must name a directory"),
            output=(self.output != "", "is empty, it must name a directory"),
            resume=(self.resume != "", "is empty, it must name a run or a checkpoint"),
            init_from=(self.init_from != "", "is empty, it must name a run or a checkpoint"),
            name=(
                self.name is None or Path(self.name).name == self.name not in ("", ".."),
                f"is {self.name!r}, it must name a directory in output",
            ),
        )
