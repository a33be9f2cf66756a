"""Run the tests that need a GPU, and the kernel tests natively: a process per file, side by side.

    python scripts/test_gpu.py

Most of the time of such a test goes into compiling kernels, on one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from dlrm.hints import Parser
from dlrm.machine import cores
from dlrm.measure import ROOT

NO_TESTS = 5  # pytest's exit status where none was chosen


def run(path: Path) -> tuple[int, str]:
    """The exit status and the output of the GPU tests of one file."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--disable-warnings", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    passed = done.returncode in (0, NO_TESTS)
    shown = lines[-1:] if passed else lines
    heading = f"{os.path.relpath(path, ROOT)}: {time.perf_counter() - began:.1f} s: "
    return 0 if passed else done.returncode, heading + "\n".join(shown)


def main(argv: list[str] | None = None) -> int:
    """Run all files; returns 1 if a test failed."""
    parser = Parser(__doc__)
    parser.add_argument("--jobs", type=int, default=min(8, cores()), help="files at a time")
    options = parser.parse_args(argv)
    files = sorted(
        (path for path in (ROOT / "tests").rglob("test_*.py") if needs_gpu(path)),
        key=lambda path: -path.stat().st_size,  # long ones first
    )
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run, path) for path in files]):
            status, output = done.result()
            failed += status != 0
            print(output, flush=True)
    print(f"{failed} of {len(files)} files failed" if failed else f"{len(files)} files passed")
    return int(failed > 0)


def needs_gpu(path: Path) -> bool:
    """Whether a file may have tests marked for a GPU (``tests/conftest.py`` marks the kernels')."""
    return path.parent.name == "kernels" or "mark.gpu" in path.read_text()


if __name__ == "__main__":
    sys.exit(main())
