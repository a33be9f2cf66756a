"""Each fuzzer with a few cases, as a program."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuzzer", "count"), [("parquet", 25), ("config", 40), ("meta", 40), ("checkpoint", 5)]
)
def test_nothing_is_silently_wrong(fuzzer, count):
    path = Path(__file__).with_name(f"{fuzzer}.py")
    command = [sys.executable, path, "--seed", "1", "--count", str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f": {count} cases, ") > 0
