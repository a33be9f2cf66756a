"""Export a trained model: the same as ``dlrm export``."""

from __future__ import annotations

import sys

from dlrm.commands import run

if __name__ == "__main__":
    sys.exit(run("export"))
