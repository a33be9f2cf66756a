"""A slice of the kills; the program runs as many as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).with_name("kills.py")


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["KILL", "TERM"])
@pytest.mark.parametrize(("who", "ranks"), [("worker", 2), ("job", 1)])
def test_killed_runs_end_with_the_bits_of_whole_ones(who, ranks, sent):
    options = f"--count 3 --jobs 2 --who {who} --ranks {ranks} --signals {sent}"
    command = [sys.executable, KILLS, *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal, ") == 3, done.stdout
