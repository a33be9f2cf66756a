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
    """State of the handler, for the whole process."""

    number = 0  # of the first signal; 0 if none came
    time = 0.0  # when it came
    deferred = False
    seen = threading.Event()  # set when the handler runs


def exit_quietly() -> None:
    """Let signals end the process at once and silently, while a program imports its modules."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
            signal.signal(number, _exit)


def end_with_parent() -> None:
    """Let a process of ``multiprocessing`` end with the one that started it, however that ends.

    It would otherwise work on without anyone to take its results.
    """
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None

    def work() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=work, daemon=True).start()


@contextmanager
def raised() -> Iterator[None]:
    """Let signals raise :class:`Interrupted` in the block, and a second one end the process.

    If a call does not return to Python, for example because it waits for a process that was lost,
    the process ends after a few seconds.
    """
    if threading.current_thread() is not threading.main_thread():  # it can't set handlers
        yield
        return

    # A thread watches the signals through a socket, as the handler runs only in Python code.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    _State.number = 0
    _State.deferred = False
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
    """Return the number of the signal that came; 0 if none did."""
    return _State.number


def status_of(stop: KeyboardInterrupt) -> int:
    """Return the exit status for a signal that was raised, by Python itself in case of Ctrl-C."""
    if isinstance(stop, Interrupted):
        return stop.status
    return 128 + (pending() or signal.SIGINT)


def _exit(number: int, frame: Any) -> None:
    os._exit(128 + number)


def _handle(number: int, frame: Any) -> None:
    _State.seen.set()
    if _State.number:
        # Ctrl-C reaches a process under torchrun twice, from the terminal and from torchrun. So
        # does the end of a terminal, from the kernel and from the shell.
        if time.monotonic() > _State.time + (2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.3):
            os._exit(128 + number)
        return
    _State.number, _State.time = number, time.monotonic()
    if not _State.deferred:
        raise Interrupted(number)


def _watch(receiver: socket.socket, seen: threading.Event) -> None:
    """End the process if a signal came and its handler does not run in time."""
    with receiver:
        while number := receiver.recv(1)[:1]:
            handled = number[0] in SIGNALS and not _State.deferred
            if handled and not seen.wait(PATIENCE):
                os._exit(128 + number[0])
