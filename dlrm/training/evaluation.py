"""A trained model, and the rows of prepared data to score with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from dlrm.data.groups import Groups
from dlrm.data.loader import BatchLoader
from dlrm.data.prepare.fingerprint import require_same_ids
from dlrm.data.schema import Meta
from dlrm.model import DLRM
from dlrm.training import metrics
from dlrm.training.checkpoint import load_model
from dlrm.training.importance import BATCH_SIZE, Importance, permutation_importance
from dlrm.training.ranking import group_areas
from dlrm.utils.messages import print_error


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model from a checkpoint, and a loader of the rows to score."""

    model: DLRM
    """In evaluation mode."""
    loader: BatchLoader
    """Reads one split in order, on the device of the model."""
    open_loader: Callable[..., BatchLoader]
    """Opens the same split with other options of its loader."""
    bf16: bool
    """Whether the model was trained, and is evaluated, in bfloat16 autocast."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        data: str | Path,
        split: str = "test",
        *,
        device: torch.device,
        batch_size: int | Callable[[DLRM], int] | None = None,
        allow_outside: bool = False,
        last: bool = False,
    ) -> Self:
        """Load a model and open its data.

        Data that was prepared separately from that of the model is refused; if that is not known,
        a note names the tables that differ in size.

        Args:
            path: run directory, whose best checkpoint is taken, or a checkpoint.
            data: prepared directory.
            split: the split to score.
            device: where to evaluate.
            batch_size: samples per batch, or how many for a model. Default: as in the evaluations
                of the run.
            allow_outside: see :class:`~dlrm.data.loader.Reading`.
            last: of a run, take the latest checkpoint.

        Raises:
            FileNotFoundError: there is no checkpoint or no such data.
            ValueError: the checkpoint is damaged, or the data does not fit the model.
        """
        model, state = load_model(path, device, last=last)
        used = state.used_options
        size = batch_size(model) if callable(batch_size) else batch_size

        # Importances open the rows again, in other batches.
        open_loader = partial(
            BatchLoader,
            data,
            split,
            device=device,
            num_embeddings=model.sparse_arch.num_embeddings,
            allow_outside=allow_outside,
        )
        loader = open_loader(batch_size=size or used.eval_batch_size)

        columns = len(loader.meta.dense)
        if columns != model.num_dense:
            raise ValueError(
                f"{data} has {columns} dense columns, the model {model.num_dense}: name data that "
                "was prepared like the model's training data"
            )
        require_same_ids(data, loader.meta, state.fingerprint, path)
        _note_other_tables(model, loader.meta)

        return cls(
            model=model,
            loader=loader,
            open_loader=open_loader,
            bf16=used.precision == "bf16",
        )

    def evaluate(self, groups: Groups | None = None) -> dict[str, Any]:
        """Metrics of all rows; see :func:`~dlrm.training.metrics.classification`.

        Args:
            groups: of the rows: AUC by group too, and the ``worst`` and ``best`` groups by name.
        """
        outputs = metrics.predict(self.model, self.loader, bf16=self.bf16)
        values: dict[str, Any] = metrics.classification(*outputs)
        if groups is not None:
            areas = group_areas(*outputs, groups=groups)
            values |= areas.metrics() | areas.extremes(groups)
        return values

    def importance(self, rows: int, seed: int) -> Importance:
        """The importance of each column, measured on about as many random rows."""
        loader = self.open_loader(batch_size=BATCH_SIZE, shuffle=True, seed=seed)
        batches = list(islice(loader, -(-rows // BATCH_SIZE)))
        columns = [*loader.meta.dense, *loader.meta.tables]
        return permutation_importance(self.model, batches, columns, seed=seed, bf16=self.bf16)


def _note_other_tables(model: DLRM, meta: Meta) -> None:
    """Print a note on tables whose size in the data differs from that in the model.

    The ids of two preparations stand for different values.
    """
    pairs = zip(meta.tables, meta.cardinalities, model.sparse_arch.num_embeddings, strict=False)
    sizes = [f"{name} {rows:,} and not {size:,}" for name, rows, size in pairs if rows != size]
    if sizes:
        text = ", ".join(sizes[:3]) + (", ..." if len(sizes) > 3 else "")
        print_error(
            f"note: {len(sizes)} tables of the data differ in size from the model's ({text}): was "
            "it prepared separately? A preparation with --ids-of gives rows the ids of earlier data"
        )
