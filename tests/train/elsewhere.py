"""Runs programs as on a machine that lacks what only Linux has: ``python elsewhere.py JSON``.

The argument is a list of programs with their arguments, which run one after the other. Imports of
Triton and of modules that Windows lacks fail here, names of :mod:`os` and :mod:`signal` that it
lacks are gone, and so is ``/proc``. Symbolic links need a privilege there, and directories can't be
opened.
"""

import importlib
import json
import os
import shutil
import signal
import sys

import psutil

ABSENT = {"triton", "resource", "fcntl"}
ABSENT_NAMES = {
    os: ("fork", "forkpty", "getloadavg", "sched_getaffinity", "sysconf", "pread", "preadv",
         "pwrite",         "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"),
    signal: ("SIGHUP", "SIGUSR1", "SIGALRM"),
}  # fmt: skip


class Finder:
    """The first of ``sys.meta_path``: hides what is absent from the others."""

    def find_spec(self, name, path=None, target=None):
        """Raise for an absent module."""
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def files_elsewhere(event, arguments):
    """An audit hook: no ``/proc``, no symbolic links, and no directory is opened."""
    if event == "open" and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    # A file object is never one of a directory; a temporary file's only says so to audit hooks.
    opened = event == "open" and arguments[1] is None
    if opened and isinstance(arguments[0], str) and os.path.isdir(arguments[0]):
        raise PermissionError(13, "Permission denied", arguments[0])
    if event == "os.symlink":
        raise OSError(22, "A required privilege is not held by the client", arguments[0])


def main():
    """Run the programs; the first that fails ends it."""
    sys.meta_path.insert(0, Finder())
    for name in ABSENT & sys.modules.keys():
        del sys.modules[name]
    for module, names in ABSENT_NAMES.items():
        for name in names:
            delattr(module, name)
    memory = psutil.virtual_memory()  # it needs /proc on Linux alone
    psutil.virtual_memory = lambda: memory
    shutil._use_fd_functions = False
    sys.addaudithook(files_elsewhere)
    for name, *arguments in json.loads(sys.argv[1]):
        program = importlib.import_module(name)
        if status := program.main(arguments):
            sys.exit(f"{name} {arguments}: status {status}")
    print("imported:", *sorted(ABSENT & sys.modules.keys()))


if __name__ == "__main__":
    main()
