"""A dry run: sizes, memory and steps from the configuration and ``meta.json`` alone."""

from __future__ import annotations

from collections import Counter

import torch

from dlrm.config import pace
from dlrm.config.build import build_optimizers
from dlrm.config.model_spec import ModelSpec, auto_plan, model_spec
from dlrm.config.schema import RunConfig
from dlrm.data.frequencies import IdStatistics
from dlrm.data.schema import Meta
from dlrm.data.shuffle import ORDER_BYTES, shuffle_memory, windows_within
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.table_plan import format_table_plan
from dlrm.utils.device import pick_device
from dlrm.utils.messages import format_bytes

ROW_GROUP = 1 << 17  # rows of a row group, as the programs here write them
STAGED = 16  # row groups in host memory on their way to a GPU, at most


def describe(config: RunConfig) -> str:
    """The tables with their sizes, the steps, and the memory that training needs.

    The model is built without memory. Nothing is read but ``meta.json``, and the frequencies of
    ids if a budget depends on them.

    Raises:
        FileNotFoundError, ValueError: as training does.
    """
    meta, device = Meta.read(config.data), pick_device(config.device)
    if not meta.has_rows("train"):
        raise ValueError(f"{config.data} has no training rows")

    # The model has shapes, but no memory.
    ids = IdStatistics(config.data, meta)
    spec = model_spec(config, meta, ids)
    with torch.device("meta"):
        model = DLRM(**spec)
        dense, sparse = build_optimizers(config.optim, model)
    sizes = [sum(table.values()) for table in model.sparse_arch.footprint()]
    compression = model.sparse_arch.sizes()["compression"]

    batch_size = pace.batch_size(config, meta)
    memory = _weights(model, dense, sparse) + _batch(batch_size, model, spec)
    memory += _shuffle_buffers(config, meta, device)

    tables = format_table_plan(meta.tables, meta.cardinalities, spec["plan"], sizes)
    lines = [
        auto_plan(config, meta, tables) or tables,
        f"embeddings: {format_bytes(sum(sizes))}, compression {compression:,.1f}x",
        _steps(config, meta, batch_size),
    ]
    if device.type == "cpu":
        lines.append(_total("host", memory))
    else:
        for place, name in (("device", str(device)), ("host", "host")):
            lines.append(_total(name, [part for part in memory if part[0] == place]))
    return "\n".join([*lines, "a dry run: no rows were read, and nothing was written"])


def _steps(config: RunConfig, meta: Meta, size: int) -> str:
    """The number of steps and epochs, and how often there is an evaluation."""
    rows = _training_rows(config, meta)
    epoch = rows // size if config.loader.drop_last else -(-rows // size)
    if not epoch:
        raise ValueError("--loader.drop_last leaves no batch: lower --batch_size")
    if config.follow:
        return f"steps: {epoch:,} of {size:,} samples on the first day, {config.data}"
    every, _, steps, _ = pace.validations(config, meta, epoch)
    return (
        f"steps: {steps:,} of {size:,} samples, {steps / epoch:.3g} epochs of {rows:,} rows, "
        f"an evaluation every {every:,}"
    )


def _training_rows(config: RunConfig, meta: Meta) -> int:
    """The rows to train on; with ``negatives``, their expected number."""
    split = meta.splits["train"]
    return split.positives + round(config.negatives * (split.rows - split.positives))


Memory = list[tuple[str, str, int]]
"""Where it is (``device`` or ``host``), what it holds, bytes."""


def _weights(model: DLRM, dense: RowOptimizer, sparse: RowOptimizer) -> Memory:
    mlps = model.dense_parameters()
    memory: Memory = [
        ("device", "weights", sum(parameter.nbytes for parameter in mlps)),
        ("device", "optimizer state", dense.state_bytes(mlps)),
    ]
    for group, _ in model.sparse_arch.embeddings():
        tables = group.footprint()
        host = sum(table.get("host", 0) for table in tables)
        size = sum(sum(table.values()) for table in tables)
        state = sparse.state_bytes(group.parameters())
        memory.append(("host", "weights", host))
        memory.append(("device", "weights", size - host))
        # Rows in host memory have their state there.
        memory.append(("host", "optimizer state", state * host // size))
        memory.append(("device", "optimizer state", state - state * host // size))
    return memory


def _batch(batch_size: int, model: DLRM, spec: ModelSpec) -> Memory:
    """The memory of a step, roughly: without the work space of its operations."""
    dense = sum(parameter.nbytes for parameter in model.dense_parameters())
    vectors = (len(spec["num_embeddings"]) + 1) * spec["embedding_dim"]
    layers = spec["cross_layers"] if spec["interaction"] == "dcn" else 1
    width = spec["num_dense"] + vectors + layers * model.interaction.out_features
    width += sum(spec["bottom_mlp"]) + sum(spec["top_mlp"]) + 1
    return [
        ("device", "gradients", dense + 2 * 4 * batch_size * vectors),  # of rows, and sorted
        ("device", "activations", 2 * 4 * batch_size * width),  # and their gradients
    ]


def _shuffle_buffers(config: RunConfig, meta: Meta, device: torch.device) -> Memory:
    ids = sum(size or 1 for size in meta.lengths)  # of ragged bags, nothing is known here
    row = 4 * (1 + len(meta.dense) + ids) + ORDER_BYTES
    size = _training_rows(config, meta) * row
    row_groups = -(-meta.splits["train"].rows // ROW_GROUP)
    window = config.loader.window if config.loader.shuffle else 1
    if window is None:
        windows = windows_within(shuffle_memory(device), size, row_groups)
    else:
        windows = -(-row_groups // window)
    place = "host" if device.type == "cpu" else "device"
    # The window in use and the next one.
    memory = [(place, "shuffle buffers", size * min(2, windows) // windows)]
    if place == "device":
        memory.append(("host", "shuffle buffers", min(size, STAGED * ROW_GROUP * row)))
    return memory


def _total(place: str, memory: Memory) -> str:
    """One line: the sum, and its parts."""
    parts: Counter[str] = Counter()
    for _, what, size in memory:
        parts[what] += size
    texts = [f"{what} {format_bytes(size)}" for what, size in parts.items() if size]
    return f"memory of {place}: about {format_bytes(parts.total())}: {', '.join(texts)}"
