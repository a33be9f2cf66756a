"""How a run goes over its rows: batch size, epochs and validations, by how many rows there are."""

from __future__ import annotations

from dlrm.config.schema import MAX_COUNT, RunConfig
from dlrm.data.schema import Meta

BATCH, SMALLEST_BATCH = 512, 32
STEPS, SMALL_STEPS = 256, 64  # of an epoch, at least: of the only one, and of one of several
SMALL_TABLE, MOST_EPOCHS, PATIENCE = 50_000, 20, 3
"""Fewer training rows are trained on in that many epochs, or until so many validations find no
better state."""
FAMILIAR = 10
"""Of so many rows for each id, a model can't learn the labels by heart in an epoch, so a larger
table with that many is trained on in epochs that have as many samples as those of a small one."""
FEW, FEW_OF_A_CLASS = 500, 100
"""Of fewer validation rows, or of fewer in a class, the AUC says little: their log loss chooses the
best state."""
# Steps between validations, at least: the order of few rows may be perfect long before a model's
# probabilities are.
LEARNED, LEARNED_LOSS = 100, 10


def batch_size(
    config: RunConfig, meta: Meta, processes: int = 1, resumed: int | None = None
) -> int:
    """Samples per step, by default a number that the processes can share.

    Args:
        config: of the run.
        meta: of the data.
        processes: how many there are.
        resumed: the samples per step of the run that is resumed.

    Raises:
        ValueError: the processes can't share those of the run that is resumed.
    """
    if given := config.batch_size or resumed:
        if given == resumed and given % processes:
            numbers = ", ".join(str(n) for n in range(1, 65) if given % n == 0)
            raise ValueError(
                f"the run has {given} rows in each step, which {processes} processes can't share "
                f"evenly: resume it with one of these numbers of processes: {numbers}"
            )
        return given
    rows = meta.splits["train"].rows if meta.has_rows("train") else 0
    steps = SMALL_STEPS if rows < SMALL_TABLE or config.follow else STEPS
    share = 1 << (rows // steps).bit_length() >> 1  # a power of two
    size = min(max(share, SMALLEST_BATCH), BATCH)
    return max(size // processes, 1) * processes


def epochs(config: RunConfig, meta: Meta) -> int:
    """Passes over the training rows, at most."""
    if config.follow:  # days that come
        return MAX_COUNT
    if config.epochs is not None:
        return config.epochs
    if config.init_from:
        return 1
    rows, validated = meta.splits["train"].rows, meta.has_rows("val")
    if rows < SMALL_TABLE:
        return MOST_EPOCHS if validated else MOST_EPOCHS // 4
    if not validated or rows < FAMILIAR * sum(meta.cardinalities):
        return 1
    return max(MOST_EPOCHS * SMALL_TABLE // rows, 1)


def validations(config: RunConfig, meta: Meta, epoch: int) -> tuple[int, int, int, bool]:
    """When the model is validated.

    Args:
        config: of the run.
        meta: of the data.
        epoch: the steps of an epoch.

    Returns:
        The steps between validations, the validations without a better state after which training
        ends (0: it never does), the last step, and whether the best state is the one with the
        lowest log loss.
    """
    several = epochs(config, meta)
    last_step = min(several * epoch, MAX_COUNT)
    if config.max_steps is not None:
        last_step = min(config.max_steps, last_step)
    val = meta.splits["val"] if meta.has_rows("val") else None
    by_loss = val is not None and (val.rows < FEW or val.rarer < FEW_OF_A_CLASS)
    if config.follow:  # days are evaluated when they begin and end
        return config.eval_every or MAX_COUNT, 0, last_step, by_loss

    until_best = config.epochs is None and several > 1
    least = epoch // 4
    if until_best:
        least = max(epoch, LEARNED_LOSS if by_loss else LEARNED)
    every = config.eval_every or max(least, 1)
    patience = config.patience
    if patience is None and several > 1:
        patience = PATIENCE if until_best else max(epoch // every, 2)
    return every, patience or 0, last_step, by_loss


def planned(config: RunConfig, meta: Meta, epoch: int, size: int) -> tuple[int, str]:
    """The steps of all epochs, and a line that says how many there are.

    Args:
        config: of the run.
        meta: of the data.
        epoch: the steps of an epoch.
        size: samples per step.
    """
    several = epochs(config, meta)
    text = f"{several} epoch{'s' * (several != 1)} of {epoch:,} steps with {size:,} rows each"
    if config.follow:
        text = f"{size:,} rows each step"
    elif config.max_steps is not None and config.max_steps < several * epoch:
        text = f"{config.max_steps:,} steps, as given, of {text}"
    elif config.epochs is None and several > 1:
        few = "a small table" if meta.splits["train"].rows < SMALL_TABLE else "few ids"
        text = f"note: {few}, so at most {text} (--epochs, --batch_size)"
    if size not in (config.batch_size, batch_size(config, meta)):
        text += ", which the processes can share"
    return several * epoch, text
