"""Optimizers that update only the rows a batch touched, and the learning-rate schedule."""

from dlrm.kernels.update.rules import RULES
from dlrm.optim.row_optimizer import RowOptimizer, fused, gradient_norm
from dlrm.optim.schedule import Schedule

__all__ = ["RULES", "RowOptimizer", "Schedule", "fused", "gradient_norm"]
