"""The schema of a run: frozen dataclasses whose fields are the options of the command line.

Pydantic checks the types and ranges, and the text below a field is its help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from dlrm.utils.validation import must

_PERIOD = re.compile(r"0*[1-9]\d{0,8}[smh]?")

HOUSEKEEPING = {
    *("name", "output", "resume", "checkpoint", "checkpoint_every", "keep_checkpoints"),
    *("profile", "dry_run", "log_every", "eval_every"),
    *("device", "deterministic", "loader.readers", "loader.prefetch", "loader.allow_outside"),
    *("eval_batch_size", "group", "follow_wait", "follow_export"),
}
"""Options that do not change the results of a run."""

RENAMED = {"sharding.wire": "sharding.comm_dtype"}
"""Old names of options, and the new ones."""


OPTIONS = ConfigDict(extra="forbid", use_attribute_docstrings=True)
MAX_COUNT = 2**31  # of steps and samples


def _is_name(name: str) -> bool:
    """Whether a directory may have this name."""
    is_one = Path(name).name == name not in ("", "..") and name.isprintable()
    return is_one and len(os.fsencode(name)) <= 255


Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, lt=MAX_COUNT)]
Rate = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Directory = Annotated[str, must("name a directory", bool)]
Checkpoint = Annotated[str, must("name a run or a checkpoint", bool)]
RunName = Annotated[
    str,
    must("name a directory in output, in printable characters and at most 255 bytes", _is_name),
]
Period = Annotated[
    str, must("be steps, such as 1000, or time, such as 90s or 10m", _PERIOD.fullmatch)
]


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ModelConfig:
    """Shape of the model."""

    embedding_dim: Positive = 16
    """Length of an embedding row."""
    bottom_mlp: tuple[Positive, ...] = (512, 256, 64)
    """Hidden sizes of the bottom MLP; a last layer of embedding_dim outputs follows."""
    top_mlp: tuple[Positive, ...] = (512, 256)
    """Hidden sizes of the top MLP; a last layer of one output follows."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the outputs of hidden layers that are set to 0 in training, in both MLPs."""
    interaction: Literal["dot", "dcn"] | None = None
    """How features interact: pairwise dot products, or the low-rank cross network of DCN-V2.
    Default: dot, and dcn for more than 512 tables, whose pairs would be most of the model."""
    cross_layers: Positive = 3
    """Number of layers of the cross network (dcn)."""
    cross_rank: Positive | None = None
    """Rank of each layer of the cross network (dcn). Default: 512, and 64 for more than 512
    tables."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class TablesConfig:
    """Which tables have the kind that --emb names. The others are dense."""

    threshold: Natural | None = None
    """Compress tables with at least this many rows. Default: 2000, and 0 with --budget."""
    largest: Natural | None = None
    """Compress the N largest tables instead."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kinds of single tables by name, for example {C3: tt, C12: qr}."""
    share: bool = True
    """One table for columns that the preparation gave one vocabulary; false: a table for each."""
    pooling: dict[str, Literal["sum", "mean", "max"]] = field(default_factory=dict)
    """How the rows of a list become one vector, by column, or as default for all others, for
    example {history: mean, default: sum}. Default: their sum."""
    dtype: Literal["fp32", "bf16", "int8", "int4"] | None = None
    """Type of the embedding parameters. bf16 takes half the memory, int8 rows with a scale each
    about a quarter, int4 rows a sixth, of which those of the most frequent ids, one in eight, have
    8 bits. All are updated with stochastic rounding. The optimizer state stays in fp32, but the
    accumulators of row-wise Adagrad are bf16 next to int4. --emb auto gives each table this type
    or one of fewer bits. Default: fp32; with --budget bf16 for --emb tt and int8 for --emb
    dynamic."""

    def __post_init__(self) -> None:
        if None not in (self.threshold, self.largest):
            raise ValueError(f"threshold is {self.threshold}, it must be null if largest is set")


RULE_OPTIONS = ("betas", "eps", "momentum", "weight_decay", "alpha", "rho")


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class OptimConfig:
    """Optimizers of the dense part and of the embeddings, and the learning-rate schedule."""

    dense: str = "adagrad"
    """Optimizer of the MLPs and the interaction."""
    embeddings: str = "adagrad"
    """Optimizer of the embeddings. It updates only the rows that a batch uses."""
    lr: Rate | None = None
    """Learning rate of the dense part, and of the embeddings if embeddings_lr is not set. Default:
    by the optimizer, 0.015 for Adagrad and Adamax, 0.1 for SGD, 0.001 for Adam, AdamW and RMSprop,
    1 for Adadelta."""
    embeddings_lr: Rate | None = None
    """Learning rate of the embeddings. Default: lr if that is set, else by the optimizer, 0.015 for
    Adagrad and Adamax, 10 for SGD, 0.003 for Adam, AdamW and RMSprop, 3 for Adadelta."""
    betas: tuple[float, float] | None = None
    """Decay rates of the moments in Adam, AdamW and Adamax. Default: 0.9 and 0.999."""
    eps: float | None = None
    """Term added to the denominator (not in SGD). Default: 1e-8, and 1e-6 for Adadelta."""
    momentum: float | None = None
    """Momentum of SGD and RMSprop. Default: 0."""
    weight_decay: float | None = None
    """Weight decay of the weights that are updated: added to the gradient, or with AdamW subtracted
    from the weight. Default: 0, and 0.01 for AdamW."""
    alpha: float | None = None
    """Decay rate of the squared gradients in RMSprop. Default: 0.99."""
    rho: float | None = None
    """Decay rate of the squared gradients and steps in Adadelta. Default: 0.9."""
    fine_tune: Factor | None = None
    """Factor f on the rates with --init_from: embeddings_lr is multiplied by f, lr by f**4.
    Default: 1 on other data; on the same, by the validation AUC that is lost when the tables are
    fitted, 0.1 if none is, 0.3 from 0.005 on."""
    clip_norm: Factor | None = None
    """Clip the norm of all gradients together to this value. Default: no clipping."""
    warmup_steps: Natural = 50
    """Number of steps in which the learning rates rise linearly."""
    decay_start: Natural | None = None
    """Step at which a polynomial decay of the learning rates begins. Default: no decay."""
    decay_steps: Positive = 1
    """Number of steps in which the learning rates fall to zero."""
    decay_power: Rate = 2.0
    """Power of the polynomial decay."""

    def __post_init__(self) -> None:
        if self.decay_steps > 1 and self.decay_start is None:
            raise ValueError(f"decay_steps is {self.decay_steps}, it must be 1 without decay_start")

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
    def rule_options(self) -> dict[str, Any]:
        """The options of optimizer rules that are set."""
        options = {name: getattr(self, name) for name in RULE_OPTIONS}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class LoaderConfig:
    """How batches are read from Parquet."""

    shuffle: bool = True
    """Shuffle the training rows."""
    window: Positive | None = None
    """Number of row groups, from all over the files, whose rows are mixed. Default: all, which
    permutes all rows, or as many as fit into half of the host's free memory, or an eighth of a
    GPU's."""
    readers: Positive | None = None
    """Number of threads that decode row groups in the background. Default: half of the cores, at
    most 8; with a GPU three quarters of them, at most 12."""
    prefetch: Positive = 4
    """Number of batches to prepare in advance."""
    drop_last: bool = False
    """Drop the last batch of an epoch if it is not full."""
    allow_outside: bool = False
    """Read the files that meta.json lists outside of its directory too."""


ShardingType = Literal["auto", "replicate", "table", "row", "column"]


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ShardingConfig:
    """How paged tables, and large tables of dense, drop and dynamic, are sharded over the processes
    of torchrun. All other tables are replicated, and their gradients summed."""

    by: ShardingType = "auto"
    """Sharding type: table-wise, row-wise, column-wise or replicated. auto balances bytes and
    look-ups."""
    tables: dict[str, ShardingType] = field(default_factory=dict)
    """Sharding types of single tables by name, for example {C3: column, C12: replicate}."""
    threshold: Natural | None = None
    """Replicate tables of dense, drop and dynamic with fewer rows. Default: those of less than 6
    MB, at most 20,000 rows where GPUs read each other's memory; with lists of ids none."""
    comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which vectors and gradients are sent between processes. Rows that peers read keep the
    type of the table."""
    exchange: Literal["auto", "peers", "collective"] = "auto"
    """How vectors and gradients are exchanged. With peers, GPUs read and write each other's memory,
    or copy to it. auto takes peers where GPUs of one host can do that, else collective."""


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RunConfig:
    """A training run."""

    emb: str = "dense"
    """Kind of embedding. auto chooses the kind and the size of each table that make the most of
    --budget."""
    budget: str | None = None
    """Memory for all embeddings, for example 20MB, or 100x less than dense tables. It sets the
    options of the kind."""
    budget_counts: Literal["serving", "training"] = "serving"
    """Whether --budget counts the embeddings as they are served, or also the state of their
    optimizer; 100x is then relative to dense tables with theirs."""
    data: Directory = "data/demo"
    """Directory of prepared data: from dlrm prepare (scripts/prepare_table.py, and with --criteo
    scripts/prepare_criteo.py) or scripts/make_*.py; or Parquet files with the meta.json of
    scripts/describe_parquet.py. The default is synthetic and is made on first use."""
    follow: Directory | None = None
    """Directory that gets a prepared directory for each day, in the order of their names: train on
    one after another, once, and wait for more. Each is evaluated before it is trained on, and the
    model is saved after it. All have the columns and ids of the first one (--ids-of), or hashed ids
    (--ids hash, with --emb dynamic). A day counts once it has its meta.json."""
    follow_wait: Natural = 60
    """With follow, seconds between two looks for the next day. 0: stop when none is left."""
    follow_export: Directory | None = None
    """With follow, directory that gets an export of the model after each day: the first one in
    full, then for each DAY a delta, DAY.delta, and what it gives, DAY, of which the newest two
    stay."""
    output: Directory = "runs"
    """Directory in which runs are stored."""
    name: RunName | None = None
    """Name of the directory of the run. Default: the kind and the time."""
    resume: Checkpoint | None = None
    """Run directory or checkpoint to resume. The configuration of that run applies; options given
    here override it, for example --epochs 2."""
    init_from: Checkpoint | None = None
    """Run directory or checkpoint of a trained model to start from. Its MLPs are copied, and the
    embeddings of the kinds chosen here are fitted to its tables."""
    new_rows: Literal["unseen", "random"] = "unseen"
    """With init_from, first rows of values that were appended to the data since. unseen: the row of
    unseen values, or the mean row of a table without one. random: as in new tables."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for initialization and shuffling."""
    calibrate: bool = True
    """Calibrate the scores in each evaluation on validation rows: shift the logits so that their
    average is right on training rows, and scale them so that the log loss on the validation rows is
    least. Without these, only shift them. Their order, and so AUC, stays the same."""
    negatives: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the training rows with label 0 that are kept, chosen by seed, the same in every
    epoch. The loss accounts for it, so that probabilities are those of all rows."""
    true_odds: bool = False
    """If the weights of positives and negatives differ on average, account for it in the loss, so
    that probabilities are those of all rows, as if they had no weights."""
    epochs: Count | None = None
    """Number of passes over the training rows. Default: 1; on fewer than 50,000 rows, at most 20,
    and 5 if there are no validation rows; 1 with init_from."""
    max_steps: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | None = None
    """Stop after this number of steps. 0, with init_from, compresses and saves."""
    patience: Annotated[int, Field(ge=0, lt=MAX_COUNT)] | None = None
    """Stop after this number of evaluations without a better validation AUC; 0 for never. Default:
    as many as an epoch has, at least 2, if there are several epochs; 3 if their number is not
    given."""
    batch_size: Count | None = None
    """Number of samples per step, over all processes. Default: 512, or a 256th of the training rows
    if that is less; with fewer than 50,000 rows a 64th, at least 32. Powers of two, or what several
    processes can share."""
    eval_batch_size: Count = 16384
    """Number of samples per batch in evaluations."""
    eval_every: Count | None = None
    """Number of steps between evaluations on the validation split. Default: a quarter of an
    epoch; an epoch and at least 100 steps, if there are several and their number is not given."""
    group: Annotated[str, must("name a column", bool)] | None = None
    """Column of the data, such as a user: also measure AUC within the rows of each of its values,
    the mean (GAUC) and that of the best and the worst tenth. Default: none."""
    log_every: Count = 50
    """Number of steps between log entries."""
    populate_every: Count = 200
    """Number of steps between updates of which rows are cached, for kinds with a cache."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the matrix products in the MLPs and the interaction: fp32, tf32 (on GPUs) or
    bfloat16."""
    step: Literal["auto", "eager", "graph"] = "auto"
    """How a step runs: eager, or captured as a CUDA graph. auto is graph if all tables are on one
    GPU, and eager elsewhere."""
    deterministic: bool = False
    """Give the same bits for the same seed on a GPU too, at some cost in speed."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, ... auto takes a GPU if there is one."""
    profile: bool = False
    """Write a torch.profiler trace of a few steps and a table of the most expensive operations."""
    dry_run: bool = False
    """Print the tables with their sizes, the steps and the memory that training needs, and stop.
    Only meta.json is read, and nothing is written."""
    checkpoint: bool = True
    """Save checkpoints after evaluations: the latest ones, and the one with the best validation
    AUC, whose weights are the result of the run."""
    checkpoint_every: Period | None = None
    """Also save one at this interval: a number of steps, for example 1000, or a time, for example
    90s, 10m or 2h."""
    keep_checkpoints: Count = 2
    """Number of latest checkpoints to keep next to the best one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of each embedding kind, from --<kind>.<option>."""

    def __post_init__(self) -> None:
        if self.max_steps == 0 and not self.init_from:
            raise ValueError("max_steps is 0, it must be at least 1 without init_from")
        if self.follow and ((self.epochs or 1) > 1 or self.patience):
            raise ValueError("follow trains on each day once: remove epochs and patience")

    @property
    def tables_dtype(self) -> str:
        """Type of the embedding parameters."""
        return self.tables.dtype or default_dtype(self.emb, self.budget)


def default_dtype(emb: str, budget: str | None) -> str:
    """Type of the embedding parameters of a run that sets none: at equal bytes, tensor trains in
    bf16 have twice as many exact rows, and more than twice as many ids have rows of int8."""
    return {"tt": "bf16", "dynamic": "int8"}.get(emb, "fp32") if budget else "fp32"
