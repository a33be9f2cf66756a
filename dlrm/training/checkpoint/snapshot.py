"""Copies of the state of a run, from which a checkpoint is written while training continues."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
from torch import Tensor

from dlrm.kernels.offload.pinned_memory import in_host_memory, on_host
from dlrm.training.checkpoint.tensor_files import Piece, slices
from dlrm.utils.device import free_memory, is_out_of_memory
from dlrm.utils.streams import stream_of

HOST = torch.device("cpu")
MARGIN = 10  # a tenth of the memory of a device stays free


def take(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], int]:
    """Copy pieces where there is room: on their own device, else in host memory.

    On a GPU this takes milliseconds: the copies are made on the current stream, so that what
    follows may change the tensors. The stream that reads them for a file waits for them.

    Returns:
        The copies and their bytes; or the pieces and 0 if there is no room for copies.
    """
    # Where there is no room on a device, the copies of its pieces are in host memory.
    pieces = [_as_host_memory(piece) for piece in pieces]
    needed: Counter[torch.device] = Counter()
    for piece in pieces:
        needed[piece.values.device] += piece.values.nbytes
    staged = {device for device, size in needed.items() if not _has_room(device, size)}
    on_host = sum(needed[device] for device in {HOST, *staged})

    # Without room for copies, the pieces themselves are read, which waits for the stream too.
    _order_streams(pieces)
    if not _has_room(HOST, on_host):
        return pieces, 0

    copies = []
    try:
        for piece in pieces:
            copy = _on_host if piece.values.device in staged else _copy
            copies.append(replace(piece, values=copy(piece.values)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return pieces, 0  # what is free may be in too small parts
    _order_streams(copies)
    return copies, max(1, needed.total())


def _as_host_memory(piece: Piece) -> Piece:
    """A piece of a table that a GPU reads in host memory, as the host sees it."""
    values = piece.values
    if not (values.is_cuda and values.is_contiguous() and in_host_memory(values)):
        return piece
    torch.cuda.current_stream(values.device).synchronize()  # it may still be written
    return replace(piece, values=on_host(values.detach()))


def _order_streams(pieces: Sequence[Piece]) -> None:
    """Let the stream that reads pieces for a file wait for what was computed so far."""
    for device in {piece.values.device for piece in pieces if piece.values.is_cuda}:
        stream_of(device, "saves").wait_stream(torch.cuda.current_stream(device))


def _has_room(device: torch.device, size: int) -> bool:
    """Whether copies fit, with a margin; processes on one host share its memory."""
    if device == HOST:
        total = psutil.virtual_memory().total
        size *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        total = torch.cuda.get_device_properties(device).total_memory
    return not size or size + total // MARGIN <= free_memory(device)


@torch.no_grad()
def _copy(values: Tensor) -> Tensor:
    """A copy on the same device."""
    return torch.empty_like(values, memory_format=torch.contiguous_format).copy_(values)


def _on_host(values: Tensor) -> Tensor:
    """A copy in host memory, through buffers of bounded size."""
    copy = torch.empty(values.shape, dtype=values.dtype)
    parts = copy.reshape(-1).view(torch.uint8)
    at = 0
    for part in slices(values):
        parts[at : at + len(part)] = part
        at += len(part)
    return copy
