import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "test_gpu.py"))
FILE = "tests/utils/test_program.py"


def test_parts_make_up_the_whole():
    def collected(*options):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, FILE]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^tests/.*::.*$", done.stdout, re.MULTILINE)

    whole, parts = collected(), [collected("--part", f"{index}/2") for index in range(2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_a_failing_part_is_told_in_full(tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_this():\n    assert 1 == 2\n\n"
        "def test_other():\n    assert False, 'not of the GPU'\n"
    )
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--part')"
    )
    passed, output = SCRIPT["run"]([str(path)], "0/1")
    assert not passed
    assert "assert 1 == 2" in output
    assert "not of the GPU" not in output


def test_no_processes_at_all_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        SCRIPT["main"](["--jobs", "0"])
    assert stop.value.code == 2
    assert "must be a whole number, 1 or more" in capsys.readouterr().err
