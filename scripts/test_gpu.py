"""Run the tests that need a GPU, and the kernel tests natively, in several processes side by side.

    python scripts/test_gpu.py

Most of the time of such a test goes into compiling kernels, on one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm.utils.cpus import cpu_count
from dlrm.utils.program import Parser, count_arg

ROOT = Path(__file__).parents[1]


def run(tests: Sequence[str], jobs: int) -> int:
    """Run the GPU tests among these; returns pytest's exit status.

    A process that has none left takes some of another's. Each compiles on its own core: a pool of
    compilers for each would take longer to start than most kernels take to compile.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--disable-warnings"]
    command += ["-n", str(jobs), "--dist", "worksteal", "--durations", "10", *tests]
    environment = {
        "OMP_NUM_THREADS": str(max(1, cpu_count() // jobs)),  # each would else take all cores
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--jobs", type=count_arg, default=min(16, cpu_count()), help="processes")
    parser.add_argument("tests", nargs="*", default=["tests"], help="as for pytest")
    options = parser.parse_args(argv)
    return run(options.tests, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
