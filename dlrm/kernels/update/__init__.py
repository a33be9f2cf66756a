"""Optimizer updates of rows and of whole tensors."""
