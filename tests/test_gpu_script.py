import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "test_gpu.py"))


def test_a_file_with_a_failing_test_is_told_in_full(tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_this():\n    assert 1 == 2\n\n"
        "def test_other():\n    assert False, 'not of the GPU'\n"
    )
    status, output = SCRIPT["run"](path)
    assert status == 1
    assert "assert 1 == 2" in output
    assert "not of the GPU" not in output


def test_files_are_chosen_by_their_marks(tmp_path):
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for path, text, chosen in [
        (kernels / "test_a.py", "", True),
        (tmp_path / "test_b.py", "@pytest.mark.gpu", True),
        (tmp_path / "test_c.py", "def test(): ...", False),
    ]:
        path.write_text(text)
        assert SCRIPT["needs_gpu"](path) is chosen
