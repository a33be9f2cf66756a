"""The run that a job of torchrun goes on with after a restart.

A directory of a run names its job in the file ``job``. An attempt that finds its own job there
resumes that run, or starts it again if it has no checkpoint yet.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from dlrm.distributed.world import World
from dlrm.training.run_directory import has_checkpoint, new_or_resumed, run_directory

JOB = "job"


def choose_run(new: Path, resume: str | None, job: str | None) -> tuple[Path, str | None]:
    """The directory of a run, and the run or checkpoint that it resumes, if any.

    Args:
        new: the directory of a new run.
        resume: value of ``--resume``.
        job: see :class:`~dlrm.distributed.world.World`.

    Raises:
        ValueError: there is a run of this name, and it is not of this job.
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
            return directory, found
    return new_or_resumed(new, resume), resume


def begin(directory: Path, world: World, *, resumed: bool) -> None:
    """Make the directory of a run, or remove what an attempt without a checkpoint left there.

    The first process does this, and only for a job of torchrun.

    Raises:
        ValueError: there is a run of this name, and it is not of this job.
    """
    job = world.job
    if job is None or not world.first:
        return
    if resumed:
        (directory / JOB).write_text(job)
    elif _job_of(directory) == job:
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != JOB:
                path.unlink()
    else:  # with its job from the first moment: an attempt may be killed at any
        temporary = directory.with_name(f".{directory.name}.{uuid4().hex}")
        temporary.mkdir(parents=True)
        (temporary / JOB).write_text(job)
        try:
            temporary.rename(directory)
        except OSError:
            shutil.rmtree(temporary)
            raise ValueError(f"{directory} belongs to another run: choose another --name") from None


def _job_of(directory: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (directory / JOB).read_text()
    return None
