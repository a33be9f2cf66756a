"""Permutation importance: how much worse a model gets if the values of a column are shuffled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.data.batch import Batch
from dlrm.model import DLRM
from dlrm.training import metrics
from dlrm.utils.messages import align_right, printable
from dlrm.utils.offsets import offsets_of

REPEATS = 5
BATCH_SIZE = 16384  # rows among which values are shuffled
LOST = {"auc": -1, "log_loss": 1}  # the sign with which a change is a loss

Importance = dict[str, dict[str, float]]
"""By column, most important first: the mean loss of ``auc`` and ``log_loss`` over the repeats, and
``auc_std`` and ``log_loss_std``, their spread."""


def permutation_importance(
    model: DLRM, batches: Sequence[Batch], columns: Sequence[str], *, seed: int, bf16: bool = False
) -> Importance:
    """Shuffle the values of each column among the rows of a batch, several times, and measure.

    Columns that say the same share their importance: the model reads one where the other is
    shuffled.

    Args:
        model: the model.
        batches: rows in random order, on the model's device.
        columns: names of the dense columns, then of the categorical ones.
        seed: of the permutations.
        bf16: run in bfloat16 autocast, as in training.

    Reference: Breiman, "Random Forests", Machine Learning 45, 2001.
    """

    def measure(batches: Iterable[Batch]) -> dict[str, float]:
        return metrics.classification(*metrics.predict(model, batches, bf16=bf16))

    def shuffle(column: int, random: np.random.Generator) -> Iterator[Batch]:
        return (permuted(batch, column, random) for batch in batches)

    before = measure(batches)
    found: Importance = {}
    for index, name in enumerate(tqdm(columns, "importance", unit=" columns", disable=None)):
        random = np.random.default_rng((seed, index))  # whatever the other columns are
        found[name] = {}
        repeats = [measure(shuffle(index, random)) for _ in range(REPEATS)]
        for metric, sign in LOST.items():
            lost = [sign * (after[metric] - before[metric]) for after in repeats]
            found[name][metric] = float(np.mean(lost))
            found[name][f"{metric}_std"] = float(np.std(lost, ddof=1))
    return dict(sorted(found.items(), key=lambda item: -item[1]["log_loss"]))


def permuted(batch: Batch, column: int, random: np.random.Generator) -> Batch:
    """A batch in which the values of a column are shuffled, lists as a whole.

    Args:
        batch: the batch.
        column: number of a dense feature, or ``N`` plus that of a categorical one.
        random: draws the order.
    """
    order = torch.from_numpy(random.permutation(batch.size)).to(batch.labels.device)

    def shuffled(values: Tensor, row: int) -> Tensor:
        values = values.clone()
        values[row] = values[row, order]
        return values

    feature = column - len(batch.dense)
    if feature < 0:
        return replace(batch, dense=shuffled(batch.dense, column))
    if batch.offsets is None:
        return replace(batch, ids=shuffled(batch.ids, feature))

    # The bags of the feature change places, and the ids of all others stay where they are.
    starts, lengths = (
        shuffled(values.view(-1, batch.size), feature).flatten()
        for values in (batch.offsets[:-1], batch.offsets.diff())
    )
    offsets = offsets_of(lengths)
    places = (starts - offsets[:-1]).repeat_interleave(lengths)
    places += torch.arange(len(places), device=places.device)
    return replace(batch, ids=batch.ids[places], offsets=offsets)


def importance_table(found: Importance) -> str:
    """The importance of the columns as text."""
    rows = [["column", "AUC lost", "", "log loss gained", ""]]
    for name, lost in found.items():
        cells = [f"{lost[m]:.4f} ±{lost[f'{m}_std']:.4f}".split(" ") for m in LOST]
        cells = [["-", ""] if "nan" in cell else cell for cell in cells]  # of rows of one class
        rows.append([printable(name), *cells[0], *cells[1]])
    return align_right(rows)
