"""Evaluate a trained model: the same as ``dlrm evaluate``."""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "evaluate")

if __name__ == "__main__":
    sys.exit(main())
