"""Deltas that serve.py applies while it serves."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from apply_delta import DELTA, MANIFEST, apply_delta, digest_of, read_delta, read_object
from serve_model import Scorer
from serve_rows import one_line


class DeltaFollower:
    """Applies the deltas that come to a directory, in a thread of its own.

    The next one is that which was made from the version that is served, whatever its name. So none
    is applied twice or in another order. Each gives an export in a temporary directory, which is
    checked and loaded as at the start. One that is damaged or half copied is tried again.

    Args:
        export: the export that is served first. A copy of it is kept: it may be removed.
        deltas: directory that gets a directory for each delta.
        every: seconds between two looks there.
        threads: of PyTorch.
        loaded: called with each new version.
    """

    def __init__(
        self,
        export: Path,
        deltas: Path,
        every: float,
        threads: int,
        loaded: Callable[[Scorer], object],
    ) -> None:
        if not deltas.is_dir():
            raise ValueError(f"--deltas {deltas} is no directory: make it first")
        self._deltas, self._every, self._threads, self._loaded = deltas, every, threads, loaded
        self._directory = Path(tempfile.mkdtemp(prefix="serve-"))
        self._served = self._directory / "0"
        shutil.copytree(export, self._served)

        self._earlier: set[Path] = set()  # not read again
        self._problem = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the delta that is being applied, and remove what was made."""
        self._end.set()
        self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        version = 1
        while not self._end.wait(self._every):
            newer = self._directory / str(version)
            try:
                while (delta := self._next()) is not None and not self._end.is_set():
                    apply_delta(self._served, delta, newer)
                    self._loaded(Scorer(newer, self._threads))
                    shutil.rmtree(self._served)
                    self._served, self._problem = newer, ""
                    version += 1
                    newer = self._directory / str(version)
            except Exception as error:
                shutil.rmtree(newer, ignore_errors=True)
                self._report(one_line(error))

    def _next(self) -> Path | None:
        """The delta that was made from the version that is served; None if there is none yet.

        Raises:
            ValueError: there are only later ones, those of other runs, or ones that can't be read.
        """
        digest, manifest = digest_of(self._served / MANIFEST), read_object(self._served / MANIFEST)
        problems = []
        for path in sorted(self._deltas.glob(f"*/{DELTA}")):
            if path in self._earlier or path.parent.suffix == ".tmp":  # still being written
                continue
            try:
                delta = read_delta(path.parent)
            except (ValueError, OSError) as error:
                problems.append(one_line(error))
                continue
            if delta["base"] == digest:
                return path.parent
            start = delta["from"]
            if start["run"] != manifest["run"]:
                problems.append(f"{path.parent} is of another run than what is served")
            elif start["step"] < manifest["step"]:
                self._earlier.add(path)
            else:
                problems.append(
                    f"{path.parent} is from step {start['step']}, and step {manifest['step']} is "
                    "served: the deltas between them are missing"
                )
        if problems:
            raise ValueError("; ".join(problems[:3]))
        return None

    def _report(self, problem: str) -> None:
        """Print a problem once."""
        if problem != self._problem:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        self._problem = problem
