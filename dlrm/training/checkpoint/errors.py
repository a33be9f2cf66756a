"""What PyTorch's distributed checkpoints say, in one line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warning that there is only one process, and logged tracebacks."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    finally:
        logger.setLevel(level)


def one_line(error: BaseException, what: str, kind: Callable[[str], Exception]) -> BaseException:
    """An error of one line for one that several processes may have caused."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    chains = [list(_chain(failure[0])) for failure in failures] or [list(_chain(error))]
    causes = [cause for chain in chains for cause in chain]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return KeyboardInterrupt()
    system = [cause.strerror or str(cause) for cause in causes if isinstance(cause, OSError)]
    lines = [line for line in str(chains[0][0]).splitlines() if line.strip()]
    why = system[-1] if system else lines[-1] if lines else repr(chains[0][0])
    return kind(f"{what}: {why}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
