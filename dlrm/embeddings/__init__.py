"""Embedding kinds. The file's name is the value of ``--emb``: adding a method is adding a file."""

from dlrm.embeddings.bag import EmbeddingBag
from dlrm.embeddings.base import Embedding
from dlrm.embeddings.registry import available, build

__all__ = ["Embedding", "EmbeddingBag", "available", "build"]
