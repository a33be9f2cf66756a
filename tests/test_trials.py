"""Random models train on a GPU as on a CPU: sizes, kinds and options that nobody thought of.

DLRM_TRIALS=100:200 draws other models than the few of every run: those of the seeds 100 to 199.
"""

import os
import random
from typing import Any

import pytest
import torch
from torch.compiler import set_stance

from dlrm.data.batch import Batch
from dlrm.model import DLRM
from dlrm.optim import RULES, RowOptimizer
from dlrm.training.step import TrainStep

SEEDS = range(*map(int, os.environ.get("DLRM_TRIALS", "0:8").split(":")))
DENSE = 5  # features


def options_of(kind: str, chance: random.Random) -> dict[str, Any]:
    """Options of a kind that differ from its defaults."""
    rows = chance.choice([1, 7, 100, 3000])
    return {
        "basis": {"parts": chance.choice([1, 2]), "clusters": chance.choice([1, 16, 256])},
        "block": {"dim": chance.choice([1, 2])},
        "cafe": {"rows": max(rows, 16)},
        "drop": {"keep": rows},
        "hash": {"rows": rows},
        "offload": {"cache_rows": chance.choice([None, 500])},
        "paged": {"page_size": chance.choice([128, 4096])},
        "qr": {
            "collisions": chance.choice([1, 4, 60]),
            "operation": chance.choice(["multiply", "add"]),
        },
        "robe": {"rows": rows},
        "short": {"dim": chance.choice([1, 2]), "keep": rows},
        "tt": {"rank": chance.choice([1, 3, 8, 16, 33]), "d": chance.choice([2, 3, 3, 4])},
    }.get(kind, {})


def draw(seed: int) -> dict[str, Any]:
    """A model, an optimizer, and the batches it is trained on."""
    chance = random.Random(seed)
    tables = chance.randint(1, 7)
    sizes = [chance.choice([1, 2, 3, 40, 1000, 70_000]) for _ in range(tables)]
    dim = chance.choice([2, 4, 8, 16, 20, 32, 64, 130, 256, 300])
    kinds = [
        "dense",
        "basis",
        "block",
        "drop",
        "hash",
        "offload",
        "paged",
        "qr",
        "robe",
        "short",
        "tt",
    ]
    own = {kind: options_of(kind, chance) for kind in chance.sample(kinds, chance.randint(1, 3))}
    plan = [(kind, own[kind]) for kind in chance.choices(list(own), k=tables)]
    many, few = chance.choice([16, 200, 2500]), chance.choice([1, 33])
    return {
        "sizes": sizes,
        "dim": dim,
        "plan": plan,
        "interaction": chance.choice(["dot", "dot", "dcn"]),
        "width": chance.choice([16, 400]),
        "rule": chance.choice(sorted(RULES)),
        "clip_norm": chance.choice([None, None, 0.5]),
        "skew": chance.choice([1.0, 6.0]),
        "batches": [many] * 6 + [few] + [many] * 2,
        "bags": chance.choice([(), (), (2, 7)]),  # which of them have bags of ids
    }


def make_batches(case: dict[str, Any]) -> list[Batch]:
    batches = []
    for index, size in enumerate(case["batches"]):
        ids, offsets = [], None
        lengths = torch.ones(len(case["sizes"]), size, dtype=torch.int64)
        if index in case["bags"]:
            lengths = torch.randint(0, 4, lengths.shape)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        for rows, own in zip(case["sizes"], lengths, strict=True):
            spread = torch.rand(int(own.sum()), dtype=torch.float64) ** case["skew"]
            ids.append((spread * rows).long().clamp(max=rows - 1))
        flat = torch.cat(ids) if offsets is not None else torch.stack(ids)
        labels = (torch.rand(size) < 0.3).float()
        batches.append(Batch(torch.randn(DENSE, size), flat, labels, offsets))
    return batches


def train(case: dict[str, Any], device: str) -> list[float]:
    """The losses of the steps, and of the last batch afterwards."""
    torch.manual_seed(0)
    model = DLRM(
        DENSE,
        case["sizes"],
        case["dim"],
        case["plan"],
        bottom_mlp=[case["width"]],
        top_mlp=[case["width"]],
        interaction=case["interaction"],
        cross_rank=16,
    ).to(device)
    lr = 0.02 if case["rule"] in ("sgd", "adadelta") else 0.001
    optimizers = [
        RowOptimizer(model.dense_parameters(), case["rule"], lr=lr),
        RowOptimizer(model.sparse_arch.parameters(), case["rule"], lr=lr),
    ]
    step = TrainStep(model, optimizers, clip_norm=case["clip_norm"])
    batches = [batch.to(device) for batch in make_batches(case)]
    prepared = step.prefetcher([*batches, batches[-1]])
    return [step(batch)["loss"].item() for batch in prepared]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_trains_on_a_gpu_as_on_a_cpu(seed):
    case = draw(seed)
    with set_stance("force_eager"):  # compiling takes longer than all else
        found, expected = train(case, "cuda"), train(case, "cpu")
    assert found == pytest.approx(expected, rel=1e-3, abs=2e-4), case


def test_the_models_differ():
    cases = [draw(seed) for seed in range(50)]
    assert {kind for case in cases for kind, _ in case["plan"]} >= {"dense", "tt", "qr", "offload"}
    assert {case["rule"] for case in cases} == set(RULES)
    assert {case["bags"] for case in cases} == {(), (2, 7)}
