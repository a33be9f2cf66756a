"""``python -m dlrm``: the same as ``dlrm``."""

from __future__ import annotations

import sys

from dlrm.commands import main

if __name__ == "__main__":
    sys.exit(main())
