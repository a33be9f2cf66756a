"""The working directory of a preparation: what a restart reuses, and how results get out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...utils.atomic import atomic_write, hold
from ...utils.documents import read_json
from ..schema import META_FILE, SPLITS

DIRECTORY = ".prepare"
KEY_FILE = "key.json"
LOCK_FILE = "lock"
BAD_ROWS_FILE = "bad_rows.json"
TRANSFORM_FILE = "transform.json"
OPTIONS_FILE = "table.yaml"
OWN_FILES = (BAD_ROWS_FILE, TRANSFORM_FILE, OPTIONS_FILE)  # that only a preparation makes
RESULTS = (*(f"{split}.parquet" for split in SPLITS), "vocabulary", *OWN_FILES)


def has_stopped(output: Path) -> bool:
    """Whether a preparation in ``output`` failed or was killed, and was not begun again."""
    if not (output / DIRECTORY / KEY_FILE).is_file():
        return False

    import filelock  # programs that read an export do without it

    lock = filelock.FileLock(output / DIRECTORY / LOCK_FILE, thread_local=False)
    with suppress(OSError, NotImplementedError), lock.acquire(timeout=0):
        return not (output / META_FILE).is_file()  # it may have ended just now
    return False


class Workspace:
    """``OUTPUT/.prepare``, locked by one process at a time.

    Args:
        output: directory for the results; created if necessary.
        key: everything that the results depend on besides the inputs, with ``options`` as
            ``meta.json`` has them. Work done under another key, or of other inputs, is deleted.
        inputs: the raw files.
        overwrite: replace data that was prepared from other inputs or with other options.

    Raises:
        ValueError: on entering: ``output`` is not a directory, holds data that was not made by a
            preparation or, without ``overwrite``, by another one, or another process is preparing
            it.
    """

    def __init__(
        self,
        output: Path,
        key: Mapping[str, Any],
        *,
        inputs: Sequence[Path] = (),
        overwrite: bool = False,
    ) -> None:
        self.output = output
        self._options, self._inputs, self._overwrite = key.get("options", {}), inputs, overwrite
        self.directory = output / DIRECTORY
        files = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in inputs]
        self._key = json.dumps({**key, "inputs": files}, indent=2, sort_keys=True)

    def __enter__(self) -> Workspace:
        self._require_no_other_files()
        if not self._overwrite:
            self._require_same_data()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"{self.output} is not a directory; give another --output") from None

        # From here on, no other process works here.
        self._lock = hold(
            self / LOCK_FILE,
            lambda: (
                f"another process is preparing {self.output}; wait for it or give another --output"
            ),
        )
        try:
            self._clear_other_work()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not (self / KEY_FILE).exists():  # published: nothing else is left
            with suppress(OSError):  # another process works here by now
                (self / LOCK_FILE).unlink(missing_ok=True)
                self.directory.rmdir()

    def _require_no_other_files(self) -> None:
        """Raise if results would replace files that no earlier preparation made."""
        if self.directory.exists() or any((self.output / name).exists() for name in OWN_FILES):
            return
        others = [n for n in (*RESULTS, META_FILE) if (self.output / n).exists()]
        if others:
            raise ValueError(
                f"{self.output} contains {', '.join(others)}, not made by a preparation, which "
                "would replace them; give another --output"
            )

    def _require_same_data(self) -> None:
        """Raise if the output has data with other ids, on which runs may have been trained."""
        path = self.output / META_FILE
        if not path.is_file():
            return
        try:
            made = read_json(path)
            options, inputs = made["options"], made["inputs"]
            found = [[record["name"], record["bytes"]] for record in inputs]
        except (ValueError, KeyError, TypeError):
            return  # damaged: no program can read it

        wanted = json.loads(json.dumps(self._options))
        wanted.pop("bad_rows", None)  # decides whether there are results, not which
        differing = [name for name in wanted if options.get(name) != wanted[name]]
        if found != [[input.name, input.stat().st_size] for input in self._inputs]:
            differing.append("inputs")

        if differing:
            raise ValueError(
                f"{self.output} was prepared before, with other {' and '.join(differing)}: its ids "
                "would change under the runs that were trained on them; give another --output, or "
                "--overwrite to replace it"
            )

    def _clear_other_work(self) -> None:
        kept = self / KEY_FILE
        if not kept.is_file() or kept.read_text() != self._key:
            self._remove_all_but(LOCK_FILE)
            with atomic_write(kept) as temporary:
                temporary.write_text(self._key)
        if not self.finished:  # else an empty directory would replace a result already published
            for name in ("blocks", "ids", "vocabulary"):
                (self / name).mkdir(exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    @property
    def finished(self) -> bool:
        """Whether all results have been made: ``meta.json`` is written last."""
        return (self / META_FILE).exists()

    def publish(self) -> None:
        """Move the results and then ``meta.json`` to the output; remove everything else.

        The output has no ``meta.json`` until all other results are there. If the process is killed
        in between, the next call moves the rest.
        """
        (self.output / META_FILE).unlink(missing_ok=True)
        for name in RESULTS:
            if (self / name).exists():
                _remove(self.output / name)
                (self / name).replace(self.output / name)
        self._remove_all_but(LOCK_FILE, META_FILE, KEY_FILE)
        (self / META_FILE).replace(self.output / META_FILE)
        (self / KEY_FILE).unlink()

    def _remove_all_but(self, *names: str) -> None:
        for path in self.directory.iterdir():
            if path.name not in names:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
