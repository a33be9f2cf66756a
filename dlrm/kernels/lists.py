"""Lists that the programs of a kernel append to."""

from dlrm.kernels import tl, triton


@triton.jit
def append(counter, chosen):
    """Positions of the ``chosen`` elements, appended to a list that has ``counter`` elements."""
    ones = chosen.to(tl.int32)
    number = tl.sum(ones, 0)
    begin = tl.atomic_add(counter, number, mask=number > 0, sem="relaxed")
    return begin + tl.cumsum(ones, 0) - 1
