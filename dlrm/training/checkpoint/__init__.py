"""Checkpoints: written completely or not at all, by any number of processes, read by any other.

A checkpoint is a directory: the tensors of the model and the optimizers in safetensors files, and
``manifest.json`` with everything else and a digest of every tensor. That includes the specification
of the model (the arguments of ``DLRM``), so a trained model can be loaded without its data or
configuration, and the state of the training loop. Nothing in it is ever unpickled.
"""

from dlrm.training.checkpoint.parts import Parts
from dlrm.training.checkpoint.reader import Checkpoint, load_model

__all__ = ["Checkpoint", "Parts", "load_model"]
