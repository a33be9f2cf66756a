"""Run the tests that need a GPU, and the kernel tests natively, in several processes side by side.

    python scripts/test_gpu.py

Most of the time of such a test goes into compiling kernels, on one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from dlrm.training.benchmark import ROOT
from dlrm.utils.device import cpu_count
from dlrm.utils.program import Parser, count_arg

NO_TESTS = 5  # pytest's exit status where none was chosen


def run(tests: Sequence[str], part: str, threads: int = 1) -> tuple[bool, str]:
    """Whether a part of the GPU tests passed, and what to show of its output."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--disable-warnings"]
    done = subprocess.run(
        [*pytest, "--part", part, "--durations", "3", *tests],
        cwd=ROOT,
        env={
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        },
        capture_output=True,
        text=True,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    passed = done.returncode in (0, NO_TESTS)
    return passed, "\n".join(lines[-1:] if passed else lines)


def main(argv: list[str] | None = None) -> int:
    """Run all parts; returns 1 if a test failed."""
    parser = Parser(__doc__)
    parser.add_argument("--jobs", type=count_arg, default=min(12, cpu_count()), help="processes")
    parser.add_argument("tests", nargs="*", default=["tests"], help="as for pytest")
    options = parser.parse_args(argv)
    parts = [f"{index}/{options.jobs}" for index in range(options.jobs)]
    threads = max(1, cpu_count() // options.jobs)  # each would else take all cores
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(run, options.tests, part, threads) for part in parts]
        for done in as_completed(running):
            passed, output = done.result()
            failed += not passed
            print(output, flush=True)
    print(f"{failed} of {len(parts)} parts failed" if failed else "all parts passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
