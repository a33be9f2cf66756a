"""The loaders of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dlrm.data.loader import BatchLoader
from dlrm.distributed.world import World


def make_loader(
    data: str,
    world: World,
    device: torch.device,
    split: str,
    batch_size: int,
    options: Mapping[str, Any],
) -> BatchLoader:
    """The loader of one split for one of several processes.

    Args:
        data: prepared directory.
        world: the processes.
        device: of the batches.
        split: ``train``, or one that is read in full and in order.
        batch_size: samples per batch, over all processes.
        options: more arguments of ``BatchLoader``.

    Raises:
        ValueError: the processes can't share a batch evenly, or there is none to train on; or as
            ``BatchLoader``.
    """
    training = split == "train"
    in_full = {} if training else {"shuffle": False, "drop_last": False}
    loader = BatchLoader(
        data,
        split,
        batch_size=world.share(batch_size, even=training),
        rank=world.rank,
        world_size=world.size,
        device=device,
        **{**options, **in_full},
    )
    if not len(loader):
        raise ValueError("--loader.drop_last leaves no batch: lower --batch_size")
    if training:  # the free memory of each process differs a little
        loader.windows = max(world.sizes(loader.windows, device))
    return loader
