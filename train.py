"""Train a DLRM whose sparse architecture is swapped by one flag: ``python train.py --emb tt``.

This is ``dlrm train``. The training loop (forward, loss, backward, update) is in
``dlrm/commands/train.py``.
"""

from __future__ import annotations

import sys
from functools import partial

from dlrm.commands import run

main = partial(run, "train")

if __name__ == "__main__":
    sys.exit(main())
