"""What the fuzzers share: cases that run in forks with limits, their outcomes, and a report.

A fuzzer is a program that gives :func:`main` a function for each kind of input::

    def flipped(rng: random.Random, directory: Path) -> Case:
        path = directory / "meta.json"  # an empty directory, removed after the case
        path.write_bytes(flip_bits(rng, ORIGINAL))
        return Case(what="bits flipped", size=path.stat().st_size, run=lambda: judge(path))

    if __name__ == "__main__":
        sys.exit(main({"meta": flipped}))

``run`` is called in a fork of this process, which costs milliseconds. It returns an
:class:`Outcome`, or raises: a ``ValueError`` or ``OSError`` of one line is a refusal. To run a
program, use :func:`refusal`.
Case ``i`` depends on the seed, its kind and ``i`` alone: ``--seed S --kind K --first I --count 1``
repeats it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # a fuzzer imports train and scripts

FORK = get_context("fork")
LONGEST_MESSAGE = 2000
CLOSING = "See --help for every option; nothing was started."


class Outcome(StrEnum):
    """How a case ended."""

    REFUSED = "refused in one line"
    EQUAL = "accepted, equal"
    NOTED = "accepted, wrong, its missing checksums noted"
    EARLIER = "accepted, an earlier one, told"
    WRITTEN = "accepted, as its author wrote it"
    SILENT = "SILENTLY WRONG"
    TRACEBACK = "TRACEBACK"
    MESSAGE = "BAD MESSAGE"
    """Refused, but not in one line of printable characters."""
    HANG = "HANG"
    MEMORY = "MEMORY"
    DIED = "DIED"


GOOD = (Outcome.REFUSED, Outcome.EQUAL, Outcome.NOTED, Outcome.EARLIER, Outcome.WRITTEN)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a case may take."""

    seconds: float = 10
    """On a machine that does nothing else; more if its load is higher than its cores."""
    memory: int = 500 << 20
    """Bytes that may be added to the memory of the process, besides ``memory_per_byte``."""
    memory_per_byte: float = 2
    """Bytes of memory for each byte of the case's files."""


DEFAULT = Limits()


@dataclass(frozen=True, kw_only=True)
class Case:
    """An input, and what judges how it is treated."""

    what: str
    """The kind of mutation, for the report."""
    run: Callable[[], Outcome]
    """Called in a fork. What it prints is shown if the outcome is bad."""
    size: int = 0
    """Bytes of the input."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a case ended, and what it took."""

    outcome: Outcome
    detail: str
    seconds: float
    memory: int


def run_case(run: Callable[[], Outcome], limits: Limits = DEFAULT, size: int = 0) -> Result:
    """Call ``run`` in a fork with limits.

    Args:
        run: what to call.
        limits: what it may take.
        size: bytes of the input.
    """
    began, allowed = time.monotonic(), limits.memory + round(limits.memory_per_byte * size)
    longest = limits.seconds * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
    receiver, sender = FORK.Pipe(duplex=False)
    sys.stdout.flush()  # or the fork prints it once more
    child = FORK.Process(target=_serve, args=(run, allowed, sender))
    child.start()
    sender.close()

    outcome, detail, memory = Outcome.HANG, f"not ended in {longest:.0f} s", 0
    if receiver.poll(longest):
        try:
            outcome, detail, memory = receiver.recv()
        except EOFError:
            child.join()
            outcome, detail = Outcome.DIED, f"ended with status {child.exitcode}"
    child.kill()
    child.join()
    if memory > allowed:
        detail = f"{memory >> 20} MB, allowed {allowed >> 20} ({outcome}: {detail})"
        outcome = Outcome.MEMORY
    seconds = time.monotonic() - began
    return Result(outcome=outcome, detail=detail, seconds=seconds, memory=memory)


def refusal(program: Callable[[Sequence[str]], int | None], *arguments: object) -> str | None:
    """Run the ``main`` of a program: its error message if it refused, None if it succeeded.

    Raises:
        BadMessage: it failed, but not with status 2 and one line that begins with ``error:``.
        AssertionError: it printed a traceback.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    printed = out.getvalue() + err.getvalue()
    print(printed)
    assert "Traceback" not in printed, printed
    if not is_printable(printed.replace("\r", "")):  # progress bars return to the line's start
        raise BadMessage(printed)
    if not status:
        return None
    message = err.getvalue().rpartition("error: ")[2].replace(CLOSING, "").strip()
    if status != 2 or "error: " not in err.getvalue() or "\n" in message:
        raise BadMessage(f"status {status}: {printed}")
    return message


class BadMessage(Exception):
    """A refusal that is not one printable line."""


def scratch() -> Path:
    """A directory for what cases are made of; it is removed when the fuzzer ends."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, path)
    return path


def flip_bits(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """``data`` with 1 to ``most`` bits changed."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mutate(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """One mutation of the bytes of a file, and its name."""
    start, stop = sorted(rng.choices(range(len(data) + 1), k=2))
    few = min(stop, start + rng.choice((1, 2, 8, 64, 4096)))
    mutations = {
        "bits": lambda: flip_bits(rng, data),
        "truncated": lambda: data[:start],
        "removed": lambda: data[:start] + data[few:],
        "repeated": lambda: data[:few] + data[start:],
        "zeroed": lambda: data[:start] + bytes(few - start) + data[few:],
        "random": lambda: data[:start] + rng.randbytes(few - start) + data[few:],
        "appended": lambda: data + rng.randbytes(rng.choice((1, 10, 1000))),
        "moved": lambda: data[:start] + data[stop:] + data[start:stop],
    }
    name = rng.choice([*mutations])
    return name, mutations[name]()


MakeCase = Callable[[random.Random, Path], Case]


def fuzz(kind: str, make: MakeCase, seed: int, indices: Iterable[int]) -> Counter[Outcome]:
    """Run cases of a kind of input; prints the bad ones, and returns how many ended how."""
    counts: Counter[Outcome] = Counter()
    for index in indices:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            case = make(random.Random(f"{seed} {kind} {index}"), Path(directory))
            result = run_case(case.run, size=case.size)

        counts[result.outcome] += 1
        if result.outcome not in GOOD:
            print(f"{kind}, {case.what}: {result.outcome} in {result.seconds:.1f} s")
            print(f"  repeat it: --kind {kind} --seed {seed} --first {index} --count 1")
            print("  " + result.detail.strip()[-3000:].replace("\n", "\n  "), flush=True)
    return counts


def main(kinds: Mapping[str, MakeCase]) -> int:
    """Run a fuzzer for each kind of input; the exit status is 1 if a case had a bad outcome."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: 0)")
    parser.add_argument("--count", type=int, default=100, help="cases of each kind (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--kind", nargs="+", choices=[*kinds], default=[*kinds], help="of input")
    options = parser.parse_args()
    found: Counter[Outcome] = Counter()
    for kind in options.kind:
        indices = range(options.first, options.first + options.count)
        counts = fuzz(kind, kinds[kind], options.seed, indices)
        each = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())
        print(f"{kind}: {counts.total():,} cases, {each}", flush=True)
        found += counts
    return int(any(outcome not in GOOD for outcome in found))


def _serve(run: Callable[[], Outcome], allowed: int, sender: Connection) -> None:
    """In the fork: call ``run``, and send its outcome, what it printed and its memory."""
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
        before = _reset_peak()
        # A guard for the machine, far above what is allowed: address space is not memory.
        address_space = _status("VmSize") + 2 * allowed + (8 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        try:
            outcome, detail = run(), ""
        except MemoryError as error:
            outcome, detail = Outcome.MEMORY, repr(error)
        except BadMessage as error:
            outcome, detail = Outcome.MESSAGE, str(error)
        except (ValueError, OSError) as error:
            outcome, detail = Outcome.REFUSED, str(error)
            if not is_printable(detail) or "\n" in detail or len(detail) > LONGEST_MESSAGE:
                outcome = Outcome.MESSAGE
        except BaseException:
            outcome, detail = Outcome.TRACEBACK, traceback.format_exc()
        memory = max(0, _status("VmHWM") - before)
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        detail = printed.read().decode(errors="replace")[-2000:] + detail[-4000:]
    sender.send((outcome, detail, memory))
    os._exit(0)


def is_printable(text: str) -> bool:
    """Whether a terminal shows the text as it is: no escapes, but line ends and tabs."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _reset_peak() -> int:
    """Let the peak memory of this process begin at what it has now, which is returned."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A size in /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"/proc/self/status has no {name}")
