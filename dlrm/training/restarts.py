"""The run that a job of torchrun continues after a restart.

``checkpoints/job.json`` names the job of a run. An attempt that finds its own job there resumes
that run, or starts it again if it has no checkpoint yet.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from dlrm.training.run_directory import CHECKPOINTS, HOLDER, LOCK, has_checkpoint, run_directory
from dlrm.utils.atomic import atomic_write
from dlrm.utils.documents import read_json

JOB = "job.json"


def choose_run(new: Path, resume: str | None, job: str | None) -> tuple[Path, str | None, bool]:
    """The directory of a run, the run or checkpoint that it resumes, if any, and whether an earlier
    attempt of this job wrote to it, which may still be ending.

    Args:
        new: the directory of a new run.
        resume: value of ``--resume``.
        job: see :class:`~dlrm.distributed.world.World`.

    Raises:
        FileNotFoundError: there is no checkpoint to resume.
    """
    places = [run_directory(resume)] if resume else [new, *new.parent.glob("*/")]
    for directory in places if job is not None else ():
        if _job_of(directory) == job:
            found = str(directory) if has_checkpoint(directory) else None
            print(
                f"note: restarted by torchrun: {directory} "
                + ("is resumed" if found else "had no checkpoint and begins again"),
                file=sys.stderr,
            )
            return directory, found, True
    return places[0], resume, False


def clear(directory: Path) -> None:
    """Remove what an attempt without a checkpoint left in the directory of a run, which this
    process holds.
    """
    for path in [*directory.iterdir(), *(directory / CHECKPOINTS).glob("*")]:
        if path.name in (LOCK, HOLDER, CHECKPOINTS, JOB):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def note_job(directory: Path, job: str | None) -> None:
    """Note the job that writes a run; None if there is none."""
    path = directory / CHECKPOINTS / JOB
    if job is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(job))


def _job_of(directory: Path) -> object:
    with suppress(OSError, ValueError):
        return read_json(directory / CHECKPOINTS / JOB)
    return None
