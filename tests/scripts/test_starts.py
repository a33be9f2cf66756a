"""Every program starts, by itself: what other tests import, they import with its surroundings."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    path
    for path in (ROOT / "train.py", *sorted((ROOT / "scripts").rglob("*.py")))
    if "__main__" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_starts_in_a_new_interpreter(path, tmp_path):
    command = [sys.executable, path, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")
