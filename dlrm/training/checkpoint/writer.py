"""Writing checkpoints: completely or not at all, by any number of processes, in the background.

Every process writes a file into a temporary directory. The first one waits for the others, adds the
manifest, which names the best checkpoint, and then gives the directory its name.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from dlrm.distributed.world import World
from dlrm.training import run_directory
from dlrm.training.checkpoint import snapshot
from dlrm.training.checkpoint.manifest import (
    DTYPE_NAMES,
    Manifest,
    RunState,
    StoredFile,
    StoredShard,
    StoredTensor,
    file_name,
)
from dlrm.training.checkpoint.manifest_json import manifest_to_json
from dlrm.training.checkpoint.parts import Parts
from dlrm.training.checkpoint.tensor_files import Piece, Stopped, write_file
from dlrm.training.run_directory import CHECKPOINTS, MANIFEST
from dlrm.utils.atomic import sync_directory

KEPT = 2  # if more checkpoints are to be kept, none is left out
POLL = 0.02  # seconds between two looks for what another process has written
LOST = 20.0  # seconds that a process which is leaving waits for the others

Written = tuple[StoredFile, list[tuple[str, StoredShard]]]
"""The file of a process, and the shards in it by the name of their tensor."""


@dataclass(kw_only=True)
class Draft:
    """A checkpoint that is to be written."""

    path: Path
    """The directory that it will have."""
    state: RunState
    best: bool
    """Whether it is the best one so far."""
    pieces: Sequence[Piece]
    """The part that this process writes, until the thread takes it: it is large."""
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Type and shape of all tensors."""
    replaced: threading.Event = field(default_factory=threading.Event)
    """Set if it need not be completed."""

    @property
    def temporary(self) -> Path:
        """Its directory until it is complete."""
        return self.path.with_name(f"{self.path.name}.tmp")

    def note(self, rank: int) -> Path:
        """Where a process tells the first one what it has written, or why it has not."""
        return self.temporary / f"rank_{rank:05}.json"


class CheckpointWriter:
    """Writes the checkpoints of a run in a thread, from copies, while training continues.

    One is written at a time. With a single process, another one may wait. A newer one replaces it,
    unless it is the best so far and the newer one is not, or more than two are to be kept. The last
    one of a run also replaces one that is being written. Where memory has no room for copies,
    training waits until a checkpoint is written.

    Every process must make one, and call its methods.

    Args:
        directory: of the run.
        run: the id of the run.
        world: the processes of the run.
        keep: number of checkpoints to keep next to the best one.

    Attributes:
        best: name of the best checkpoint; of the first process.
        copied: bytes of the largest copy of a state.
    """

    def __init__(self, directory: Path, run: str, world: World, keep: int) -> None:
        self.best: str | None = None
        self.copied = 0
        self._directory, self._run, self._world, self._keep = directory, run, world, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writes: list[tuple[Draft | None, Future[None]]] = []  # in their order; or other work
        self._leaving = threading.Event()
        self._last: Path | None = None  # the one that may still be written

    def save(self, parts: Parts, state: RunState, *, best: bool, last: bool = False) -> None:
        """Copy the state of a run, and begin to write it.

        Args:
            parts: the tensors.
            state: everything else; the first process writes its own.
            best: whether this is the best state so far.
            last: whether training ends with it.

        Raises:
            OSError: this checkpoint or the one before can't be written. Earlier ones are unchanged.
        """
        path = self._world.from_first(lambda: self._new_path(state.steps))
        with _in_one_line(path):
            self._make_room(best, last)
            pieces, copied = snapshot.take(parts.own_pieces(self._world))
            self.copied = max(self.copied, copied)

        sizes = parts.sizes()
        draft = Draft(path=path, state=state, best=best, pieces=pieces, sizes=sizes)
        self._writes.append((draft, self._thread.submit(self._write, draft)))
        if not copied:
            self._drain()

    def then(self, work: Callable[[], None]) -> None:
        """Do some work in the thread of the first process, between this checkpoint and the next,
        unless this one can't be written.

        Its error is raised like one of a checkpoint.
        """
        write = self._writes[-1][1] if self._writes else None

        def work_if_written() -> None:
            if write is None or write.exception() is None:
                work()

        if self._world.first:
            self._writes.append((None, self._thread.submit(work_if_written)))

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written.

        Raises:
            OSError: there is one.
        """
        while self._writes and self._writes[0][1].done():
            _, write = self._writes.pop(0)
            write.result()

    def wait(self) -> None:
        """Wait until every checkpoint is on disk, in all processes.

        Raises:
            OSError: one can't be written.
        """
        self._drain()
        self._world.wait()

    def costs(self) -> dict[str, float]:
        """Bytes of the largest copy of a state from which a checkpoint was written."""
        return {"memory/checkpoint_copy": float(self.copied)} if self.copied else {}

    def close(self) -> None:
        """Wait for what can still be written, and end the thread."""
        self._leaving.set()
        with suppress(Exception):  # it has been raised, or another error has
            self._drain()
        self._thread.shutdown()

    def _drain(self, left: int = 0) -> None:
        """Wait until at most so many are still to be written."""
        while len(self._writes) > left:
            self._writes[0][1].exception()  # waits; the next line raises it
            self.check()

    def _new_path(self, steps: int) -> Path:
        path = self._directory / CHECKPOINTS / f"step_{steps}"
        path.parent.mkdir(exist_ok=True)
        while path.exists() or path == self._last:  # from before the run was resumed, or just now
            path = path.with_name(f"{path.name}+")
        self._last = path
        return path

    def _make_room(self, best: bool, last: bool) -> None:
        """Wait, or leave out a checkpoint, so that at most one is still to be written."""
        self.check()
        if self._world.size > 1 or self._keep > KEPT:
            self._drain()
        elif len(self._writes) > 1:
            waiting, write = self._writes[-1]
            if waiting and waiting.best <= best and write.cancel():  # other work is always wanted
                waiting.pieces = ()
                self._writes.pop()
        if last and len(self._writes) == 1:
            written, _ = self._writes[0]
            if written and written.best <= best:
                written.replaced.set()
        self._drain(left=1)

    def _write(self, draft: Draft) -> None:
        """Write the part of this process, and complete the checkpoint in the first one."""
        pieces, draft.pieces = draft.pieces, ()
        first, rank = self._world.first, self._world.rank

        try:
            with _in_one_line(draft.path):
                draft.temporary.mkdir(exist_ok=True)
                metadata = {"format": "pt", "run": self._run, "step": str(draft.state.steps)}
                path = draft.temporary / file_name(rank)
                written = write_file(path, pieces, metadata, draft.replaced.is_set)
                if first:
                    self._complete(draft, written)
                else:
                    _tell(draft.note(rank), [asdict(written[0]), written[1]])

        except Stopped:
            shutil.rmtree(draft.temporary, ignore_errors=True)
        except BaseException as error:
            if first:
                shutil.rmtree(draft.temporary, ignore_errors=True)
            else:
                with suppress(OSError):  # else torchrun ends the first process
                    _tell(draft.note(rank), str(error))
            raise

    def _complete(self, draft: Draft, written: Written) -> None:
        """Add the manifest, rename the directory, and remove old ones."""
        notes = [draft.note(rank) for rank in range(1, self._world.size)]
        parts = [written, *map(self._told, notes)]
        for note in notes:
            note.unlink()

        self._write_manifest(draft, parts)
        sync_directory(draft.temporary)
        draft.temporary.replace(draft.path)
        sync_directory(draft.path.parent)

        if draft.best:
            self.best = draft.path.name
        self._remove_old()

    def _write_manifest(self, draft: Draft, parts: Sequence[Written]) -> None:
        shards: dict[str, list[StoredShard]] = {name: [] for name in draft.sizes}
        for _, of_rank in parts:
            for name, shard in of_rank:
                shards[name].append(shard)
        manifest = Manifest(
            run=self._run,
            files={file_name(rank): file for rank, (file, _) in enumerate(parts)},
            tensors={
                name: StoredTensor(
                    dtype=DTYPE_NAMES[dtype], shape=shape, shards=tuple(shards[name])
                )
                for name, (dtype, shape) in draft.sizes.items()
            },
            state=replace(draft.state, best_name=None if draft.best else self.best),
        )
        with (draft.temporary / MANIFEST).open("wb") as file:
            file.write(manifest_to_json(manifest))
            file.flush()
            os.fsync(file.fileno())

    def _told(self, note: Path) -> Written:
        """The part that another process has written."""
        until = math.inf
        while not note.exists():
            if self._leaving.wait(POLL):
                until = min(until, time.monotonic() + LOST)
                time.sleep(POLL)
            if time.monotonic() > until:
                raise OSError(f"{note.stem} has not been written")
        content = json.loads(note.read_text())
        if isinstance(content, str):
            raise OSError(content)
        return StoredFile(**content[0]), [(name, StoredShard(*shard)) for name, shard in content[1]]

    def _remove_old(self) -> None:
        """Remove all checkpoints but the last ones and the best one."""
        found = run_directory.checkpoints(self._directory)
        newest = {step: path for path, step in reversed(found.items())}
        kept = {newest[step].name for step in sorted(newest, reverse=True)[: self._keep]}
        for old in found:
            if old.name not in (*kept, self.best):
                shutil.rmtree(old, ignore_errors=True)


def _tell(note: Path, what: object) -> None:
    """Write a note, which is there completely or not at all."""
    temporary = note.with_suffix(".part")
    temporary.write_text(json.dumps(what))
    temporary.replace(note)


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Turn errors into one line that names a checkpoint.

    Raises:
        OSError: there was an error; a ``FileNotFoundError`` stays one.
    """
    try:
        yield
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if text.startswith(f"{path} "):  # of another process
            raise
        lines = [line for line in text.splitlines() if line.strip()]
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(f"{path} can't be written: {lines[-1] if lines else repr(error)}") from error
