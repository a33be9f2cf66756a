"""A slice of the kills; the program runs as many as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).with_name("kills.py")


@pytest.mark.slow
@pytest.mark.parametrize(("who", "ranks"), [("worker", 2), ("job", 1)])
def test_killed_runs_end_with_the_bits_of_whole_ones(who, ranks):
    command = [sys.executable, KILLS, "--count", "3", "--who", who, "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal, ") == 3, done.stdout
