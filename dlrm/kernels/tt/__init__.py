"""Rows of tables in tensor-train format: the look-up and its gradient.

Row ``i`` of a table is the chain product ``G_1[i_1] G_2[i_2] ... G_d[i_d]`` of one slice of each
core, where ``i_1`` (the most significant) to ``i_d`` are the digits of ``i`` in the mixed base
``p_1 ... p_d`` and a slice of core ``k`` is a block ``[r_{k-1}, q_k, r_k]``.

On a GPU a row is the product of two factors, ``left [A, R] @ right [R, C]``. With three cores the
left factor is a product of the first two, with four cores the right one is of the last two as well.
Factors are shared: the pairs of slices that a batch uses are flagged, ranked, and multiplied out
once each, as one small GEMM per slice of the big middle core. However skewed the ids are, no slice
has more rows to multiply than its neighbour core has slices. The backward pass sums the gradients
of equal factors first and then takes the same GEMMs the other way round. All sizes depend on shapes
alone and nothing comes back to the host, so a CUDA graph can hold it all. Additions to one place
wait for one another, so what the first ids of a table add to has several. A middle core that the
backward pass may update itself (:mod:`dlrm.kernels.update.in_backward`) is updated where its
gradient is computed, and has none.

Reference:
    Yin, Acun, Liu, Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation Models",
    MLSys 2021, arXiv 2101.11714.
"""

from dlrm.kernels.tt.op import tt_bags, tt_vectors
from dlrm.kernels.tt.reference import tt_vectors_torch

__all__ = ["tt_bags", "tt_vectors", "tt_vectors_torch"]
