"""Paged tables equal dense ones wherever their pages lie."""

import copy
import re

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.embeddings import build
from dlrm.embeddings.paged import balanced, cyclic, parse_devices
from dlrm.kernels.lookup import paged as page_table
from dlrm.kernels.offload.pinned_memory import in_host_memory
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, gradient_norm
from dlrm.training import checkpoint
from dlrm.training.checkpoint.manifest import RunState
from dlrm.training.step import TrainStep
from tests.kit import GPU, optimizers_of, write_checkpoint

SIZES = [1, 7, 40, 131]
HERE = ["cpu", "cpu"]
PLACES = [
    {},
    {"devices": HERE, "page_size": 7},
    {"devices": HERE, "page_size": 1},
    {"devices": HERE, "page_size": 7, "placement": "cyclic"},
    {"devices": ["cpu", "cpu+cpu", "cpu"], "page_size": 10},
    {"devices": ["cpu+cpu+cpu", "cpu+cpu"], "page_size": 10},
    *([] if GPU else [{"devices": ["host", "cpu"], "page_size": 50}]),  # which a GPU would update
]
every_place = pytest.mark.parametrize("options", PLACES, ids=str)


def ids_of(batch, sizes=SIZES):
    """Skewed ids with both ends of every table and of every page of 7 and 10 among them."""
    ids = torch.stack([(torch.rand(batch) ** 3 * rows).long() for rows in sizes])
    ids[:, 0], ids[:, -1] = 0, torch.tensor(sizes) - 1
    for at, row in enumerate((6, 7, 9, 10, 13, 14, 19, 20, 130, 125, 126)):
        ids[-1, at + 1] = row
    return ids


def pair(options, dim=8, **common):
    """A dense group and a paged one from the same seed."""
    torch.manual_seed(5)
    dense = build("dense", SIZES, dim, **common)
    torch.manual_seed(5)
    return dense, build("paged", SIZES, dim, **options, **common)


def assert_equal_tables(paged, dense):
    for table in range(len(SIZES)):
        assert torch.equal(paged.to_dense(table), dense.to_dense(table))
    for replicas in paged.blocks:
        assert all(torch.equal(block, replicas[0]) for block in replicas)


@every_place
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_training_equals_dense_to_the_last_bit(options, rule):
    dense, paged = pair(options)
    optimizers = [RowOptimizer(group.parameters(), rule, lr=0.1) for group in (dense, paged)]
    for _ in range(6):
        ids, up = ids_of(60), torch.randn(60, len(SIZES), 8)
        outs = [group(ids) for group in (dense, paged)]
        assert torch.equal(*outs)
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.backward(up)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_tables(paged, dense)


@every_place
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_training_with_torch_optim(options, make):
    dense, paged = pair(options)
    optimizers = [make(group.parameters(), lr=0.1) for group in (dense, paged)]
    for _ in range(3):
        ids = ids_of(60)
        for group, optimizer in zip((dense, paged), optimizers, strict=True):
            group(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for table in range(len(SIZES)):
        torch.testing.assert_close(paged.to_dense(table), dense.to_dense(table))


def test_gradients_add_up_from_a_place_that_had_none():
    group = build("paged", [6], 2, page_size=3, devices=["cpu", "cpu"], placement="cyclic")
    for ids in ([3, 4, 5], [2, 2, 2]):  # of one place each
        group(torch.tensor([ids])).sum().backward()
    found = [parameter.grad.to_dense()[:, 0].tolist() for parameter in group.parameters()]
    assert found == [[0, 0, 3], [1, 1, 1]]


def test_a_page_is_a_stretch_of_one_table():
    paged = build("paged", [10, 3, 8], 2, page_size=4, devices=HERE, placement="cyclic")
    lengths = [4, 4, 2, 3, 4, 4]  # each table begins a page, each last page ends with it
    assert [len(block) for (block,) in paged.blocks] == [sum(lengths[0::2]), sum(lengths[1::2])]
    weights = [torch.arange(2 * rows).view(rows, 2) + 100.0 * rows for rows in (10, 3, 8)]
    paged.load_dense(weights)
    first = torch.cat([weights[0][:4], weights[0][8:], weights[2][:4]])
    assert torch.equal(paged.blocks[0][0], first)


@pytest.mark.parametrize("page_size", [10**18, 10**20])
def test_a_page_may_be_longer_than_64_bits_count(page_size):
    paged = build("paged", [10] * 30, 2, page_size=page_size)
    ids = torch.arange(10).expand(30, -1)
    rows = torch.stack([paged.rows(table, ids[table]) for table in range(30)], 1)
    assert torch.equal(paged(ids), rows)


def test_a_list_says_where_each_page_lies():
    devices = ["cpu", "host", "host", "cpu", "host"]
    paged = build("paged", [17], 2, page_size=4, devices=devices, placement="cyclic")
    assert paged.device_groups == (("cpu",), ("host",), ("cpu",))
    assert [len(block) for (block,) in paged.blocks] == [4, 4 + 4 + 1, 4]


@pytest.mark.parametrize("saved", PLACES[:5], ids=str)
@pytest.mark.parametrize("loaded", PLACES[:5], ids=str)
def test_the_state_does_not_depend_on_the_placement(saved, loaded):
    dense, old = pair(saved)
    assert list(old.state_dict()) == ["weight"]
    for kind, options in (("paged", loaded), ("dense", {})):
        new = build(kind, SIZES, 8, **options)
        new.load_state_dict(old.state_dict())
        for table in range(len(SIZES)):
            assert torch.equal(new.to_dense(table), dense.to_dense(table))
    old.load_state_dict(build("dense", SIZES, 8).state_dict())


def test_replicas_of_a_copy_count_once_in_the_norm():
    group = build("paged", SIZES, 8, devices=["cpu+cpu"])
    norms = []
    for one in (group, copy.deepcopy(group)):
        one(torch.zeros(len(SIZES), 5, dtype=torch.long)).sum().backward()
        norms.append(gradient_norm(one.parameters()).item())
    assert norms[0] == norms[1] > 0


def test_a_state_that_does_not_fit_is_refused():
    _, paged = pair({})
    with pytest.raises(RuntimeError, match=r"weight has shape \(3, 8\), it must be \(179, 8\)"):
        paged.load_state_dict({"weight": torch.zeros(3, 8)})
    with pytest.raises(RuntimeError, match="Missing key"):
        paged.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        paged.load_state_dict({**paged.state_dict(), "more": torch.zeros(1)})


def test_pages_with_a_place_stay_there_and_take_on_a_type():
    _, placed = pair({"devices": HERE, "page_size": 7})
    placed.to("meta")
    assert all(p.device.type == "cpu" for p in placed.parameters())
    assert placed._offsets.is_meta
    _, loose = pair({})
    loose.to("meta")
    assert all(p.is_meta for p in loose.parameters())
    _, placed = pair({"devices": HERE, "page_size": 7})
    before = placed.to_dense(3)
    placed.double()
    assert placed.to_dense(3).dtype == torch.float64
    assert torch.equal(placed.to_dense(3).float(), before)
    assert placed(ids_of(60)).dtype == torch.float64


def test_the_default_places_hot_pages_in_the_cheapest_memory():
    """Shares of the rows are kept; the first pages of every table lie on the GPU."""
    places = [("host",), ("cuda:0",), ("cpu",)]
    lengths, loads = [10] * 8, [8, 7, 6, 5, 4, 3, 2, 1]
    assert balanced(lengths, loads, places, [0, 1, 2, 1]) == [1, 1, 1, 1, 0, 0, 2, 2]


def test_the_default_balances_load_and_bytes_among_equals():
    sizes = [100_000, 40_000, 1_500, 700]
    paged = build("paged", sizes, 2, page_size=64, devices=["cpu", "cpu", "cpu"])
    rows = [len(block) for (block,) in paged.blocks]
    assert max(rows) - min(rows) <= 64
    ids = torch.stack(
        [(torch.exp(torch.rand(20_000) * torch.log(torch.tensor(n + 1.0))) - 1) for n in sizes]
    ).long()
    paged(ids).sum().backward()
    found = torch.tensor([float(block.grad._nnz()) for (block,) in paged.blocks])
    turns = build("paged", sizes, 2, page_size=64, devices=["cpu"] * 3, placement="cyclic")
    turns(ids).sum().backward()
    naive = torch.tensor([float(block.grad._nnz()) for (block,) in turns.blocks])
    assert found.max() / found.mean() < 1.05 < naive.max() / naive.mean()


def test_devices_are_parsed():
    groups, entries = parse_devices(["host", "cpu", "cpu", "host", "cpu+host"])
    assert groups == [("host",), ("cpu",), ("cpu",), ("cpu", "host")]
    assert entries == [0, 1, 2, 0, 3]
    assert cyclic(5, [2, 0]) == [2, 0, 2, 0, 2]


def test_more_pages_than_a_page_table_holds_are_refused():
    with pytest.raises(ValueError, match=r"there are 70,368,744,177,665 pages, at most 4,194,304"):
        build("paged", [2**62, 5], 4)


def test_it_says_where_its_rows_are():
    _, paged = pair({"devices": ["host", "cpu"], "page_size": 50})
    assert "page_size=50, " in repr(paged)
    assert re.search(r"\d+ rows on host, \d+ rows on cpu", repr(paged))
    total = sum(SIZES) * 8 * 4
    parts = [sum(t.get(name, 0) for t in paged.footprint()) for name in ("weights", "host")]
    assert sum(parts) == total
    assert all(parts)
    replicated = build("paged", SIZES, 8, devices=["cpu+cpu"])
    assert sum(sum(table.values()) for table in replicated.footprint()) == 2 * total


def model_of(kind, options, device="cpu"):
    """The arguments of a small model, the model from a fixed seed, and its optimizers."""
    torch.manual_seed(3)
    recipe = {"num_dense": 13, "num_embeddings": SIZES, "embedding_dim": 16}
    recipe |= {"plan": [(kind, options)] * len(SIZES), "bottom_mlp": [8], "top_mlp": [8]}
    model = DLRM(**recipe).to(device)
    return recipe, model, optimizers_of(model, "adagrad", lr=0.05)


def train(model, optimizers, steps, seed=4):
    """Losses of some steps, the gradients clipped to a small norm."""
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    step = TrainStep(model, optimizers, clip_norm=0.05)
    batches = [
        Batch(torch.randn(13, 60), ids_of(60).int(), torch.randint(2, (60,)).float())
        for _ in range(steps)
    ]
    losses = [step(batch.to(device), norms=True)["loss"].item() for batch in batches]
    assert step.graphs.count == (step.mode == "graph")
    return losses


@every_place
def test_a_model_trains_as_with_dense_tables(options):
    """Clipping included: replicas count once in the norm."""
    losses = [
        train(*model_of(*given)[1:], steps=4) for given in (("dense", {}), ("paged", options))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("way", ["as it was", "elsewhere", "dense"])
def test_a_checkpoint_goes_on_under_another_placement(way, tmp_path):
    """Rows and optimizer state alike, whatever devices the tables lay on."""
    recipe, model, optimizers = model_of("paged", {"devices": ["cpu", "cpu+cpu"], "page_size": 7})
    train(model, optimizers, steps=3)
    parts = checkpoint.Parts(model, optimizers)
    state = RunState(model=recipe, config={}, groups=parts.groups())
    write_checkpoint(tmp_path, parts, state)
    expected = train(model, optimizers, steps=3, seed=5)
    given = {
        "as it was": ("paged", {"devices": ["cpu", "cpu+cpu"], "page_size": 7}),
        "elsewhere": ("paged", {"page_size": 40}),
        "dense": ("dense", {}),
    }[way]
    _, other, others = model_of(*given)
    checkpoint.Checkpoint.open(tmp_path).load(other, others, groups=True)
    assert train(other, others, steps=3, seed=5) == expected


def test_a_trained_model_loads_where_its_devices_are_not(tmp_path):
    recipe, model, _ = model_of("paged", {"devices": ["cpu", "cpu"], "page_size": 7})
    recipe |= {"plan": [("paged", {"devices": ["cuda:97"], "page_size": 7})] * len(SIZES)}
    state = RunState(model=recipe, config={})
    write_checkpoint(tmp_path, checkpoint.Parts(model), state)
    loaded, _ = checkpoint.load_model(tmp_path)
    ((group, _),) = loaded.sparse_arch.embeddings()
    assert group.page_size == 7
    for table in range(len(SIZES)):
        rows = model.sparse_arch.embeddings()[0][0].to_dense(table)
        assert torch.equal(group.to_dense(table), rows)


def on_gpu(options, rule="adagrad", steps=5):
    """A dense group on the GPU and a paged one after the same steps, and what each gave last."""
    groups = [group.to("cuda") for group in pair(options, dim=16)]
    optimizers = [RowOptimizer(group.parameters(), rule, lr=0.1) for group in groups]
    for _ in range(steps):
        ids, up = ids_of(700).cuda(), torch.randn(700, len(SIZES), 16, device="cuda")
        outs = [group(ids) for group in groups]
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.backward(up)
            optimizer.step()
            optimizer.zero_grad()
    return groups, optimizers, outs


def assert_close_tables(paged, dense):
    """Equal but for the order of sums, which depends on what else an update sums."""
    for table in range(len(SIZES)):
        ids = torch.arange(SIZES[table], device="cuda")
        rows = [group.rows(table, ids) for group in (paged, dense)]
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    for replicas in paged.blocks:
        assert all(torch.equal(block.cpu(), replicas[0].cpu()) for block in replicas)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize(
    "devices", [None, ["cuda:0", "host"], ["host"], ["cuda:0", "cuda:0+host"], ["cuda", "cpu"]]
)
def test_on_a_gpu_and_its_host(devices, rule):
    (dense, paged), (_, optimizer), outs = on_gpu({"devices": devices, "page_size": 7}, rule)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert_close_tables(paged, dense)
    for group, replicas in zip(paged.device_groups, paged.blocks, strict=True):
        for device, block in zip(group, replicas, strict=True):
            assert in_host_memory(block) == (device == "host" and devices is not None)
            for state in optimizer.state[block].values():
                assert in_host_memory(state) == in_host_memory(block)


@pytest.mark.gpu
def test_pages_in_host_memory_take_no_gpu_memory():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    paged = build("paged", [200_000], 64, devices=["host"]).cuda()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    paged.bfloat16()
    assert in_host_memory(paged.weight_0_0)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert paged.footprint() == [{"host": 200_000 * 64 * 2}]


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [None, ["cuda:0", "host"]])
def test_a_captured_step_equals_a_dense_one(devices):
    """The whole model with its step as a CUDA graph: placement changes no loss."""
    losses = []
    for kind, options in (("dense", {}), ("paged", {"devices": devices, "page_size": 7})):
        _, model, optimizers = model_of(kind, options, "cuda")
        losses.append(train(model, optimizers, steps=8))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.gpu
def test_a_step_over_several_devices_is_not_captured():
    given = "paged", {"devices": ["cuda:0", "cpu"], "page_size": 7}
    _, model, optimizers = model_of(*given, "cuda")
    with pytest.raises(ValueError, match="all tables in its memory or in pinned host memory"):
        TrainStep(model, optimizers, mode="graph")
    assert TrainStep(model, optimizers).mode == "eager"
    expected = train(*model_of("dense", {})[1:], steps=4)
    assert train(model, optimizers, steps=4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1"], ["cuda:0+cuda:1", "host"]])
def test_on_two_gpus(devices, portable, monkeypatch):
    if portable:
        monkeypatch.setattr(page_table, "reaches", lambda reader, memory: False)
    (dense, paged), _, outs = on_gpu({"devices": devices, "page_size": 7}, "adam", steps=20)
    assert (paged.pages(torch.device("cuda:0")).addresses is None) == portable
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert_close_tables(paged, dense)
