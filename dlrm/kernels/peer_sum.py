"""Sum tensors of all processes of a host, read from each other's memory."""

from __future__ import annotations

from torch import Tensor

from dlrm.kernels import tl, triton, use_triton
from dlrm.kernels.lookup.peer import PeerTensor

BLOCK = 1024  # elements of a program


@triton.jit
def _sum(addresses, out, n, rank, PEERS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum in the order of the ranks; address 0 is that of this one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(PEERS):
        begin = tl.load(addresses + (other - rank + PEERS) % PEERS)
        begin = tl.multiple_of(begin.to(out.dtype), 16)
        total += tl.load(begin + at, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


def sum_peers(block: PeerTensor, rank: int, out: Tensor, *, impl: str | None = None) -> None:
    """Sum a tensor of all peers in the order of their ranks.

    Args:
        block: of each peer ``[n]`` in fp32.
        rank: of this process.
        out: receives the sum, ``[n]``.
        impl: see :mod:`dlrm.kernels`.
    """
    peers = len(block.tensors)
    if use_triton(out, impl):
        _sum[(triton.cdiv(len(out), BLOCK),)](
            block.addresses, out, len(out), rank, PEERS=peers, BLOCK=BLOCK
        )
        return
    out.zero_()
    for other in range(peers):
        out.add_(block.tensors[(other - rank) % peers])
