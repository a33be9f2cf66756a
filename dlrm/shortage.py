"""Where memory runs out: how that shows, and what to do."""

from __future__ import annotations

import torch

from dlrm.data.schema import Meta


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has no room, on any device, or that none could have."""
    known = (MemoryError, torch.OutOfMemoryError)
    told = ("allocate memory", "Storage size calculation overflowed", "Overflow when unpacking")
    # the second from 2**63 bytes, the last from a size of 2**63
    return isinstance(error, known) or any(text in str(error) for text in told)


def advice(data: str, embedding_dim: int) -> str:
    """What takes the most of it for the tables of a prepared directory, and what to do."""
    meta = Meta.read(data)
    rows, table = max(zip(meta.cardinalities, meta.tables, strict=True))
    size = 4e-6 * embedding_dim * rows
    return (
        f"out of memory: the largest table, {table}, has {rows:,} rows, {size:,.0f} MB if dense, "
        "beside the state of the optimizer; compress it with --emb and --budget, keep it in host "
        "memory with --emb offload, or lower --batch_size"
    )
