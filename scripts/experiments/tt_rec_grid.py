"""The models of the TT-Rec experiment, and their compression ratios."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings.common.factorization import factorize_dim, factorize_rows
from dlrm.embeddings.tt import clip_ranks, tt_weights

# Rows of the tables of Criteo Terabyte with ids modulo 10,000,000, as in the paper.
TERABYTE_10M = (
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10,
    2208, 11156, 122, 4, 970, 14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of the grid."""

    tables: int = 0
    """Number of tables, the largest ones, in tensor-train format; 0 for the dense model."""
    rank: int = 0
    """Rank of the tensor trains."""
    cache: float = 0.0
    """Share of the rows of these tables that are cached."""

    def __str__(self) -> str:
        if not self.tables:
            return "dense"
        return f"tt{self.tables}-r{self.rank}" + (f"-c{self.cache:g}" if self.cache else "")

    def options(self, cardinalities: Sequence[int]) -> list[str]:
        """Options of ``train.py``."""
        if not self.tables:
            return ["--emb=dense"]
        rows = sum(sorted(cardinalities)[-self.tables :])
        return [
            *("--emb=tt", f"--tables.largest={self.tables}", f"--tt.rank={self.rank}"),
            f"--tt.cache_rows={round(self.cache * rows)}",
        ]


def grid_cells(options: argparse.Namespace) -> list[Cell]:
    """All models of the grid, the dense one first."""
    grid = [Cell(tables=n, rank=rank) for n in options.tables for rank in options.ranks]
    n, rank = options.cache_at
    return [Cell(), *grid, *(Cell(tables=n, rank=rank, cache=share) for share in options.caches)]


def fine_tuned_cells(options: argparse.Namespace) -> list[Cell]:
    """The models to which the dense one is compressed: all numbers of tables at one rank."""
    return [Cell(tables=n, rank=options.cache_at[1]) for n in options.tables]


def compression(cardinalities: Sequence[int], dim: int, tables: int, rank: int) -> float:
    """Compression ratio of all embeddings with the largest tables in TT, without a cache.

    Args:
        cardinalities: rows of each table.
        dim: embedding dimension.
        tables: number of tables in TT.
        rank: TT rank.
    """
    order = sorted(cardinalities, reverse=True)
    q, shapes = factorize_dim(dim, 3), [factorize_rows(rows, 3) for rows in order[:tables]]
    ranks = clip_ranks(rank, shapes, q)
    weights = sum(tt_weights(p, q, ranks) for p in shapes) + dim * sum(order[tables:])
    return dim * sum(order) / weights


def print_ratios(tables: Sequence[int], ranks: Sequence[int]) -> None:
    """Print the paper's compression ratios for Kaggle (dim 16) and Terabyte (dim 64)."""
    grid = {
        f"rank {rank}": [f"{compression(KAGGLE_CARDINALITIES, 16, n, rank):.1f}x" for n in tables]
        for rank in ranks
    }
    print("Criteo Kaggle, dim 16, compression of all embeddings:")
    print(pd.DataFrame(grid, index=[f"{n} largest tables" for n in tables]).to_string())
    terabyte = compression(TERABYTE_10M, 64, 7, 8)
    print(f"Criteo Terabyte, ids modulo 10 M, dim 64, 7 largest, rank 8: {terabyte:.1f}x")
