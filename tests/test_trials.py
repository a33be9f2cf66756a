"""Random models train alike on every device and in every mode: sizes that nobody thought of.

DLRM_TRIALS=100:200 draws other models than the few of every run: those of the seeds 100 to 199.
"""

import os
import random
from typing import Any

import pytest
import torch
from torch.nn.functional import embedding_bag

from dlrm.data.batch import Batch, fixed_bags
from dlrm.embeddings.bag import EmbeddingBag
from dlrm.embeddings.registry import available
from dlrm.model import DLRM
from dlrm.optim import RULES
from dlrm.training.step import TrainStep
from tests.kit import optimizers_of

SEEDS = range(*map(int, os.environ.get("DLRM_TRIALS", "0:6").split(":")))
DTYPES = ("fp32", "bf16", "int8", "int4")


def options_of(kind: str, dim: int, chance: random.Random) -> dict[str, Any]:
    """Options of a kind that differ from its defaults."""
    rows = chance.choice([1, 7, 100, 3000])
    divisors = [own for own in (1, 2, 4, 5) if dim % own == 0]
    return {
        "basis": {"parts": chance.choice(divisors), "clusters": chance.choice([1, 16, 256])},
        "block": {"dim": chance.choice(divisors), "keep": chance.choice([None, rows])},
        "cafe": {"rows": max(rows, 16)},
        "drop": {"keep": rows},
        "hash": {"rows": rows},
        "offload": {"cache_rows": chance.choice([None, 0, 500])},
        "paged": {"page_size": chance.choice([1, 128, 4096])},
        "qr": {
            "collisions": chance.choice([1, 4, 60]),
            "operation": chance.choice(["multiply", "add"]),
        },
        "robe": {"rows": rows},
        "short": {"dim": chance.choice(divisors), "keep": rows},
        "tt": {
            "rank": chance.choice([1, 3, 8, 16, 33]),
            "d": chance.choice([2, 3, 3, 4]),
            "keep": chance.choice([None, None, 7]),
        },
    }.get(kind, {})


def draw(seed: int) -> dict[str, Any]:
    """A model, an optimizer, and the batches it is trained on."""
    chance = random.Random(seed)
    tables = chance.choice([1, 2, 2, 5, 26, 26, 300])
    large = 3000 if tables == 300 else 70_000
    sizes = [chance.choice([1, 2, 3, 40, 1000, large]) for _ in range(tables)]
    dim = chance.choice([1, 4, 10, 16, 48])
    dtype = chance.choice(DTYPES)

    # One to three kinds, each with options of its own.
    kinds = [
        kind
        for kind, group in available().items()
        if (dtype in DTYPES[:2] or group.packs_rows)
        and (kind != "offload" or dtype != "int4")
        and (kind != "paged" or tables < 300)  # of one page per row
    ]
    own = {}
    for kind in chance.sample(sorted(kinds), chance.randint(1, 3)):
        options = options_of(kind, dim, chance)
        own[kind] = {name: value for name, value in options.items() if value is not None}
    plan = [(kind, own[kind]) for kind in chance.choices(list(own), k=tables)]

    # Batches of one size, one of another size, and more of the first.
    many, few = chance.choice([1, 2, 16, 200, 200, 2500]), chance.choice([1, 33])
    return {
        "dense": chance.choice([0, 1, 2, 13, 200]),
        "sizes": sizes,
        "dim": dim,
        "plan": plan,
        "dtype": dtype,
        "interaction": chance.choice(["dot", "dot", "dcn"]),
        "width": 16 if tables == 300 else chance.choice([1, 16, 400]),
        "rule": chance.choice(sorted(RULES)),
        "clip_norm": chance.choice([None, None, 0.5]),
        "skew": chance.choice([1.0, 6.0]),
        "batches": [min(many, 20_000 // tables)] * 7 + [few] + [min(many, 20_000 // tables)] * 2,
        "bags": chance.choice(["one-hot", "one-hot", "fixed", "ragged"]),
        "weights": chance.random() < 0.3,  # of samples
        "ids": chance.choice([torch.int32, torch.int64]),
    }


def make_batches(case: dict[str, Any]) -> list[Batch]:
    """The batches of a case, in host memory."""
    tables, batches = len(case["sizes"]), []

    fixed = torch.randint(0, 4, (tables,)).tolist()
    for size in case["batches"]:
        offsets, bounds, sizes = None, None, None
        counts = [size] * tables
        if case["bags"] == "fixed":
            sizes = tuple(fixed)
            offsets, bounds = fixed_bags(sizes, size, "cpu")
        elif case["bags"] == "ragged":
            lengths = torch.randint(0, 4, (tables * size,))
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            bounds = tuple(offsets[::size].tolist())
        if offsets is not None:
            counts = offsets[::size].diff().tolist()

        ids = []
        for rows, count in zip(case["sizes"], counts, strict=True):
            spread = torch.rand(count, dtype=torch.float64) ** case["skew"]
            ids.append((spread * rows).to(case["ids"]).clamp(max=rows - 1))

        batches.append(
            Batch(
                dense=torch.randn(case["dense"], size),
                ids=torch.stack(ids) if offsets is None else torch.cat(ids),
                labels=(torch.rand(size) < 0.3).float(),
                offsets=offsets,
                bounds=bounds,
                weights=torch.rand(size) * 2 if case["weights"] else None,
                bag_sizes=sizes,
            )
        )
    return batches


def make_model(case: dict[str, Any], plan: list, dtype: str) -> DLRM:
    return DLRM(
        case["dense"],
        case["sizes"],
        case["dim"],
        plan,
        bottom_mlp=[case["width"]],
        top_mlp=[case["width"]],
        interaction=case["interaction"],
        cross_rank=16,
        tables_dtype=dtype,
    )


def train(case: dict[str, Any], device: str, mode: str, emulate=None) -> tuple[list[float], DLRM]:
    """The losses of the steps and of the last batch afterwards, and the model."""
    torch.manual_seed(0)
    model = make_model(case, case["plan"], case["dtype"]).to(device)
    lr = 0.02 if case["rule"] in ("sgd", "adadelta") else 0.001
    optimizers = optimizers_of(model, case["rule"], lr=lr, stochastic=False)
    step = TrainStep(model, optimizers, clip_norm=case["clip_norm"], mode=mode)
    if emulate is not None:
        emulate(step)
    batches = [batch.to(device) for batch in make_batches(case)]
    prepared = step.prefetcher([*batches, batches[-1]])
    return [step(batch, norms=n == 6)["loss"].item() for n, batch in enumerate(prepared)], model


def score_in_fp64(case: dict[str, Any], model: DLRM, batch: Batch) -> torch.Tensor:
    """The logits of the same model with dense tables in double precision."""
    dense = make_model(case, [("dense", {})] * len(case["sizes"]), "fp32").double()
    dense.load_trained(model)
    return dense(batch.dense.double(), batch.ids, batch.offsets, batch.bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_trains_on_a_gpu_as_on_a_cpu(seed):
    """Eagerly, and as it runs by default, captured."""
    case = draw(seed)
    expected, _ = train(case, "cpu", "eager")
    eager, _ = train(case, "cuda", "eager")
    captured, _ = train(case, "cuda", "graph")
    noise = 1e-3 if case["dtype"] == "fp32" else 1e-2  # of rows that are rounded elsewhere
    assert eager == pytest.approx(expected, rel=noise, abs=2e-4), case
    assert captured == pytest.approx(eager, rel=noise, abs=2e-4), case


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_trains_alike_in_every_mode(seed, recorded_on_a_cpu):
    """On a CPU: eagerly, and as a captured step does; and dense tables score the same."""
    case = draw(seed)
    expected, model = train(case, "cpu", "eager")
    assert torch.tensor(expected).isfinite().all(), case
    captured, _ = train(case, "cpu", "eager", recorded_on_a_cpu)
    assert captured == pytest.approx(expected, rel=1e-5, abs=1e-6), case

    batch = make_batches(case)[0]
    with torch.no_grad():
        found = model.eval()(batch.dense, batch.ids, batch.offsets, batch.bounds)
        wanted = score_in_fp64(case, model, batch)
    noise = 1e-4 if case["dtype"] == "fp32" else 2e-2
    torch.testing.assert_close(found.double(), wanted, rtol=noise, atol=noise, msg=str(case))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_weighted_bags_are_those_of_dense_rows(seed, device):
    case = draw(seed)
    (kind, options), rows, dim = case["plan"][0], case["sizes"][0], case["dim"]
    dtype = {"fp32": None, "bf16": torch.bfloat16}.get(case["dtype"], case["dtype"])
    common = {"mode": "sum", "sparse": True, "include_last_offset": True, "dtype": dtype}
    layer = EmbeddingBag(rows, dim, kind=kind, device=device, **common, **options)
    lengths = torch.randint(0, 4, (case["batches"][0],))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = torch.randint(rows, (int(offsets[-1]),), dtype=case["ids"])
    with torch.no_grad():
        given = ids.to(device), offsets.to(device)
        weights = torch.rand(len(ids)).to(layer(*given))  # of the type of the rows
        found = layer(*given, weights).cpu().double()
        dense = layer.embedding.to_dense(0).cpu().double()
    wanted = embedding_bag(
        ids.long(), dense, offsets, mode="sum", per_sample_weights=weights.cpu().double(),
        include_last_offset=True,
    )  # fmt: skip
    noise = 1e-5 if case["dtype"] == "fp32" else 2e-2
    torch.testing.assert_close(found, wanted, rtol=noise, atol=noise, msg=str(case))


def test_the_models_differ():
    cases = [draw(seed) for seed in range(200)]
    assert {kind for case in cases for kind, _ in case["plan"]} == set(available())
    assert {case["rule"] for case in cases} == set(RULES)
    assert {case["bags"] for case in cases} == {"one-hot", "fixed", "ragged"}
    assert {case["dtype"] for case in cases} == set(DTYPES)
    assert {len(case["sizes"]) for case in cases} == {1, 2, 5, 26, 300}
