import errno

import pytest

from dlrm.utils.atomic import atomic_write


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
