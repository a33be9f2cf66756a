"""How far a step of plain SGD moves the rows of a tensor train, next to a row of a dense table.

    python scripts/experiments/tt_steps.py --json benchmarks/tt_steps.json

A row of a dense table moves by the rate times its gradient. Here random rows of Kaggle's largest
tables get a random gradient, one at a time, and the program prints how far they move, in units of
that: with cores of equal scale, as in ``reset_parameters``; with the scale in the last core, as
training with plain SGD starts from; and with cores drawn by the rule of TT-Rec's published code,
which leaves the ranks out of the scale. There is no training.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.tt import TT
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts.benchmarks import harness

DIM, RATE = 16, 1e-3


def as_published(group: TT) -> None:
    """Scale the cores as TT-Rec's code does: entries deviate by 2.37 (3 V)^(-1/6) at any rank."""
    for core in group.cores:
        core.data.mul_(2.37 * (3 * group.num_embeddings[0]) ** (-1 / 6) / core.data.std())


STARTS: dict[str, Callable[[TT], None]] = {
    "equal scale": lambda group: None,
    "scale in the last core": TT.match_dense_steps,
    "TT-Rec's code": as_published,
}


def movement(group: TT, ids: int) -> float:
    """How far a row moves in a step of SGD for this row alone; the median of some random rows."""
    cores = list(group.cores)
    moved = []
    for each in torch.randint(group.num_embeddings[0], (ids, 1)):
        gradient = torch.randn(1, group.embedding_dim)
        row = group.rows(0, each)
        slopes = torch.autograd.grad(row, cores, gradient)
        with torch.no_grad():
            before = [core.clone() for core in cores]
            torch._foreach_add_(cores, slopes, alpha=-RATE)
            moved.append(((group.rows(0, each) - row).norm() / (RATE * gradient.norm())).item())
            torch._foreach_copy_(cores, before)
    return statistics.median(moved)


def measure(tables: int, ranks: list[int], ids: int) -> list[dict[str, Any]]:
    """One result for each table, rank and start."""
    results = []
    for rows in sorted(KAGGLE_CARDINALITIES, reverse=True)[:tables]:
        for rank in ranks:
            for start, scale in STARTS.items():
                torch.manual_seed(0)
                group = TT([rows], DIM, rank=rank)
                scale(group)
                deviation = group.rows(0, torch.randint(rows, (4096,))).std().item()
                result = {"rows": rows, "rank": rank, "start": start, "deviation": deviation}
                results.append(result | {"moved": movement(group, ids)})
    return results


def main(argv: list[str] | None = None) -> int:
    """Print the measurements; returns the exit status."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--tables", type=count_arg, default=7, help="number of tables, the largest ones")
    add("--ranks", nargs="+", type=count_arg, default=[8, 16, 32, 64], help="TT ranks")
    add("--ids", type=count_arg, default=50, help="rows of each table that are moved")
    add("--json", type=path_arg, help="also write the measurements to this JSON file")
    options = parser.parse_args(argv)

    def run() -> None:
        results = measure(options.tables, options.ranks, options.ids)
        for each in results:
            print(
                f"{each['rows']:10,} rows, rank {each['rank']:2}, {each['start']:22}: rows deviate "
                f"by {each['deviation']:.1e}, a step moves {each['moved']:.1e} of a dense one"
            )
        if options.json:
            harness.write(options.json, {"embedding_dim": DIM, "results": results})

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
