"""Prepare any table for training: the same as ``dlrm prepare``."""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "prepare_table")

if __name__ == "__main__":
    sys.exit(main())
