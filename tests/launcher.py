"""Starts programs as forks of one process that has imported what they need, which takes seconds.

Run by the fixture ``start`` of conftest.py. It reads requests from stdin, one JSON object a line,
and answers each with one line.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from multiprocessing import get_context
from pathlib import Path

PRELOADED = [f"dlrm.commands.{name}" for name in ("train", "evaluate", "predict")]
PRELOADED += ["torch._dynamo", "torch.distributed.launcher.api"]


def run(program, arguments):
    """Run a program as ``python PROGRAM ARGUMENTS`` does."""
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


class Rank:
    """A process of torchrun: a fork, where torchrun starts a program anew."""

    def __init__(self, program, arguments, env):
        own = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]  # torchrun's handlers
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, own)
        target = partial(self._run, program, arguments, env, own, blocked)
        self._process = get_context("fork").Process(target=target)
        self._process.start()
        self.pid = self._process.pid
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @staticmethod
    def _run(program, arguments, env, handled, blocked):
        for number in handled:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.update(env)
        # A thread of the parent looks up the name of each process that connects to its store. A
        # process that is forked meanwhile would find the lock of that look-up taken, forever.
        children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
        while len(children.read_text().split()) < int(env["LOCAL_WORLD_SIZE"]):
            time.sleep(0.001)
        try:
            run(program, arguments)
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(1)

    def poll(self):
        """The exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout):
        """Wait until it has ended."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def close(self, death_sig):
        """Send it a signal."""
        os.kill(self.pid, death_sig)

    proc = property(lambda self: self)  # torchrun asks for the process and for what handles it


def torchrun(processes, program, arguments, max_restarts=0):
    """Run a program in several processes as ``torchrun --standalone`` does."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def rank(entrypoint, args, env, **_):
        return Rank(entrypoint, args, env)

    api.get_subprocess_handler = rank
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, program)(*arguments)
    except api.SignalException as signalled:
        sys.exit(f"torchrun: {signalled}")


def start(program, arguments, processes, output, file_size=None, max_restarts=None):
    """In a new process: run a program, its output in the files ``output`` names."""
    os.setsid()
    for stream, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if processes > 1 or max_restarts is not None:
        torchrun(processes, program, arguments, max_restarts or 0)
    else:
        run(program, arguments)


def wait(pid, seconds):
    """The exit status of a process, negative for a signal; None if it has not ended by then."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.01)


def preload():
    """Import what forks need."""
    sys.path.insert(1, os.getcwd())
    for name in PRELOADED:
        importlib.import_module(name)
    del sys.path[1]
    gc.freeze()


def main():
    """Serve requests until stdin ends."""
    preload()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(*request["wait"])
        elif not (answer := os.fork()):
            return start(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
