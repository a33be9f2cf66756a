"""The start of a program, before it imports PyTorch, which takes seconds and reads variables."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType

from dlrm.utils import signals

_PREFIXES = ("OMP_", "GOMP_", "KMP_")
"""Of the environment variables of OpenMP, and of its libraries by GCC (Linux) and LLVM."""

_LOAD = "/proc/loadavg"
_NO_MEMORY = (
    "failed to map segment from shared object",
    "Cannot allocate memory",
    "error return without exception set",
)
"""In messages of errors that a lack of memory causes, besides MemoryError."""

MOST_AGE = 60.0  # seconds that the interpreter itself may take to start


def begin() -> float:
    """Let signals end the program quietly, threads without work sleep soon, and open streams.

    A lack of memory, during the imports or later, is reported in one line.

    Call it first, and not in a library: it sets signal handlers and environment variables, and
    pauses garbage collection until :func:`imported`.

    Returns:
        When the process started, as :func:`time.perf_counter` has it.
    """
    began = time.perf_counter() - _age()
    gc.disable()
    atexit.register(gc.freeze)  # the last collection would visit all of PyTorch, for a second
    signals.exit_quietly()
    sys.excepthook = partial(_report_no_memory, sys.excepthook)
    open_closed_streams()
    bound_spinning()
    set_compilers()
    keep_bytecode()
    return began


def open_gpu() -> None:
    """Let a thread open the first GPU, if there is one, while PyTorch is imported.

    That takes some tenths of a second, and PyTorch then uses the same context.
    """

    def work() -> None:
        with suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1")
            driver.cuInit(0)
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)

    threading.Thread(target=work, daemon=True).start()


def imported() -> None:
    """Collect garbage again, except in what was imported: that is never freed.

    Without this pause, collections take a fifth of the time of the imports.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def set_compilers() -> None:
    """Choose where kernels are cached and compiled, unless the user has.

    All are cached in Triton's default directory: Inductor sets another one once it has compiled
    something. Inductor compiles in this process: the others that it would start, as many as there
    are cores, take longer to start than the few kernels of a model take here.
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def keep_memory() -> None:
    """Let Arrow keep memory that it has freed for ten seconds, unless the user has chosen.

    Else the threads that read rows wait for pages that the kernel takes back and clears again. A
    preparation, which promises little memory, takes a fifth more with it.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # milliseconds


def keep_bytecode() -> None:
    """Keep compiled modules in the user's cache if PyTorch has none next to its sources.

    Images of containers often install packages without bytecode, and set
    ``PYTHONDONTWRITEBYTECODE``. Every process then compiles thousands of modules again, which takes
    some five seconds. Nothing is written next to the sources, and nothing changes if
    ``PYTHONPYCACHEPREFIX`` is set.
    """
    spec = importlib.util.find_spec("torch")
    if sys.pycache_prefix or spec is None or spec.origin is None:
        return
    directory = os.path.dirname(spec.origin)
    writable = os.access(directory, os.W_OK) and not sys.dont_write_bytecode
    if writable or os.path.isdir(os.path.join(directory, "__pycache__")):
        return

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    sys.pycache_prefix = os.path.join(cache, "dlrm", "bytecode")
    sys.dont_write_bytecode = False
    if not os.path.isdir(sys.pycache_prefix) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"note: PyTorch has no bytecode here: it is kept in {sys.pycache_prefix} from now on, "
            "for faster starts (PYTHONPYCACHEPREFIX sets another directory)",
            file=sys.stderr,
        )


def _age() -> float:
    """Seconds since this process started; 0 if that is unknown, as it is outside of Linux."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age if 0 <= age < MOST_AGE else 0.0  # some sandboxes give another clock


def _report_no_memory(
    previous: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """A ``sys.excepthook`` that prints no traceback if memory is short."""
    causes: list[BaseException] = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, MemoryError) or any(text in str(cause) for text in _NO_MEMORY):
            print("error: there is not enough memory: raise its limit (ulimit -v)", file=sys.stderr)
            return
    previous(kind, error, trace)


def open_closed_streams() -> None:
    """Open the output or error stream of a program that was started without it, as by ``>&-``.

    Else ``print`` fails, and the first file that is opened takes the place of the stream, so that
    what a C library prints gets into that file.
    """
    for name in ("stdin", "stdout", "stderr"):  # each takes the lowest number, which is its own
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def without_pandas() -> None:
    """Let pyarrow do without pandas, which it imports with the first array that it makes.

    That takes a quarter of a second. Pandas can still be imported; pyarrow just does not recognize
    its objects, so call this only in a program that has none.
    """
    import pyarrow

    sys.meta_path.insert(0, _WithoutPandas)
    try:
        pyarrow.array([0])  # pyarrow looks for pandas once
    finally:
        sys.meta_path.remove(_WithoutPandas)


class _WithoutPandas:
    """A finder of modules that finds that there is no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def bound_spinning() -> None:
    """Let a thread of PyTorch that waits for the others sleep soon.

    By default it spins for milliseconds with GCC's OpenMP and for 0.2 s with LLVM's. On a busy
    machine it then holds the core that the thread it waits for needs, at every operation; on an
    idle one, to sleep and wake costs more. So it spins for some 400 microseconds if nothing else
    runs now, and not at all if something does (``docs/speed.md``).

    If the user has set any variable of OpenMP, nothing changes.
    """
    if any(name.startswith(_PREFIXES) for name in os.environ):
        return
    if platform.machine() in ("x86_64", "AMD64"):  # other CPUs spin faster, and end sooner
        os.environ["GOMP_SPINCOUNT"] = "0" if _others_run() else "20000"
    os.environ["KMP_BLOCKTIME"] = "0"  # LLVM's unit is milliseconds; 0 is the only smaller value


def _others_run() -> bool:
    """Whether threads of other processes are running now. True if unknown (not on Linux).

    They must run at each of several looks: the program that started this one may not sleep yet.
    """
    try:
        for _ in range(4):
            with open(_LOAD) as file:
                if int(file.read().split()[3].split("/")[0]) == 1:  # this one alone
                    return False
            time.sleep(0.003)
    except (OSError, ValueError, IndexError):
        pass
    return True
