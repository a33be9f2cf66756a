"""Models whose tables are fitted to those of a trained one, and the learning rates for them.

The model is in its second epoch, in which large rates overfit: those of the MLPs nearly freeze
them. A table that lost much in the fit has to learn again, and gets larger rates than one that lost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm.data.frequencies import read_frequencies
from dlrm.data.prepare.fingerprint import other_data, require_same_ids, same_values
from dlrm.data.schema import META_FILE, Meta
from dlrm.distributed.world import World
from dlrm.embeddings.base import Embedding
from dlrm.embeddings.common.initial_rows import initial_bound
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import KnownIds, make_table_plan, owners_of
from dlrm.training.checkpoint import load_model
from dlrm.training.run_directory import PREPARATION, run_directory

LEAST, MOST = 0.1, 0.3  # the factor if nothing was lost, and if much was
LOST = 0.005  # validation AUC from which on it is the latter


class Trained(NamedTuple):
    """A trained model to start from."""

    model: DLRM | None
    """None if it has no rows for values of the new data: then its own rows were all copied."""
    data: str | None
    """The data that it was trained on, as named in its configuration; None if that was extended."""


def with_new_rows(
    tables: list[Tensor], meta: Meta, kept: Sequence[Tensor], start: str, seed: int
) -> list[Tensor]:
    """Add rows to tables, each ``[V, D]``, so that they have those of the data.

    Every process gets the same rows. The list is emptied on the way, so that only one table at a
    time is there twice.

    Args:
        tables: of the trained model, in the order of the columns.
        meta: of the data.
        kept: ``[V]`` for each table, whether an id has the value that it had. Other rows are
            reinitialized.
        start, seed: as for :func:`fit`.
    """
    extended = []
    random = torch.Generator().manual_seed(seed)
    for column, same in zip(meta.categorical, kept, strict=True):
        old = tables.pop(0)
        new = torch.ones(column.cardinality, dtype=torch.bool)
        new[: len(old)] = ~same
        more = int(new.sum())

        # Random rows, the row of unseen values, or the mean of a table that has none.
        if start == "random":
            rows = torch.rand(more, old.shape[1], generator=random).mul_(2).sub_(1)
            rows *= initial_bound(column.cardinality)
        elif column.oov_id is not None:
            rows = old[column.oov_id].expand(more, -1)
        else:
            rows = old.mean(0).expand(more, -1)

        if more:
            old = torch.cat([old, old.new_empty(len(new) - len(old), old.shape[1])])
            old[new.to(old.device)] = rows.to(old)
        extended.append(old)
    return extended


def fit(
    model: DLRM, path: str, data: str, meta: Meta, world: World, *, new_rows: str, seed: int
) -> Trained:
    """Fit a model to a trained one: the MLPs are copied, the tables fitted.

    If the data extends that of the trained model, the rows of values that kept their ids are
    copied, and those of new values are reinitialized. The optimizers start from scratch.

    Args:
        model: the new model.
        path: run directory or checkpoint of the trained one.
        data: the prepared directory to train on.
        meta: what describes it.
        world: the processes, all of which call this function.
        new_rows: what rows of new values begin with, ``unseen`` or ``random``; see
            :class:`dlrm.config.schema.RunConfig`.
        seed: of random ones.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, does not fit, its ids stand for other values, the vocabularies
            that tell for which are missing, or a kind of embeddings cannot take new rows.
    """
    trained, state = load_model(path, world.device, world=world)
    if meta.rows_at(state.fingerprint) == trained.sparse_arch.num_embeddings:
        _require_growing(model, path, data)
        kept = _kept_ids(path, data, meta, state.fingerprint)
        extend = partial(with_new_rows, meta=meta, kept=kept, start=new_rows, seed=seed)
        model.load_trained(trained, extend)
        return Trained(None, None)
    require_same_ids(data, meta, state.fingerprint, path)
    model.load_trained(trained)
    return Trained(trained, str(state.config.get("data")))


def compress(
    trained: DLRM,
    spec: Mapping[str, Any],
    data: tuple[Path, Meta],
    kind: str,
    budget: str,
    dtype: str,
) -> DLRM:
    """A trained model with its tables fitted by another kind, on the same device.

    Args:
        trained: the model.
        spec: the arguments that it was made with.
        data: the prepared directory that tells how often each id occurs, and what describes it.
        kind: of embeddings, or ``auto``.
        budget: memory for all tables, such as ``20MB`` or ``100x``.
        dtype: of the fitted tables.

    Returns:
        The new model, in evaluation mode.

    Raises:
        ValueError: the kind is unknown or can't be that small.
    """
    directory, meta = data
    plan = make_table_plan(
        meta.tables,
        trained.sparse_arch.num_embeddings,
        trained.sparse_arch.embedding_dim,
        kind,
        budget=budget,
        dtype=dtype,
        ids=KnownIds(
            counts=lambda: read_frequencies(directory, meta),
            ordered=not meta.extends,
            owners=owners_of(spec["plan"]),
        ),
        trained=True,
    )

    # Bags are pooled as before.
    pooled = ({k: v for k, v in options.items() if k == "mode"} for _, options in spec["plan"])
    plan = [(kind, options | mode) for (kind, options), mode in zip(plan, pooled, strict=True)]

    model = DLRM(**{**spec, "plan": plan, "tables_dtype": dtype})
    model.to(next(trained.parameters()).device)
    model.load_trained(trained)
    return model.eval()


def _kept_ids(path: str, data: str, meta: Meta, fingerprint: str | None) -> list[Tensor]:
    """For each table of a trained model, whether its ids have the same values in the data, ``[V]``.

    Others were given to new values by ``--forget``.
    """
    before = run_directory(path) / PREPARATION
    if not (before / META_FILE).is_file() or Meta.read(before).fingerprint != fingerprint:
        raise other_data(before, path, "start without --init_from")
    return [torch.from_numpy(same_values(data, before, name)) for name in meta.tables]


def _require_growing(model: DLRM, path: str, data: str) -> None:
    """Raise if a kind of the model has no row of its own for every id."""
    for group, features in model.sparse_arch.embeddings():
        if not group.grows:
            raise ValueError(
                f"--emb {group.kind()} can't take the values that {data} appends to the ids of "
                f"{path}, for {len(features)} tables: train on with --emb dense, paged or offload, "
                "and compress that run with --init_from afterwards"
            )


def auc_lost(trained: Mapping[str, float], fitted: Mapping[str, float]) -> float:
    """AUC that fitting the tables cost; NaN without metrics, so without validation rows."""
    return trained.get("auc", math.nan) - fitted.get("auc", math.nan)


def rates_after_fit(
    model: DLRM, before: str | None, now: str, lost: float, epochs: float
) -> tuple[float, bool]:
    """Choose the learning rates of a model whose tables were fitted.

    Some kinds learn more from scratch than from a fit. If there are any, and the model will train
    for an epoch of the same data, all tables are reinitialized, and nothing is slowed down. On
    fewer rows, or on other rows, they would learn too little.

    Args:
        model: the model, whose tables may be reinitialized.
        before: the data that the model was trained on, unless ``now`` extends it.
        now: the data to train on. Other rows are no second epoch: the factor is 1.
        lost: validation AUC that fitting the tables cost; NaN, if it is unknown, counts as 0.
        epochs: that are to come.

    Returns:
        The factor f on the learning rates, f for embeddings and f**4 for the rest; and whether the
        tables were reinitialized.
    """
    if before is None or Path(before).resolve() != Path(now).resolve():
        return 1.0, False
    groups = [group for group in model.sparse_arch.groups if isinstance(group, Embedding)]
    if epochs < 1 or all(group.trains_from_fit for group in groups):
        return min(MOST, max(LEAST, MOST * lost / LOST)), False

    torch.manual_seed(torch.initial_seed())  # in every process the same
    for group in groups:
        group.reset_parameters()  # type: ignore[operator]  # which every kind has
    return 1.0, True
