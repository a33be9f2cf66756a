"""Serve an exported model over HTTP: the program is ``examples/serve.py``, which needs no dlrm."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dlrm.utils import startup
from dlrm.utils.messages import print_error
from dlrm.utils.shipped import shipped_program

NEEDED = ("starlette", "uvicorn", "prometheus_client")


def main(argv: Sequence[str]) -> int:
    """Run the program; returns the exit status."""
    startup.imported()
    try:
        serve = shipped_program("serve")
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        print_error(f"error: {error.name} is not installed: pip install 'dlrm[serve]'")
        return 2
    sys.argv[1:] = argv
    return int(serve.main())
