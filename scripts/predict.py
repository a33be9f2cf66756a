"""Write the predictions of a trained model: the same as ``dlrm predict``."""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "predict")

if __name__ == "__main__":
    sys.exit(main())
