"""Optimizers that update only the rows that a batch uses, and the learning-rate schedule."""

from dlrm.kernels.update.rules import RULES
from dlrm.optim.row_optimizer import RowOptimizer, apply_in_backward, gradient_norm
from dlrm.optim.schedule import Schedule

__all__ = ["RULES", "RowOptimizer", "Schedule", "apply_in_backward", "gradient_norm"]
