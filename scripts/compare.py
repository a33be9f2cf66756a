"""Compare runs in a table and a plot: the same as ``dlrm compare``."""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "compare")

if __name__ == "__main__":
    sys.exit(main())
