"""A training run in processes of its own, which gets signals."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import launcher

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds of a run and its restarts
GRACE = 10  # seconds to leave after a signal, on a machine that does nothing else


class Process:
    """A run in processes of its own."""

    def __init__(self, ranks: int, output: Path, arguments: list[str], restarts: int | None):
        self.files = [output / "out", output / "err"]
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                launcher.start(
                    str(ROOT / "train.py"),
                    arguments,
                    ranks,
                    [str(file) for file in self.files],
                    max_restarts=restarts,
                )
                os._exit(0)
            except SystemExit as stop:
                os._exit(stop.code if isinstance(stop.code, int) else bool(stop.code))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        self.status: int | None = None
        self.until = time.monotonic() + TIMEOUT

    def alive(self) -> bool:
        """Whether it runs; raises TimeoutError when it has run too long."""
        if self.status is None:
            self.status = launcher.wait(self.pid, 0)
        if self.status is None and time.monotonic() > self.until:
            self.send(signal.SIGKILL)
            self.status = launcher.wait(self.pid, 60)
            raise TimeoutError
        return self.status is None

    def wait(self) -> int:
        """The exit status."""
        while self.alive():
            time.sleep(0.01)
        return self.status or 0

    def workers(self) -> list[int]:
        """The processes of the ranks under torchrun."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)  # it has no group of its own yet

    def end(self, number: int) -> str | None:
        """Send a signal and wait for the end; returns what was bad about that."""
        allowed = GRACE * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
        began = time.monotonic()
        self.send(number)
        status = self.wait()
        if number == signal.SIGKILL:
            return None
        if self.has_traceback():
            return "TRACEBACK"
        # Before its first line nothing handles the signal, and torchrun has a status of its own.
        if status not in (0, 1, 128 + number, -number):
            return "FAILED"
        return "SLOW TO LEAVE" if time.monotonic() > began + allowed else None

    def has_traceback(self) -> bool:
        """Whether it printed one; those that torchrun shows are indented."""
        return bool(re.search(r"^(\[rank\d+\]: )?Traceback", self.errors, re.MULTILINE))

    @property
    def errors(self) -> str:
        """What it printed to stderr."""
        return self.files[1].read_text() if self.files[1].exists() else ""
