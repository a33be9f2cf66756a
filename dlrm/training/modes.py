"""How a training step runs: eager or captured; its precision; deterministic or not."""

from __future__ import annotations

import os
import warnings
from threading import Thread

import numpy as np
import torch

from dlrm.kernels import hash_triton
from dlrm.model import DLRM
from dlrm.utils.messages import did_you_mean

MODES = ("auto", "eager", "graph")
PRECISIONS = ("fp32", "tf32", "bf16")


def mode_for(model: DLRM, device: torch.device, mode: str) -> str:
    """The mode of a step on a model: ``eager`` or ``graph``.

    Args:
        model: of the step.
        device: of the step; tables may be on others.
        mode: one of :data:`MODES`.

    Raises:
        ValueError: an unknown mode, or graph without a GPU or with several.
    """
    if mode not in MODES:
        raise ValueError(f"unknown step mode {mode!r}{did_you_mean(mode, MODES)}")
    on_gpu = device.type == "cuda"
    one = all(parameter.device == device for parameter in model.parameters())
    if mode == "graph" and not (on_gpu and one):
        raise ValueError(
            "--step graph needs a GPU, and all tables in its memory or in pinned host memory; "
            "use --step eager"
        )
    auto = "graph" if on_gpu and one else "eager"
    return auto if mode == "auto" else mode


def hash_ahead(device: torch.device) -> Thread:
    """Start to compute what the keys of all kernels begin with, if steps will run some.

    Join the thread before the first one; until then the program may read and draw rows.
    """
    thread = Thread(target=hash_triton if device.type == "cuda" else None)
    thread.start()
    return thread


def set_precision(precision: str, *, deterministic: bool) -> None:
    """Set the precision of matrix products and determinism for the whole process.

    Args:
        precision: one of :data:`PRECISIONS`.
        deterministic: use deterministic algorithms; False leaves that as it is.

    Raises:
        ValueError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}{did_you_mean(precision, PRECISIONS)}")
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    # The compiler recommends TF32 although the user has chosen fp32.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a workspace per stream
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed the generators of PyTorch for a step, captured or not.

    So the dropout of a step does not depend on the steps that a process has run before: a resumed
    run has the same, and each process its own.

    Args:
        seed: of the run.
        step: number of the step.
        rank: of the process.
    """
    state = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))
