"""Signals end a program quietly, with the status that stands for them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm.utils import signals
from dlrm.utils.program import exit_status

ROOT = Path(__file__).parents[2]
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
PROGRAMS = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "train.py", *sorted(ROOT.glob("scripts/*.py")))
    if "startup.begin" in path.read_text() or "dlrm.commands" in path.read_text()
]


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_ends_a_program_in_one_line_unless_it_is_ignored(number, capsys):
    before = signal.getsignal(number)
    assert exit_status(lambda: os.kill(os.getpid(), number), "interrupted") == STATUS[number]
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.signal(number, signal.SIG_IGN) == before  # as nohup does
    try:
        assert exit_status(lambda: os.kill(os.getpid(), number)) == 0
    finally:
        signal.signal(number, before)


def test_deferred_signals_are_noted():
    with signals.raised():
        signals.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.pending() == signal.SIGTERM
    with signals.raised():
        assert not signals.pending(), "of the block before"


@pytest.mark.parametrize("gap", [0, 0.5])
def test_the_second_signal_ends_a_process_at_once(gap):
    """But not one that comes together with the first: the same Ctrl-C may arrive twice."""
    code = f"""
import os, signal, time
from dlrm.utils import signals
with signals.raised():
    signals.defer()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({gap})
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143 if gap else 3, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_signal_during_the_imports_is_quiet(program):
    """The handlers are set before anything heavy is imported."""
    code = f"""
import builtins, os, runpy, signal
original = builtins.__import__
def stop(name, *given):
    if name.partition(".")[0] in ("torch", "pandas", "pyarrow", "yaml"):
        os.kill(os.getpid(), signal.SIGINT)
    return original(name, *given)
builtins.__import__ = stop
runpy.run_path({program!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_call_that_does_not_return_is_ended():
    """As when a process waits for another one that is gone."""
    code = """
import os, signal, threading, torch
from dlrm.utils import signals
store = torch.distributed.TCPStore("localhost", 0, is_master=True)
with signals.raised():
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    store.get("never")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (143, "")
