"""Write the predictions of a trained model: the same as ``dlrm predict``."""

from __future__ import annotations

import sys

from dlrm.commands import run

if __name__ == "__main__":
    sys.exit(run("predict"))
