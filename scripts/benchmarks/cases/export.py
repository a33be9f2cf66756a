"""Milliseconds of exported models on the CPU, next to plain PyTorch and FBGEMM.

    python scripts/benchmarks/run.py export --output benchmarks/export_cpu.json

The models have the tables of Criteo Kaggle, 33.8 M rows of 16 weights, and the default MLPs, with
random weights; ids are log-uniform. Each is exported, compiled and loaded as docs/export.md says.
PyTorch's models have an ``nn.EmbeddingBag`` for each table, or its quantized one, and FBGEMM's its
quantized bags for inference (pip install fbgemm-gpu-cpu, of the release that fits PyTorch); all
have the same MLPs, run eagerly. In every round each model scores one batch, so that all of them
meet the same other programs. Loading is timed in a new process, from files that the system has read
before, to the first score; the imports of PyTorch, a few seconds, are not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.export.directory import PROGRAM, WEIGHTS, compiled_file
from dlrm.export.inference import InferenceModel
from dlrm.export.programs import compile_program, save_program, trace
from dlrm.model import DLRM
from dlrm.sparse_arch.table_plan import KnownIds, TablePlan, make_table_plan
from dlrm.utils.program import Parser, count_arg
from scripts.benchmarks import harness
from scripts.benchmarks.batches import draw_ids, expected_counts

SMALL = "--shrink 20000 --rounds 2 --models tt"
DIM, DENSE, LARGEST, RANK = 16, 13, 7, 32
BATCHES = (1, 16, 128, 1024)
MODELS = ("dense fp32", "dense int8", "dense int4", "tt", "auto 100x")
Score = Callable[[Tensor, Tensor], object]
LOAD = """
import sys, time, torch, torch._inductor.package, torch.export.pt2_archive
from safetensors.torch import load_file
torch._inductor.config.cpp.vec_isa_ok = True
begin = time.perf_counter()
model = torch._inductor.aoti_load_package(sys.argv[1] + "/model_cpu.pt2")
weights = load_file(sys.argv[1] + "/weights.safetensors")
weights = {name: weights[name] for name in model.get_constant_fqns()}
model.load_constants(weights, check_full_update=True, user_managed=True)
model(torch.zeros(13, 1), torch.zeros(26, 1, dtype=torch.int64))
print(time.perf_counter() - begin)
"""


def arguments(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--rounds", type=count_arg, default=200, help="batches of each size")
    add("--shrink", type=count_arg, default=1, help="divide the rows by this")
    add("--threads", type=count_arg, default=1, help="of PyTorch")
    add("--jobs", type=count_arg, default=1, help="models to export at a time")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))


def measure(options: argparse.Namespace, record: harness.Record) -> None:
    """Measure every model at every batch size."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rows = [max(3, size // options.shrink) for size in KAGGLE_CARDINALITIES]
    record.note(threads=options.threads, rounds=options.rounds, rows=sum(rows))

    with tempfile.TemporaryDirectory() as work:
        scores: dict[str, Score] = {}
        results: dict[str, dict[str, Any]] = {}
        directories = [Path(work) / name.replace(" ", "_") for name in options.models]
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            made = pool.map(export, options.models, [rows] * len(directories), directories)
            for name, directory, found in zip(options.models, directories, made, strict=True):
                results[name] = found
                scores[name] = Compiled(directory)
                print(f"{name}: {found}", flush=True)
        for name, peer in peers(rows):
            scores[name], results[name] = peer, {}

        for size in BATCHES:
            for name, found in latencies(scores, rows, size, options.rounds).items():
                results[name][f"batch_{size}"] = found
        for name, found in results.items():
            record.add({"model": name, **found})


def plan_of(name: str, rows: Sequence[int]) -> TablePlan:
    """The tables of a model."""
    names = [str(table) for table in range(len(rows))]
    if name == "tt":
        options = {"tt": {"rank": RANK}}
        return make_table_plan(names, rows, DIM, "tt", options=options, largest=LARGEST)
    if name == "auto 100x":
        ids = KnownIds(counts=lambda: expected_counts(tuple(rows), 10**7))
        return make_table_plan(names, rows, DIM, "auto", budget="100x", ids=ids)
    return [("dense", {}) for _ in rows]


def export(name: str, rows: Sequence[int], directory: Path) -> dict[str, Any]:
    """Write the programs and weights of a model; returns its sizes, and seconds to load it."""
    directory.mkdir()
    torch.manual_seed(0)
    model = DLRM(DENSE, rows, DIM, plan_of(name, rows)).eval()
    compression = model.sparse_arch.sizes()["compression"]
    precision = name.partition(" ")[2] if name.startswith("dense") else None

    program = trace(InferenceModel(model, [False] * len(rows), precision=precision), DENSE)
    del model
    save_program(program, directory / PROGRAM)
    compile_program(program, directory / compiled_file("cpu"), "cpu")

    weights = program.state_dict
    tables = sum(value.nbytes for key, value in weights.items() if key.startswith("tables."))
    save_file({key: value.contiguous() for key, value in weights.items()}, directory / WEIGHTS)
    disk = sum(path.stat().st_size for path in directory.iterdir())

    command = [sys.executable, "-c", LOAD, str(directory)]
    seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "times_smaller": round(4 * DIM * sum(rows) / tables, 1),
        "times_smaller_in_training": round(compression, 1),
        "table_bytes": tables,
        "disk_bytes": disk,
        "load_seconds": seconds,
    }


class Compiled:
    """A compiled model, with its weights mapped into memory, where it reads them."""

    def __init__(self, directory: Path) -> None:
        self._model = torch._inductor.aoti_load_package(str(directory / compiled_file("cpu")))
        found = load_file(directory / WEIGHTS)
        self._weights = {name: found[name] for name in self._model.get_constant_fqns()}
        self._model.load_constants(self._weights, check_full_update=True, user_managed=True)

    def __call__(self, dense: Tensor, ids: Tensor) -> object:
        """Score a batch."""
        return self._model(dense, ids)


class Plain(nn.Module):
    """The model in plain PyTorch, with bags of any kind.

    Args:
        bags: takes ids ``[F, B]`` and returns vectors ``[B, F, D]``.
    """

    def __init__(self, bags: Callable[[Tensor], Tensor], tables: int) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = _mlp(DENSE, 512, 256, 64, DIM)
        self.top = _mlp(DIM + tables * (tables + 1) // 2, 512, 256, 1)[:-1]
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))
        self.pairs: Tensor

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Probabilities ``[B]`` of ``dense [N, B]`` and ``ids [F, B]``."""
        bottom = self.bottom(dense.t())
        both = torch.cat([bottom[:, None], self.bags(ids)], dim=1)
        products = torch.bmm(both, both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([bottom, products], dim=1))).squeeze(1)


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def peers(rows: Sequence[int]) -> Iterator[tuple[str, Score]]:
    """The same model in plain PyTorch, and with FBGEMM's bags if they are installed."""
    bags = [nn.EmbeddingBag(size, DIM, mode="sum") for size in rows]

    def plain(ids: Tensor) -> Tensor:
        return torch.stack([bag(column[:, None]) for bag, column in zip(bags, ids, strict=True)], 1)

    yield "PyTorch, fp32", Plain(plain, len(rows)).eval()
    packed = [torch.ops.quantized.embedding_bag_byte_prepack(bag.weight.detach()) for bag in bags]

    def quantized(ids: Tensor) -> Tensor:
        offsets = torch.arange(ids.shape[1])
        look_up = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
        return torch.stack([look_up(w, i, offsets) for w, i in zip(packed, ids, strict=True)], 1)

    yield "PyTorch, int8", Plain(quantized, len(rows)).eval()
    try:
        yield "FBGEMM, int8", Plain(_fbgemm(rows, "INT8"), len(rows)).eval()
        yield "FBGEMM, int4", Plain(_fbgemm(rows, "INT4"), len(rows)).eval()
    except (ImportError, OSError) as error:
        print(f"note: without FBGEMM: {error}", file=sys.stderr)


def _fbgemm(rows: Sequence[int], precision: str) -> Callable[[Tensor], Tensor]:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    where, kind = EmbeddingLocation.HOST, SparseType[precision]
    specs = [(str(table), size, DIM, kind, where) for table, size in enumerate(rows)]
    bags = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", output_dtype=SparseType.FP32
    )
    bags.fill_random_weights()

    def look_up(ids: Tensor) -> Tensor:
        offsets = torch.arange(ids.numel() + 1, dtype=torch.int32)
        found = bags(ids.reshape(-1).int(), offsets)  # [B, F * D]
        return found.view(ids.shape[1], len(rows), DIM)

    return look_up


@torch.inference_mode()
def latencies(
    scores: dict[str, Score], rows: Sequence[int], size: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each model at one batch size, over all rounds."""
    times: dict[str, list[float]] = {name: [] for name in scores}
    for turn in range(-5, rounds):
        ids = draw_ids(rows, size, "cpu").long()
        dense = torch.rand(DENSE, size)
        for name, score in scores.items():
            begin = time.perf_counter()
            score(dense, ids)
            if turn >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {
        name: {
            "p50_ms": float(np.percentile(spent, 50)),
            "p99_ms": float(np.percentile(spent, 99)),
            "best_ms": min(spent),
        }
        for name, spent in times.items()
    }
