"""Rows of tables in tensor-train format: the look-up and its gradient.

Row ``i`` of a table is the chain product ``G_1[i_1] G_2[i_2] ... G_d[i_d]`` of one slice of each
core, where ``i_1`` (the most significant) to ``i_d`` are the digits of ``i`` in the mixed base
``p_1 ... p_d`` and a slice of core ``k`` is a block ``[r_{k-1}, q_k, r_k]``.

On a GPU a row is the product of two *factors*, ``left [A, R] @ right [R, C]``. A factor is a slice
of the first or the last core. With three cores or more the left one is the product of a *pair*, a
slice of the first core and one of the second; with four cores the right one is a product as well.
Many ids share a factor: the pairs that a batch uses are flagged, each gets a *slot* in a buffer,
and each is multiplied out once, in one small GEMM per slice of the big inner core. However skewed
the ids are, no slice has more rows to multiply than the core next to it has slices. The backward
pass sums the gradients of equal factors first and then runs the same GEMMs transposed. All sizes
depend only on shapes, and the host never waits, so a CUDA graph can capture everything.

``op`` checks the arguments and chooses the strategy, ``lookup`` runs it. ``layout`` depends on the
tables only, ``indexing`` on the ids, and ``factors`` has the products of cores. ``_index``,
``_pairs``, ``_rows`` and ``_unique`` are the Triton kernels; ``reference`` computes the same in
PyTorch.

Reference:
    Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models",
    MLSys 2021, arXiv 2101.11714.
"""

from dlrm.kernels.tt.layout import TTShape
from dlrm.kernels.tt.op import tt_bags, tt_vectors
from dlrm.kernels.tt.reference import tt_vectors_torch

__all__ = ["TTShape", "tt_bags", "tt_vectors", "tt_vectors_torch"]
