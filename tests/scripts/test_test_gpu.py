import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "test_gpu.py"))


@pytest.mark.slow
def test_a_failing_test_is_reported_in_full(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_this():\n    assert 1 == 2\n\n"
        "def test_other():\n    assert False, 'not of the GPU'\n"
    )
    assert SCRIPT["main"](["--jobs", "1", str(tmp_path)]) == 1
    printed = capfd.readouterr().out
    assert "assert 1 == 2" in printed
    assert "not of the GPU" not in printed


def test_no_processes_at_all_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        SCRIPT["main"](["--jobs", "0"])
    assert stop.value.code == 2
    assert "must be a whole number, 1 or more" in capsys.readouterr().err
