"""How good the model of a run is on rows that it does not train on, and whether it still learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.data.loader import BatchLoader
from dlrm.data.shuffle import shuffle_memory
from dlrm.distributed.interruption import Interruption
from dlrm.model import DLRM
from dlrm.training import metrics
from dlrm.training.calibration import by_class, fit_calibration
from dlrm.training.loaders import HeldOutRows
from dlrm.training.plots import Plots
from dlrm.training.ranking import group_areas
from dlrm.utils.messages import print_error

GUESSING = math.log(2)  # log loss of a model that predicts 0.5 for every row
# No untrained model is there: the last bias begins as N(0, 1), so that 1 seed in 20 begins at 2 if
# all labels are of the other class.
DIVERGED = 6 * GUESSING
OVERFITTED = 1e4  # more than a model that knows its training rows by heart has on others
CALIBRATED = 32768  # training rows, at most, that show where the average of the scores is,
OF_A_CLASS = 2048  # and of them, about as many of the rarer class: the average is then known to 2%
SPREAD = 1 << 27  # bytes of decoded rows, at most, to choose these from
ALIKE = 100  # rows; a model may well give fewer the same score


class HeldOut:
    """Evaluates the model of a run.

    Args:
        model: of the run.
        precision: of the run; with ``bf16``, evaluate in bfloat16 autocast.
        calibrates: whether each evaluation of ``val`` calibrates the model.
        odds: of a positive by weight, divided by those by rows, where probabilities are to be those
            of rows; see :func:`~dlrm.training.step.mean_loss`.
        interruption: ends an evaluation after a batch, in all processes.
        rows: to evaluate it on.

    Attributes:
        interruption: as given.
        diverged: why the model of the last evaluation has diverged; empty if it has not.
        loss: log loss of the last evaluation, at the odds by weight.
        plots: of the last evaluation; None before the first one.
    """

    def __init__(
        self,
        model: DLRM,
        precision: str,
        calibrates: bool,
        odds: float,
        interruption: Interruption,
        rows: HeldOutRows,
    ) -> None:
        self._model, self._bf16 = model, precision == "bf16"
        self._calibrates, self._shift = calibrates, math.log(odds)
        self.interruption, self._world = interruption, interruption.world
        self.use(rows)

    def use(self, rows: HeldOutRows) -> None:
        """Evaluate the model on other rows from now on."""
        self._loaders, self._groups, self._seen = rows
        self._some_seen = cache(self._read_some)  # once: the footers of all files take a while
        self._kept: list[Batch] = []  # all batches of ``val``
        self._collapsed, self.diverged = False, ""
        self.loss = math.nan
        self.plots: Plots | None = None

    def evaluate(
        self, split: str, step: int, stop: Callable[[], object], *, model: DLRM | None = None
    ) -> dict[str, float]:
        """The metrics of a split; none if the data has no such rows.

        The model is calibrated on those of ``val`` first, if it is to be; without them only its
        average, on training rows. Sets :attr:`diverged`, and warns the first time that a trained
        model gives all rows the same score.

        Args:
            split: ``val`` or ``test``, or ``day`` for rows that are trained on next.
            step: steps that the model was trained for.
            stop: see :meth:`Interruption.check`.
            model: another model with the same inputs.
        """
        # The calibration is fitted to the scores of the model as it was trained.
        calibrates = self._calibrates and split == "val" and model is None
        if calibrates:
            self._set_calibration(1.0, 0.0)
        if (loader := self._loaders.get(split)) is None:
            if calibrates:
                self._fit_calibration(None)
            return {}
        rows = self._val_rows(loader) if split == "val" else loader
        batches = self.interruption.between(rows, stop)
        scores = self._predict(loader, batches, loader.rows, model)
        if calibrates:
            scale, shift = self._fit_calibration(scores)
            scores = (scores[0] * scale + shift, *scores[1:])

        values = metrics.classification(*scores)
        if split in self._groups:
            values |= group_areas(*scores, groups=self._groups[split]).metrics()
        self.plots = Plots.of(split, *scores)

        # At the odds by row, a weighted loss is lower for a state that scores higher on average.
        self.loss = values["log_loss"]
        if self._shift:
            self.loss = metrics.log_loss(scores[0] + self._shift, *scores[1:])

        if step and not self._collapsed:
            self._collapsed = self._warn_of_collapse(scores[0], split, step)
        self.diverged = ""
        if step:
            self.diverged = self._divergence(self._uncalibrated_loss(*scores), split, step)
        if self.diverged and split == "val" and self._world.first:
            print_error(f"warning: {self.diverged}")
        return values

    def _val_rows(self, loader: BatchLoader) -> Iterator[Batch]:
        """The batches of ``val``, which stay in the memory of a GPU if it has room for them."""
        if self._kept:
            yield from self._kept
            return
        kept: list[Batch] = []
        room = shuffle_memory(loader.device) if loader.device.type == "cuda" else 0
        for batch in loader:
            room -= sum(tensor.nbytes for tensor in batch.tensors)
            kept = [*kept, batch] if room > 0 else []
            yield batch
        self._kept = kept

    def _fit_calibration(self, later: Sequence[Tensor] | None) -> tuple[float, float]:
        """Calibrate the model; returns scale and shift.

        Rows count by their weight, so the scores are moved as the loss moves them, and back.
        """
        logits, labels, *weights = self._predict_seen()

        # They count by class, since the chosen row groups may have more of one than all have.
        if labels.min() < labels.max():
            train = self._some_seen()[0].meta.splits["train"]
            weights = [by_class(labels, train.positives / train.rows, *weights)]
        else:
            labels = (logits + self._shift).sigmoid()  # the average stays as trained
        if later is not None:
            later = later[0] + self._shift, *later[1:]
        scale, shift = fit_calibration((logits + self._shift, labels, *weights), later)
        shift += (scale - 1) * self._shift
        self._set_calibration(scale, shift)
        return scale, shift

    def _set_calibration(self, scale: float, shift: float) -> None:
        self._model.calibration.copy_(torch.tensor([scale, shift]))

    def _divergence(self, log_loss: float, split: str, step: int) -> str:
        """Why the model has diverged; empty if it has not.

        It has if its log loss is above :data:`DIVERGED`, on training rows too, or beyond what
        overfitting reaches. A model that is only poor, or was trained on a few rows, has not: one
        that overfits is good on the rows it knows.
        """
        if log_loss <= DIVERGED:
            return ""
        problem = "training diverged" + (", this state is not saved" if split != "day" else "")
        problem += f": at step {step} the log loss is "
        problem += f"{log_loss:.3g}, where predicting 0.5 gives {GUESSING:.2f}: {metrics.REMEDY}"
        if log_loss > OVERFITTED:
            return problem
        return problem if self._uncalibrated_loss(*self._predict_seen()) > DIVERGED else ""

    def _uncalibrated_loss(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> float:
        """The log loss of scores without the calibration, which would hide that they diverged."""
        scale, shift = self._model.calibration.tolist()
        return metrics.log_loss((logits.double() - shift) / scale, labels, weights)

    def _warn_of_collapse(self, logits: Tensor, split: str, step: int) -> bool:
        """Whether all scores are equal: if no unit of a layer is active on any row, only the biases
        after it get gradients, and the model stays a constant."""
        if len(logits) < ALIKE or logits.min() != logits.max():
            return False
        if self._world.first:
            print_error(
                f"warning: at step {step} the model predicts {float(logits[0].sigmoid()):.3g} for "
                f"each of the {len(logits):,} {split} rows, and may never recover: "
                + metrics.REMEDY
            )
        return True

    def _read_some(self) -> tuple[BatchLoader, list[Batch], int]:
        """A loader of training rows from all over the files, its first batches, and their rows. The
        first rows of a log would not do: of their ids, nothing was known then."""
        loader = self._seen(shuffle=True, window=None, memory=SPREAD)
        train, share = loader.meta.splits["train"], loader.batch_size * self._world.size
        rows = min(CALIBRATED, OF_A_CLASS * train.rows // max(train.rarer, 1))
        batches = list(islice(loader, -(-rows // share)))
        return loader, batches, min(len(batches) * share, loader.rows)

    def _predict_seen(self) -> tuple[Tensor, ...]:
        """Logits, labels and any weights of some of the training rows."""
        return self._predict(*self._some_seen())

    def _predict(
        self,
        loader: BatchLoader,
        batches: Iterable[Batch],
        rows: int,
        model: DLRM | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits, labels and any weights of rows, in their order."""
        found = metrics.predict(model or self._model, batches, bf16=self._bf16)
        return self._world.in_order(found, rows, loader.batch_size)
