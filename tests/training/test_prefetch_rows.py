"""Batches whose rows are fetched ahead: the same losses, however many are known ahead."""

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.embeddings.common import host_rows
from dlrm.kernels.offload.row_cache import CachedRows
from dlrm.model import DLRM
from dlrm.training.step import TrainStep
from tests.kit import combinations, optimizers_of

SIZES = [50, 900, 40]


def make(plan, device):
    """A model, and a step on it."""
    torch.manual_seed(0)
    with device:
        model = DLRM(4, SIZES, 8, plan, bottom_mlp=[16], top_mlp=[16])
    torch.manual_seed(0)
    model.sparse_arch.load_dense([torch.randn(rows, 8, device=device) for rows in SIZES])
    return model, TrainStep(model, optimizers_of(model, "adagrad", lr=0.05), mode="eager")


def draw(size, device):
    """A batch of skewed ids."""
    rows = torch.tensor(SIZES, device=device)[:, None]
    ids = (torch.rand(3, size, device=device) ** 3 * rows).long()
    return Batch(torch.randn(4, size, device=device), ids, ids[0].lt(9).float())


def prepared(way, step, batches):
    """The batches as a step gets them, with as many prepared ahead as ``way`` says."""
    if way == "none":
        yield from batches
    elif way == "now and then":  # some batches by themselves, the others in iterations of their own
        for begin in range(0, len(batches), 5):
            yield batches[begin]
            yield from step.prefetcher(batches[begin + 1 : begin + 5])
    elif way == "interrupted":  # by single batches of which the prefetcher knew nothing
        rest = step.prefetcher([b for n, b in enumerate(batches) if n % 3])
        for index, batch in enumerate(batches):
            yield next(rest) if index % 3 else batch
    else:
        step.prefetcher.look_ahead = lambda samples: {"all": 7, "next": 1, "three": 3}[way]
        yield from step.prefetcher(batches)


@combinations(
    way=["all", "next", "none", "three", "now and then", "interrupted"], cache_rows=[20, 600]
)
def test_losses_equal_those_of_dense_tables(way, cache_rows, device):
    offload = ("offload", {"cache_rows": cache_rows})
    plans = [[("dense", {})] * 3, [offload] * 3, [offload, ("dense", {}), offload]]
    losses, tables = [], []
    for plan in plans:
        model, step = make(plan, device)
        torch.manual_seed(1)
        batches = [draw(32 if index != 17 else 5, device) for index in range(25)]
        losses.append([step(batch)["loss"].item() for batch in prepared(way, step, batches)])
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
        losses.append([step(batch)["loss"].item() for batch in step.prefetcher(batches)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@combinations(
    way=["all", "next", "none", "three", "now and then", "interrupted"],
    host=[(0.1, "fp32", 0), (1.0, "fp32", 0), (0.1, "int8", 0), (0.1, "fp32", 2)],
    bags=[False, True],
)
def test_rows_of_any_ids_may_be_in_host_memory(way, host, bags, device):
    (share, dtype, pieces), found = host, []
    for own in ({}, {"cache_share": share}):
        options = {"rows": 90, "admit": 2, "dtype": dtype, "pieces": pieces, **own}
        model, step = make([("dynamic", options)] * 3, device)
        torch.manual_seed(1)
        batches, values = [draw(64, device) for _ in range(25)], []
        batches = [as_bags(batch) for batch in batches] if bags else batches
        last = batches[-1]
        for index, batch in enumerate(prepared(way, step, batches)):
            values.append(step(batch)["loss"])
            if index % 8 == 3:  # a checkpoint and an evaluation are of the steps so far
                values += [value.clone() for value in model.state_dict().values()]
                with torch.no_grad():
                    values.append(model.eval()(last.dense, last.ids, last.offsets))
                model.train()
        state = step.optimizers[1].state_dict()["state"]
        values += [*model.state_dict().values(), *state[0].values()]
        found.append(values)
        assert model.sparse_arch.id_counts()["ids/evicted"] > 100
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def moves(plan, device, monkeypatch):
    """Samples whose rows each move of twelve steps brings, and whether ahead of them."""
    moved = []
    for name in ("MAX_WINDOW", "MAX_SMALL_WINDOW"):
        monkeypatch.setattr(host_rows, name, 4)
    begin = CachedRows.begin_window

    def count(cached, *windows, batches):
        if cached.moves:
            for each, ahead in zip(windows, (False, True), strict=True):
                moved.extend([] if each is None else [(each[0].shape[1], ahead)])
        begin(cached, *windows, batches=batches)

    monkeypatch.setattr(CachedRows, "begin_window", count)
    _, step = make(plan, device)
    batches = [draw(32, device) for _ in range(12)]
    for batch in step.prefetcher(batches):
        step(batch)
    return moved


OFFLOAD = "offload", {"cache_rows": 600}


@pytest.mark.parametrize("other", [OFFLOAD, ("offload", {"cache_rows": 0}), ("dense", {})])
def test_rows_of_several_batches_are_moved_together_while_all_is_announced(
    other, device, monkeypatch
):
    """Tables without a cache do not hold up those with one."""
    moved = moves([OFFLOAD, other, OFFLOAD], device, monkeypatch)
    assert moved == [(32, False), (128, True), (128, True), (96, True)]


def test_what_moves_rows_between_two_steps_ends_the_window(device):
    losses = []
    for kind in ("dense", "offload"):
        model, step = make([(kind, {"cache_rows": 60} if kind == "offload" else {})] * 3, device)
        torch.manual_seed(1)
        batches, found = [draw(32, device) for _ in range(20)], []
        for index, batch in enumerate(step.prefetcher(batches)):
            found.append(step(batch)["loss"].item())
            if index % 5 == 1:
                model.state_dict()
            if index % 5 == 3:
                model.sparse_arch.groups[0](batches[0].ids)  # a training look-up of no window
            with torch.no_grad():
                found.append(float(model(batches[2].dense, batches[2].ids).sum()))
        losses.append(found)
    assert losses[0] == losses[1]


def test_a_window_that_could_not_begin_is_not_taken_for_one_that_did(device, monkeypatch):
    _, step = make([("offload", {"cache_rows": 600})] * 3, device)
    batches = [draw(32, device) for _ in range(3)]
    rest = step.prefetcher(batches)
    step(next(rest))

    def fail(*_, **__):
        raise RuntimeError("rows did not come")

    monkeypatch.setattr(CachedRows, "begin_window", fail)
    for given in (rest, step.prefetcher(batches[1:])):
        with pytest.raises(RuntimeError, match="rows did not come"):
            step(next(given))
