"""Export a trained model: the same as ``dlrm export``."""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "export")

if __name__ == "__main__":
    sys.exit(main())
