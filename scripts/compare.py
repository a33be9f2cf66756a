"""Compare runs in a table and a plot: the same as ``dlrm compare``."""

from __future__ import annotations

import sys

from dlrm.commands import run

if __name__ == "__main__":
    sys.exit(run("compare"))
