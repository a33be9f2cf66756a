"""Each fuzzer with a few cases, as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZERS = {
    "tsv": {"text": 25, "gzip": 25, "bomb": 2},
    "parquet": {"prepared": 25, "foreign": 25},
    "config": {"edited": 40, "damaged": 40, "command_line": 40},
    "meta": {"described": 40, "log": 40, "result": 40},
    "checkpoint": {"tensors": 5, "manifest": 5, "forged": 10, "links": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fuzzer", "kind", "count"),
    [(fuzzer, kind, count) for fuzzer, kinds in FUZZERS.items() for kind, count in kinds.items()],
)
def test_nothing_is_silently_wrong(fuzzer, kind, count):
    path = Path(__file__).with_name(f"{fuzzer}.py")
    command = [sys.executable, path, "--seed", "1", "--kind", kind, "--count", str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{kind}: {count} cases, " in result.stdout
