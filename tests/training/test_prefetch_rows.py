"""Rounds of batches whose rows are fetched ahead: the same losses, whatever is announced."""

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.embeddings import offload
from dlrm.kernels.offload.row_cache import CachedRows
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training.step import TrainStep

SIZES = [50, 900, 40]


def make(plan, device):
    """A model, and a step on it."""
    torch.manual_seed(0)
    with device:
        model = DLRM(4, SIZES, 8, plan, bottom_mlp=[16], top_mlp=[16])
    torch.manual_seed(0)
    model.sparse_arch.load_dense([torch.randn(rows, 8, device=device) for rows in SIZES])
    parts = model.dense_parameters(), model.sparse_arch.parameters()
    optimizers = [RowOptimizer(part, "adagrad", lr=0.05) for part in parts]
    return model, TrainStep(model, optimizers, mode="eager")


def draw(size, device):
    """A batch of skewed ids."""
    rows = torch.tensor(SIZES, device=device)[:, None]
    ids = (torch.rand(3, size, device=device) ** 3 * rows).long()
    return Batch(torch.randn(4, size, device=device), ids, ids[0].lt(9).float())


def told(way, batches, index):
    """What a step hears of the batches behind it."""
    known = batches[index + 1 : index + 8]
    ways = {
        "all": known,
        "next": known[0] if known else None,
        "none": None,
        "three": known[:3],
        "now and then": known if index % 3 else None,
        "wrong": known[::-1],
    }
    return ways[way]


@pytest.mark.parametrize("way", ["all", "next", "none", "three", "now and then", "wrong"])
@pytest.mark.parametrize("cache_rows", [20, 600])
def test_losses_equal_those_of_dense_tables(way, cache_rows, device):
    offload = ("offload", {"cache_rows": cache_rows})
    plans = [[("dense", {})] * 3, [offload] * 3, [offload, ("dense", {}), offload]]
    losses, tables = [], []
    for plan in plans:
        model, step = make(plan, device)
        torch.manual_seed(1)
        batches = [draw(32 if index != 17 else 5, device) for index in range(25)]
        losses.append(
            [
                step(batch, upcoming=told(way, batches, index))["loss"].item()
                for index, batch in enumerate(batches)
            ]
        )
        tables.append(model.sparse_arch.to_dense())
    assert losses[0] == losses[1]
    assert all(map(torch.equal, tables[0], tables[1]))
    # Groups of tables lie apart: on a GPU the interaction may add up in another order.
    assert losses[2] == pytest.approx(losses[0], abs=0 if device.type == "cpu" else 1e-5)


def as_bags(batch):
    """The same batch, with an offset for every id."""
    offsets = torch.arange(batch.ids.numel() + 1, device=batch.ids.device)
    return Batch(batch.dense, batch.ids.view(-1), batch.labels, offsets)


@pytest.mark.parametrize("kinds", [["offload"] * 3, ["offload", "hash", "offload"]])
def test_batches_with_and_without_offsets_may_alternate(kinds, device):
    losses = []
    for bags in (0, 2):
        plan = [(kind, {"cache_rows": 60} if kind == "offload" else {"rows": 9}) for kind in kinds]
        _, step = make(plan, device)
        torch.manual_seed(1)
        batches = [draw(16, device) for _ in range(12)]
        batches = [as_bags(b) if bags and n % bags else b for n, b in enumerate(batches)]
        losses.append(
            [
                step(batch, upcoming=told("all", batches, index))["loss"].item()
                for index, batch in enumerate(batches)
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def moves(plan, device, monkeypatch):
    """Samples whose rows each move of twelve steps brings, and whether ahead of them."""
    moved = []
    monkeypatch.setattr(offload, "ROUND", 4)
    begin = CachedRows.begin_round

    def count(cached, *rounds, batches):
        if cached.moves:
            for each, ahead in zip(rounds, (False, True), strict=True):
                moved.extend([] if each is None else [(each[0].shape[1], ahead)])
        begin(cached, *rounds, batches=batches)

    monkeypatch.setattr(CachedRows, "begin_round", count)
    _, step = make(plan, device)
    batches = [draw(32, device) for _ in range(12)]
    for index, batch in enumerate(batches):
        step(batch, upcoming=told("all", batches, index))
    return moved


def test_rows_of_several_batches_are_moved_together_while_all_is_announced(device, monkeypatch):
    moved = moves([("offload", {"cache_rows": 600})] * 3, device, monkeypatch)
    assert moved == [(32, False), (128, True), (128, True), (96, True)]


def test_tables_without_a_cache_do_not_hold_up_those_with_one(device, monkeypatch):
    plan = [("offload", {"cache_rows": 600}), ("offload", {"cache_rows": 0}), ("dense", {})]
    moved = moves(plan, device, monkeypatch)
    assert moved == [(32, False), (128, True), (128, True), (96, True)]


def test_what_moves_rows_between_two_steps_ends_the_round(device):
    losses = []
    for kind in ("dense", "offload"):
        model, step = make([(kind, {"cache_rows": 60} if kind == "offload" else {})] * 3, device)
        torch.manual_seed(1)
        batches, found = [draw(32, device) for _ in range(20)], []
        for index, batch in enumerate(batches):
            found.append(step(batch, upcoming=batches[index + 1 : index + 8])["loss"].item())
            if index % 5 == 1:
                model.state_dict()
            if index % 5 == 3:
                model.sparse_arch.groups[0](batches[0].ids)  # a training look-up of no round
            with torch.no_grad():
                found.append(float(model(batches[2].dense, batches[2].ids).sum()))
        losses.append(found)
    assert losses[0] == losses[1]


def test_a_round_that_could_not_begin_is_not_taken_for_one_that_did(device, monkeypatch):
    _, step = make([("offload", {"cache_rows": 600})] * 3, device)
    batches = [draw(32, device) for _ in range(3)]
    step(batches[0], upcoming=batches[1:])

    def fail(*_, **__):
        raise RuntimeError("rows did not come")

    monkeypatch.setattr(CachedRows, "begin_round", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rows did not come"):
            step(batches[1], upcoming=batches[2:])
