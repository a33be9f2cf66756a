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
import sys
import time
import uuid
from pathlib import Path

PRELOADED = ["train", "scripts.evaluate", "scripts.predict", "torch._dynamo"]
PRELOADED += ["torch.distributed.launcher.api"]


def run(program, arguments):
    """Run a program as ``python PROGRAM ARGUMENTS`` does."""
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def run_rank(program, arguments):
    """Run a program as one of several processes, for which status 0 is to return."""
    # A thread of the parent looks up the name of each process that connects to its store. A process
    # that is forked meanwhile would find the lock of that look-up taken, forever.
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    while len(children.read_text().split()) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.001)
    try:
        run(program, arguments)
    except SystemExit as stop:
        if stop.code:
            raise


def torchrun(processes, program, arguments, max_restarts=0):
    """Run a program in several processes as ``torchrun --standalone`` does."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="fork",
    )
    elastic_launch(config, run_rank)(program, arguments)


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
