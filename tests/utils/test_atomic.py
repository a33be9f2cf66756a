import errno
import subprocess
import sys
from contextlib import suppress

import filelock
import pytest

from dlrm.data.prepare.workspace import Workspace
from dlrm.training.run_directory import RunLock
from dlrm.utils.atomic import atomic_directory, atomic_write


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_new_if_the_block_ends_well_and_else_the_old_one(fails, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with suppress(KeyError), atomic_write(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        if fails:
            raise KeyError
    assert path.read_text() == ("old" if fails else "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_name_that_cannot_be_had_leaves_nothing(tmp_path):
    path = tmp_path / "directory"
    path.mkdir()
    with pytest.raises(OSError, match="directory"), atomic_write(path) as temporary:
        temporary.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["directory"]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    path = tmp_path / "a.json"
    with (
        pytest.raises(OSError, match=r"a\.json can't be written: .*No space left"),
        atomic_write(path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"^\[Errno 5\] of something else$"), atomic_write(path):
        raise OSError(errno.EIO, "of something else")


def test_a_directory_is_there_completely_or_not_at_all(tmp_path):
    def fail():
        with atomic_directory(tmp_path / "out") as temporary:
            (temporary / "part").write_text("1")
            raise KeyError("why")

    left = tmp_path / "out.tmp" / "of_a_killed_process"
    left.mkdir(parents=True)
    with pytest.raises(KeyError, match="why"):
        fail()
    assert not list(tmp_path.iterdir())
    left.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "part").write_text("2")
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert found == ["out", "out/part"]
    with (
        pytest.raises(ValueError, match="out already exists; choose another"),
        atomic_directory(tmp_path / "out"),
    ):
        pass


def test_a_directory_has_one_writer_at_a_time(tmp_path):
    out = tmp_path / "some" / "out"
    with (
        atomic_directory(out) as first,
        pytest.raises(ValueError, match="out is being written by another process; wait for it"),
        atomic_directory(out),
    ):
        pass
    assert not first.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    out.rmdir()
    (out.parent / "out.lock").touch()  # of a killed process
    with atomic_directory(out) as again:
        (again / "part").touch()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_two_processes_of_one_output(tmp_path):
    """The second one ends in a line, and what the first one writes is left alone."""
    code = """
import sys
from pathlib import Path
from dlrm.utils.atomic import atomic_directory
with atomic_directory(Path(sys.argv[1])) as temporary:
    (temporary / "part").write_text(sys.argv[2])
    print("writing", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "first"], **options) as first:
        assert first.stdout.readline() == "writing\n"
        second = subprocess.run([*command, "second"], capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert "is being written by another process" in second.stderr
        first.communicate("")
    assert first.returncode == 0
    assert (tmp_path / "out" / "part").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_a_file_system_has_no_locks_a_note_says_so(tmp_path, monkeypatch, capsys):
    def acquire(*_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with atomic_directory(tmp_path / "out") as temporary:
        (temporary / "part").touch()
    assert (tmp_path / "out" / "part").exists()
    with Workspace(tmp_path / "prepared", {}) as work:
        assert work.directory.is_dir()
    RunLock(tmp_path / "run").release()
    assert capsys.readouterr().err.count("No locks available): let no second process") == 3
