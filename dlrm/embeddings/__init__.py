"""Embedding kinds. A kind's file name is its ``--emb`` value: to add a method, add a file."""

from dlrm.embeddings.bag import EmbeddingBag
from dlrm.embeddings.base import Embedding
from dlrm.embeddings.basis_linear import BasisLinear
from dlrm.embeddings.registry import available, build

__all__ = ["BasisLinear", "Embedding", "EmbeddingBag", "available", "build"]
