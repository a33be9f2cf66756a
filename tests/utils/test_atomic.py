import errno

import pytest

from dlrm.utils.atomic import atomic_directory, atomic_write


def test_the_file_appears_when_the_block_ends_well(tmp_path):
    path = tmp_path / "a.json"
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        fail()
    assert path.read_text() == "old"
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
