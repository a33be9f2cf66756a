"""Train a DLRM whose sparse architecture is swapped by one flag: ``python train.py --emb tt``.

This is ``dlrm train``. The training loop (forward, loss, backward, update) is in
``dlrm/commands/train.py``.
"""

from __future__ import annotations

import sys

from dlrm.commands import run

if __name__ == "__main__":
    sys.exit(run("train"))
