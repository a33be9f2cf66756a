"""A trained model that scores raw rows: the directory of its run holds all that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from dlrm.data.parquet import RowGroupReader
from dlrm.data.prepare.fingerprint import other_data
from dlrm.data.prepare.raw_rows import in_batches, prepare
from dlrm.data.prepare.transform import Transform
from dlrm.data.rows import batch_of
from dlrm.data.schema import META_FILE, Meta
from dlrm.model import DLRM
from dlrm.training import metrics
from dlrm.training.checkpoint import load_model
from dlrm.training.run_directory import PREPARATION, run_directory
from dlrm.training.score_file import LABEL, PROBABILITY, ROW
from dlrm.utils.device import free_memory

if TYPE_CHECKING:
    import pandas as pd

    Rows: TypeAlias = (
        pd.DataFrame | pa.Table | pa.RecordBatch | Mapping[str, Any] | str | os.PathLike[str]
    )

HostCopy: TypeAlias = Callable[[], tuple[NDArray[np.float32], ...]]

BATCH_SIZE = 16384
GPU_BATCH_SIZE = 1 << 19
MEMORY_SHARE = 8  # one part in so many of a GPU's free memory, for the values of a batch


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model with the vocabularies and transforms of its data.

    Example::

        model = dlrm.load("runs/NAME")
        scores = model.predict(pandas.DataFrame({"price": [9.5], "user": ["u1"]}))
        scores = model.predict("new.csv")
    """

    model: DLRM
    """In evaluation mode."""
    transform: Transform
    reader: RowGroupReader
    """Checks the prepared rows."""
    device: torch.device
    bf16: bool
    """Whether the model was trained, and predicts, in bfloat16 autocast."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        last: bool = False,
    ) -> Self:
        """Load a model and what raw rows are prepared with.

        Args:
            path: run directory, or a checkpoint in it.
            device: where to predict.
            last: of a run, take the latest checkpoint, not the best.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: the run is damaged, or has nothing to prepare raw rows with.
        """
        model, state = load_model(Path(path), device, last=last)
        kept = run_directory(Path(path)) / PREPARATION
        if not kept.is_dir():
            raise ValueError(
                f"{path} can't score raw rows: it has no {PREPARATION}/, as its data was not made "
                "from raw rows, or by an earlier version; give a prepared directory with "
                f"{META_FILE} instead"
            )
        transform, meta = Transform.load(kept), Meta.read(kept)
        if state.fingerprint != meta.fingerprint:
            raise other_data(kept, path, "give a prepared directory")
        reader = RowGroupReader(kept, replace(meta, weight=None), model.sparse_arch.num_embeddings)
        return cls(
            model=model,
            transform=transform,
            reader=reader,
            device=torch.device(device),
            bf16=state.config.get("precision") == "bf16",
        )

    def predict(self, rows: Rows, *, batch_size: int = BATCH_SIZE) -> NDArray[np.float32]:
        """The probabilities of raw rows.

        Args:
            rows: rows with the columns that the raw training data had, of which a label and others
                that no feature is made of may be missing: a DataFrame, an Arrow table, a mapping
                of columns, or the path of a file.
            batch_size: rows that the model gets at a time.

        Returns:
            ``[n]``, in the order of the rows.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a column is missing, or a value does not fit.
        """
        if isinstance(rows, str | os.PathLike):
            parts = [batch[PROBABILITY] for batch in self.score([rows], batch_size=batch_size)]
        else:
            prepared = pa.Table.from_batches([prepare(self.transform, rows)])
            starts = range(0, len(prepared), batch_size)
            parts = [self._probabilities(prepared.slice(at, batch_size)) for at in starts]
        found = [part.to_numpy() for part in parts]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def score(
        self,
        inputs: Sequence[str | os.PathLike[str]],
        *,
        keep: Sequence[str] = (),
        skip_bad: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[pa.RecordBatch]:
        """Score the raw rows of files, in bounded memory.

        Args:
            inputs: files or patterns, as for the preparation of the training data.
            keep: columns to return as they are, next to those that the preparation passes through.
            skip_bad: leave out bad rows, if the preparation could.
            batch_size: rows that the model gets at a time.

        Yields:
            ``row``, the number of each row in all inputs, from 1, rows left out included; columns
            passed through; ``probability``, and ``label`` if the rows have one.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, a column is missing, or a value does not fit; the error
                names the file and the row.
        """
        label = self.reader.meta.label

        def parts() -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
            read = self.transform.read(inputs, keep=keep, skip_bad=skip_bad)
            for rows, kept, numbers in read:
                passed = [n for n in self.transform.passed if n in rows.schema.names]
                output = {name: kept[name] for name in keep}
                output = {name: rows[name] for name in passed} | output
                require_new_names(output)
                yield rows, pa.RecordBatch.from_pydict({ROW: pa.array(numbers), **output})

        for rows, output in in_batches(parts(), batch_size):
            there = label in rows.schema.names
            inputs_alone = rows.drop_columns([label]) if there else rows
            output = output.append_column(PROBABILITY, self._probabilities(inputs_alone))
            if there:  # null where a row has none
                output = output.append_column(LABEL, rows[label].cast(pa.float32()))
            yield from output.combine_chunks().to_batches()

    def _probabilities(self, prepared: pa.Table) -> pa.Array:
        """The probabilities of prepared rows, which fit into a batch."""
        batch = batch_of(self.reader, self.reader.convert(prepared, "the prepared rows"))
        logits, *_ = metrics.predict(self.model, [batch.to(self.device)], bf16=self.bf16)
        return pa.array(copy_to_host(logits)()[0])


def rows_at_once(model: DLRM, device: torch.device) -> int:
    """How many rows a model should get at a time: on a GPU, many, of which the values in the layers
    take a small part of the free memory.
    """
    if device.type == "cpu":
        return BATCH_SIZE
    features = len(model.sparse_arch.num_embeddings) + 1
    layers = sum(each.out_features for each in model.modules() if isinstance(each, nn.Linear))
    values = layers + features * (model.sparse_arch.embedding_dim + features)
    fit = free_memory(device) // (MEMORY_SHARE * 4 * values)
    return min(GPU_BATCH_SIZE, max(BATCH_SIZE, 1 << fit.bit_length() - 1))


def copy_to_host(logits: torch.Tensor, *others: torch.Tensor) -> HostCopy:
    """Start to copy probabilities and other values of a batch from the device.

    Args:
        logits: ``[n]``, of which the probabilities are taken.
        others: copied as they are.

    Returns:
        A function that waits for the copy and returns probabilities and others. It raises
        ``ValueError`` if a logit is not finite.
    """
    found = metrics.sigmoid(logits).float().masked_fill(~logits.isfinite(), torch.nan)
    host = [_copied(values) for values in (found, *others)]
    copied = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None

    def wait() -> tuple[NDArray[np.float32], ...]:
        if copied is not None:
            copied.synchronize()
        metrics.require_finite_logits(host[0])
        return tuple(own.numpy() for own in host)

    return wait


def _copied(values: torch.Tensor) -> torch.Tensor:
    """Values in host memory; those of a GPU arrive later, in pinned memory: others would wait."""
    if not values.is_cuda:
        return values.to("cpu", non_blocking=True)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def one_behind(copies: Iterable[HostCopy]) -> Iterator[tuple[NDArray[np.float32], ...]]:
    """The results of copies to the host, each after the next one was started: the device computes
    while the host works on them."""
    last: HostCopy | None = None
    for copy in copies:
        if last is not None:
            yield last()
        last = copy
    if last is not None:
        yield last()


def require_new_names(output: Collection[str]) -> None:
    """Check the names of columns that are passed through.

    Raises:
        ValueError: one is that of a column of the scores.
    """
    for name in (ROW, PROBABILITY, LABEL):
        if name in output:
            raise ValueError(
                f"column {name!r} can't be passed through, as the scores have a column of that "
                "name; rename it in the rows"
            )
