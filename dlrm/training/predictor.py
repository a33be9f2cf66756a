"""A trained model that scores raw rows: the directory of its run holds all that it needs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from dlrm.training.plots import Plots, report_figure
from dlrm.training.run_directory import LOCK, METRICS, PREPARATION, is_run, run_directory
from dlrm.training.score_file import LABEL, PROBABILITY, ROW
from dlrm.utils.device import free_memory
from dlrm.utils.documents import read_json_lines
from dlrm.utils.messages import format_bytes, printable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    Rows: TypeAlias = (
        pd.DataFrame
        | pa.Table
        | pa.RecordBatch
        | Mapping[str, Any]
        | Sequence[Mapping[str, Any]]
        | str
        | os.PathLike[str]
    )

BATCH_SIZE = 16384
GPU_BATCH_SIZE = 1 << 19
MEMORY_SHARE = 8  # one part in so many of a GPU's free memory, for the values of a batch


@dataclass(frozen=True, kw_only=True, repr=False)
class Predictor:
    """A trained model with the vocabularies and transforms of its data.

    Example::

        model = dlrm.load("runs/NAME")
        scores = model.predict(pandas.DataFrame({"price": [9.5], "user": ["u1"]}))
        scores = model.predict("new.csv")
        metrics = model.evaluate("labelled.csv")
    """

    run: Path
    """The directory of the run, or one of its checkpoints."""

    model: DLRM
    """In evaluation mode."""
    transform: Transform
    reader: RowGroupReader
    """Checks the prepared rows."""
    device: torch.device
    bf16: bool
    """Whether the model was trained, and predicts, in bfloat16 autocast."""
    keep: object = None
    """Kept as long as the model, such as a temporary directory of the run."""

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
            run=Path(path),
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
                of columns, a list of mappings, or the path of a file.
            batch_size: rows that the model gets at a time.

        Returns:
            ``[n]``, in the order of the rows.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a column is missing, or a value does not fit.
        """
        batches = self._batches(rows, batch_size, also=[])
        found = [self._probabilities(batch).to_numpy() for batch in batches]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def evaluate(self, rows: Rows, *, batch_size: int = BATCH_SIZE) -> dict[str, float]:
        """Metrics of raw rows with labels; see :func:`~dlrm.training.metrics.classification`.

        Args:
            rows, batch_size: as in :meth:`predict`, with the label, and the weight if the training
                data has one.

        Raises:
            ValueError: as :meth:`predict`; or a label is missing, or there are no rows.
        """
        return metrics.classification(*self._scores(rows, batch_size))

    def report(self, rows: Rows | None = None) -> Figure:
        """Plots of the loss and AUC during training, which a notebook shows.

        Args:
            rows: labelled rows, such as those of a test, of which the reliability and the
                distribution of the scores are plotted too.
        """
        scores = None if rows is None else Plots.of("given", *self._scores(rows, BATCH_SIZE))
        return report_figure(read_json_lines(run_directory(self.run) / METRICS), scores)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the model and its run as a directory, which :func:`dlrm.load` and all commands read.

        Args:
            path: directory to make.
            overwrite: replace another run at ``path``.

        Raises:
            ValueError: ``path`` exists, and is not to be replaced or is not a run.
        """
        source, target = run_directory(self.run), Path(path)
        if target.exists() and not (overwrite and is_run(target)):
            remedy = "pass overwrite=True, which replaces it" if is_run(target) else "remove it"
            raise ValueError(f"{target} exists: choose another path, or {remedy}")
        if target.exists() and target.samefile(source):
            return

        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".save-") as work:
            copy, replaced = Path(work, "copy"), Path(work, "replaced")
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(f"{LOCK}*"))
            if target.exists():
                target.rename(replaced)
            copy.rename(target)

    def __repr__(self) -> str:
        tables = self.model.sparse_arch
        rows = sum(tables.num_embeddings)
        return (
            f"<dlrm model of {len(self.transform.plan.dense)} numbers and "
            f"{len(self.transform.plan.categorical)} categories or lists ({rows:,} ids, "
            f"{format_bytes(tables.sizes()['bytes'])}) on {self.device}, "
            f"of the run {printable(self.run.name)}>"
        )

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

    def _batches(self, rows: Rows, size: int, also: Sequence[str]) -> Iterator[pa.Table]:
        """Raw rows, prepared, in tables of ``size`` rows; the columns ``also`` are there too."""
        parts: Iterable[tuple[pa.RecordBatch, ...]]
        if isinstance(rows, str | os.PathLike):
            parts = ((batch,) for batch, *_ in self.transform.read([rows]))
        else:
            parts = [(prepare(self.transform, rows, also),)]
        for (table,) in in_batches(parts, size):
            for name in also:
                if name not in table.column_names or table[name].null_count:
                    raise ValueError(f"not all rows have a {name!r}, by which they are evaluated")
            label = self.reader.meta.label
            unused = [label] if label in table.column_names and label not in also else []
            yield table.drop_columns(unused)

    def _scores(self, rows: Rows, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Logits and labels of raw rows, and their weights if the training data has them."""
        meta = Meta.read(run_directory(self.run) / PREPARATION)
        reader = RowGroupReader(self.reader.directory, meta, self.reader.num_embeddings)
        also = [name for name in (meta.label, meta.weight) if name is not None]
        batches = (
            batch_of(reader, reader.convert(table, "the prepared rows")).to(self.device)
            for table in self._batches(rows, batch_size, also)
        )
        return metrics.predict(self.model, batches, bf16=self.bf16)

    def _probabilities(self, prepared: pa.Table) -> pa.Array:
        """The probabilities of prepared rows, which fit into a batch."""
        batch = batch_of(self.reader, self.reader.convert(prepared, "the prepared rows"))
        logits, *_ = metrics.predict(self.model, [batch.to(self.device)], bf16=self.bf16)
        return pa.array(on_host(logits)[0])


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


def on_host(logits: torch.Tensor, *tensors: torch.Tensor) -> list[NDArray[np.float32]]:
    """The probabilities of ``logits [n]``, and other values as they are, in host memory.

    Raises:
        ValueError: a logit is not finite.
    """
    metrics.require_finite_logits(logits)
    return [values.cpu().numpy() for values in (metrics.sigmoid(logits).float(), *tensors)]


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
