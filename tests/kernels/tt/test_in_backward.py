"""Cores that the backward pass updates, next to the same that are updated by their gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.data.batch import Batch
from dlrm.distributed.world import World
from dlrm.kernels.tt import TTShape, op, tt_bags, tt_vectors
from dlrm.kernels.update.in_backward import FusedUpdates
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, apply_in_backward
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.step import TrainStep
from dlrm.utils.bags import Bags
from tests.kit import combinations, first

GPU = torch.cuda.is_available()
TOLERANCE = 1e-4 if GPU else 1e-6  # relative RMS of changes; on a GPU sums have no fixed order
RULES = {
    "sgd": {},
    "rowwise_adagrad": {"eps": 0.1},  # else what is almost zero changes by the rate, up or down
    "adagrad": {"eps": 0.1},
}
# p of each table, q, ranks
SHAPES = {
    "d3": ([[3, 4, 2], [2, 5, 3]], (2, 3, 1), (1, 3, 5, 1)),
    "d3-two-tiles": ([[3, 4, 2]], (1, 2, 2), (1, 3, 40, 1)),  # 80 columns of a slice
    "d4": ([[3, 2, 4, 2], [1, 1, 1, 1]], (2, 1, 3, 2), (1, 2, 3, 4, 1)),
}
if GPU:
    SHAPES["d3-two-tiles-large"] = ([[200, 220, 250]], (4, 4, 4), (1, 32, 32, 1))
    SHAPES["d3-large"] = ([[200, 220, 250], [50, 52, 55]], (2, 2, 4), (1, 32, 32, 1))


class Cores:
    """Cores of a group of tables, the same each time, and how they are looked up."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(1)
        shapes, q, ranks = SHAPES[name]
        self.p = torch.tensor(shapes, device=device)
        self.shape = TTShape(self.p, q, ranks)
        widths = [ranks[k] * factor * ranks[k + 1] for k, factor in enumerate(q)]
        self.cores = [
            torch.randn(int(self.p[:, k].sum()), width, device=device, requires_grad=True)
            for k, width in enumerate(widths)
        ]
        self.start = [core.detach().clone() for core in self.cores]
        self.rows = self.p.prod(1)
        self.options = {"impl": "triton", "precision": "ieee"}

    def ids(self, step: int) -> Tensor:
        torch.manual_seed(step)
        count = 3000 if GPU else 9
        random = torch.rand(len(self.p), count, device=self.p.device, dtype=torch.float64)
        return (random * self.rows[:, None]).long()

    def loss(self, step: int, updates: FusedUpdates | None = None) -> Tensor:
        tables = torch.arange(len(self.p), device=self.p.device)[:, None]
        options = {"updates": updates, **self.options}
        rows = tt_vectors(self.cores, self.shape, tables, self.ids(step), **options)
        return (rows - 1).square().mean()

    def middle(self) -> list[Tensor]:
        return self.cores[1:-1]

    def changes(self) -> list[Tensor]:
        pairs = zip(self.cores, self.start, strict=True)
        return [after.detach() - before for after, before in pairs]


def assert_same_changes(got: Cores, want: Cores) -> None:
    for k, (a, b) in enumerate(zip(got.changes(), want.changes(), strict=True)):
        error = (a - b).norm() / b.norm()
        assert error <= TOLERANCE, f"core {k}: relative RMS {error:.1e}"


def optimizer_of(cores: Cores, rule: str = "sgd", **options) -> RowOptimizer:
    return RowOptimizer(cores.cores, rule, lr=0.1, **options)


def train_by_gradients(cores: Cores, optimizer: RowOptimizer, steps: int = 1) -> None:
    """Steps whose gradients are all returned."""
    for step in range(steps):
        cores.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


@combinations(name=[*SHAPES], rule=[*RULES], strategy=["direct", "unique"])
def test_cores_are_updated_as_by_their_gradients(name, rule, strategy, device, monkeypatch):
    monkeypatch.setattr(op, "_strategy", lambda *_: strategy)
    ours, theirs = Cores(name, device), Cores(name, device)
    train_by_gradients(theirs, optimizer_of(theirs, rule, **RULES[rule]), steps=2)
    optimizer = optimizer_of(ours, rule, **RULES[rule])
    in_tiles = rule == "rowwise_adagrad" and "two-tiles" in name  # no program has a whole slice
    for step in range(2):
        with apply_in_backward([optimizer]) as updates:
            ours.loss(step, updates).backward()
        assert all((core.grad is None) is not in_tiles for core in ours.middle())
        assert ours.cores[0].grad is not None is not ours.cores[-1].grad
        optimizer.step()
        optimizer.zero_grad()
    assert_same_changes(ours, theirs)


def test_bags_with_weights_update_them_too(device):
    runs = []
    for in_backward in (False, True):
        cores = Cores("d3", device)
        optimizer = optimizer_of(cores)
        ids = cores.ids(0).flatten()
        offsets = torch.arange(0, len(ids) + 1, 3, device=device)
        torch.manual_seed(2)
        weights = torch.randn(len(ids), device=device, requires_grad=True)
        with apply_in_backward([optimizer] if in_backward else []) as updates:
            options = {"updates": updates, **cores.options}
            out = tt_bags(cores.cores, cores.shape, Bags(ids, offsets, weights), **options)
            out.square().mean().backward()
        assert (cores.cores[1].grad is None) is in_backward
        optimizer.step()
        runs.append((cores, weights.grad))
    (theirs, want), (ours, got) = runs
    assert_same_changes(ours, theirs)
    torch.testing.assert_close(got, want)


def test_of_a_core_looked_up_twice_both_gradients_count(device):
    ours, theirs = Cores("d4", device), Cores("d4", device)
    (theirs.loss(0) + theirs.loss(1)).backward()
    optimizer_of(theirs).step()
    optimizer = optimizer_of(ours)
    with apply_in_backward([optimizer]) as updates:
        (ours.loss(0, updates) + ours.loss(1, updates)).backward()
    assert not any(change.any() for change in ours.changes())
    optimizer.step()
    assert_same_changes(ours, theirs)


def test_a_look_up_without_gradient_does_not_count(device):
    cores = Cores("d3", device)
    with apply_in_backward([optimizer_of(cores)]) as updates:
        loss = cores.loss(0, updates)
        with torch.no_grad():
            cores.loss(1, updates)
        loss.backward()
    assert cores.cores[1].grad is None


@first("given", [("sgd", {"momentum": 0.9}), ("adagrad", {"weight_decay": 0.1}), ("adam", {})])
def test_rules_that_change_all_of_a_core_get_its_gradient(given, device):
    rule, options = given
    ours, theirs = Cores("d3", device), Cores("d3", device)
    train_by_gradients(theirs, optimizer_of(theirs, rule, **options))
    optimizer = optimizer_of(ours, rule, **options)
    with apply_in_backward([optimizer]) as updates:
        ours.loss(0, updates).backward()
    assert ours.cores[1].grad is not None
    optimizer.step()
    assert_same_changes(ours, theirs)


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
def test_bfloat16_cores_are_left_to_stochastic_rounding(device):
    cores = Cores("d3", device)
    cores.cores = [core.detach().bfloat16().requires_grad_() for core in cores.cores]
    with apply_in_backward([optimizer_of(cores)]) as updates:
        cores.loss(0, updates).backward()
    assert all(core.grad is not None for core in cores.cores)


def test_a_gradient_is_added_to_one_that_is_there(device):
    ours, theirs = Cores("d3", device), Cores("d3", device)
    for step in range(2):
        theirs.loss(step).backward()
    # By SGD they would move as far by one after the other.
    optimizer_of(theirs, "adagrad", **RULES["adagrad"]).step()
    optimizer = optimizer_of(ours, "adagrad", **RULES["adagrad"])
    ours.loss(0).backward()
    with apply_in_backward([optimizer]) as updates:
        ours.loss(1, updates).backward()
    optimizer.step()
    assert_same_changes(ours, theirs)


def test_a_frozen_core_stays(device):
    cores = Cores("d3", device)
    optimizer = optimizer_of(cores)
    cores.cores[1].requires_grad_(False)
    with apply_in_backward([optimizer]) as updates:
        cores.loss(0, updates).backward()
    optimizer.step()
    assert [bool(change.any()) for change in cores.changes()] == [True, False, True]


def test_nothing_is_applied_after_the_block(device):
    cores = Cores("d3", device)
    with apply_in_backward([optimizer_of(cores)]) as updates:
        loss = cores.loss(0, updates)
    loss.backward()
    assert cores.cores[1].grad is not None
    assert not cores.changes()[1].any()


@pytest.mark.filterwarnings("ignore:invalid value")  # where a tile is wider than its slice
def test_slices_without_a_look_up_are_left_alone(device):
    """Even by an Adagrad whose eps of 0 makes 0 / 0 of them."""
    cores = Cores("d3", device)
    with apply_in_backward([optimizer_of(cores, "adagrad", eps=0.0)]) as updates:
        cores.loss(0, updates).backward()
    used = cores.ids(0) // cores.p[:, 2:] % cores.p[:, 1:2] + cores.shape.core_offsets()[:, 1:2]
    changed = cores.changes()[1].any(1)
    assert changed.nonzero().flatten().tolist() == used.unique().tolist()
    assert cores.cores[1].isfinite().all()
    assert GPU or not changed.all()


def test_a_second_backward_pass_is_refused(device):
    cores = Cores("d3", device)
    with apply_in_backward([optimizer_of(cores)]) as updates:
        loss = cores.loss(0, updates)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(ValueError, match=r"shape \(9, 45\) .* use one apply_in_backward block"):
            cores.loss(1, updates)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@first("wanted", ["reducer", "norms", "clip_norm"])
def test_a_training_step_updates_them_unless_gradients_are_wanted(wanted, device, monkeypatch):
    monkeypatch.setattr(op, "use_triton", lambda *_: True)
    sizes, runs = [50, 60], []
    for asks in ("", wanted):
        torch.manual_seed(0)
        plan = [("dense", {}), ("tt", {"rank": 3})]
        model = DLRM(4, sizes, 8, plan, bottom_mlp=[8], top_mlp=[8]).to(device)
        optimizer = RowOptimizer(model.parameters(), "adagrad", lr=0.05, eps=0.1)
        options = {"clip_norm": 1e9} if asks == "clip_norm" else {}
        if asks == "reducer":
            options["reducer"] = GradientReducer(model, optimizer, World())
        step = TrainStep(model, [optimizer], mode="eager", **options)
        (middle,) = (p for name, p in model.named_parameters() if name.endswith("cores.1"))
        given, losses = [], []
        optimizer.register_step_pre_hook(lambda *_, p=middle, g=given: g.append(p.grad is not None))
        for _ in range(2):
            ids = torch.stack([torch.randint(rows, (8,)) for rows in sizes])
            batch = Batch(torch.randn(4, 8), ids, (torch.rand(8) < 0.3).float()).to(device)
            losses.append(step(batch, norms=asks == "norms")["loss"].item())
        assert given == [bool(asks)] * 2
        runs.append((losses, middle.detach()))
    (losses, core), (again, same_core) = runs
    assert losses == pytest.approx(again, abs=1e-6)
    torch.testing.assert_close(core, same_core)
