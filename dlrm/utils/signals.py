"""SIGINT, SIGTERM and SIGHUP end a program quietly, with the exit status of the signal.

Imports nothing heavy: a program calls :func:`exit_quietly` before it imports PyTorch.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""The signals that are handled; Windows has no SIGHUP."""

PATIENCE = 3.0  # seconds


class Interrupted(KeyboardInterrupt):
    """A signal asked the program to end.

    Args:
        number: of the signal.

    Attributes:
        status: the exit status that stands for the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class _State:
    """What the handler knows."""

    number = 0  # of the signal that came first; 0: none
    time = 0.0  # when it came
    deferred = False
    seen = threading.Event()  # by the handler


def exit_quietly() -> None:
    """Let signals end the process at once, without a word: for the imports of a program."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
            signal.signal(number, _exit)


@contextmanager
def raised() -> Iterator[None]:
    """Let signals raise :class:`Interrupted` in the block, and a second one end the process.

    A call that does not return to Python, as when a process that others wait for is gone, is ended
    after a few seconds.
    """
    if threading.current_thread() is not threading.main_thread():  # it can't set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    _State.number, _State.deferred = 0, False
    seen = _State.seen = threading.Event()
    threading.Thread(target=_watch, args=[receiver, seen], daemon=True).start()
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, _handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        sender.close()
        seen.set()


def defer() -> None:
    """From now on, signals in the block of :func:`raised` are only noted; see :func:`pending`."""
    _State.deferred = True


def pending() -> int:
    """The number of the signal that came; 0 if none did."""
    return _State.number


def status_of(stop: KeyboardInterrupt) -> int:
    """The exit status for a signal that was raised, perhaps by Python itself for Ctrl-C."""
    if isinstance(stop, Interrupted):
        return stop.status
    return 128 + (pending() or signal.SIGINT)


def _exit(number: int, frame: Any) -> None:
    os._exit(128 + number)


def _handle(number: int, frame: Any) -> None:
    _State.seen.set()
    if _State.number:
        # Ctrl-C in torchrun reaches a process twice: from the terminal, and from torchrun. So does
        # the end of a terminal: from the kernel, and from the shell.
        if time.monotonic() > _State.time + (2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.3):
            os._exit(128 + number)
        return
    _State.number, _State.time = number, time.monotonic()
    if not _State.deferred:
        raise Interrupted(number)


def _watch(receiver: socket.socket, seen: threading.Event) -> None:
    """End the process if a signal has come and its handler does not get to run."""
    with receiver:
        while number := receiver.recv(1)[:1]:
            handled = number[0] in SIGNALS and not _State.deferred
            if handled and not seen.wait(PATIENCE):
                os._exit(128 + number[0])
