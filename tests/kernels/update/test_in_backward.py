"""Rows that the backward pass updates, of ids and of bags, on the GPU and in host memory."""

from __future__ import annotations

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.distributed.world import World
from dlrm.embeddings import build
from dlrm.embeddings.common.context import LookupContext
from dlrm.kernels.lookup import source
from dlrm.kernels.offload import row_cache
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer, apply_in_backward
from dlrm.training.data_parallel import GradientReducer
from dlrm.training.step import TrainStep
from tests.kit import first


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    for module in (source, row_cache):
        monkeypatch.setattr(module, "use_triton", lambda *_: True)


@pytest.fixture(params=["ids", "bags"])
def bags(request):
    return request.param == "bags"


@pytest.fixture(params=["dense", "offload"])
def kind(request):
    return request.param


class Run:
    """A table whose ids or bags are looked up, the same each time."""

    def __init__(self, device, bags, kind="dense"):
        self.bags = bags
        torch.manual_seed(0)
        own = {"cache_rows": 4} if kind == "offload" else {}
        self.group = build(kind, [9], 4, mode="sum", **own).to(device)
        self.weight = self.group.weight
        self.start = self.rows()
        self.optimizer = RowOptimizer([self.weight], "adagrad", lr=0.1, eps=0.1)

    def rows(self):
        return self.group.kept_rows().clone()

    def loss(self, step=0, updates=None, dtype=None):
        torch.manual_seed(step)
        ids = torch.randint(0, 9, (6,)).to(self.weight.device)
        context = LookupContext(updates=updates, dtype=dtype)
        if self.bags:
            offsets = torch.tensor([0, 2, 2, 6], device=self.weight.device)
            out = self.group(ids, offsets, context=context)
        else:
            out = self.group(ids[None], context=context)
        return (out - 1).square().mean()


@pytest.fixture
def pair(device, bags, kind):
    return Run(device, bags, kind), Run(device, bags)


def assert_stepped_alike(ours, theirs):
    """After a step of the optimizers, for what still has a gradient."""
    for run in (ours, theirs):
        run.optimizer.step()
    assert not torch.equal(ours.rows(), ours.start)
    torch.testing.assert_close(ours.rows(), theirs.rows(), atol=1e-5, rtol=1e-5)


def test_a_look_up_without_gradient_does_not_count(pair):
    ours, theirs = pair
    theirs.loss().backward()
    with apply_in_backward([ours.optimizer]) as updates:
        loss = ours.loss(updates=updates)
        with torch.no_grad():
            ours.loss(1, updates)
        loss.backward()
    assert ours.weight.grad is None
    assert_stepped_alike(ours, theirs)


def test_both_gradients_of_rows_looked_up_twice_count(pair):
    ours, theirs = pair
    (theirs.loss() + theirs.loss(1)).backward()
    with apply_in_backward([ours.optimizer]) as updates:
        (ours.loss(updates=updates) + ours.loss(1, updates)).backward()
    assert torch.equal(ours.rows(), ours.start)
    assert_stepped_alike(ours, theirs)


def test_a_gradient_is_added_to_one_that_is_there(pair):
    ours, theirs = pair
    for step in range(2):
        theirs.loss(step).backward()
    ours.loss().backward()
    with apply_in_backward([ours.optimizer]) as updates:
        ours.loss(1, updates).backward()
    assert_stepped_alike(ours, theirs)


def test_nothing_is_applied_after_the_block_nor_to_frozen_rows(device, bags, kind):
    run = Run(device, bags, kind)
    with apply_in_backward([run.optimizer]) as updates:
        loss = run.loss(updates=updates)
    loss.backward()
    assert run.weight.grad is not None
    run.weight.requires_grad_(False)
    with apply_in_backward([run.optimizer]) as updates:
        assert not run.loss(updates=updates).requires_grad
    assert torch.equal(run.rows(), run.start)


def test_a_second_backward_pass_is_refused(device, bags, kind):
    run = Run(device, bags, kind)
    with apply_in_backward([run.optimizer]) as updates:
        loss = run.loss(updates=updates)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(ValueError, match=r"shape \(9, 4\) .* use one apply_in_backward block"):
            run.loss(1, updates)


def test_vectors_and_their_gradients_may_have_another_type(pair, bags):
    ours, theirs = pair
    for run, dtype in ((ours, torch.bfloat16), (theirs, None)):
        with apply_in_backward([run.optimizer]) as updates:
            loss = run.loss(updates=updates, dtype=dtype)
            assert loss.dtype == (dtype or torch.float32)
            loss.backward()
        assert run.weight.grad is None
    torch.testing.assert_close(ours.rows(), theirs.rows(), atol=1e-3, rtol=1e-2)
    if not bags:  # others that pool rows take the type alone
        ours.loss(dtype=torch.bfloat16).backward()
        assert ours.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("short", {"dim": 2, "scale": 2.0}),
        ("block", {"dim": 2}),
        ("qr", {"collisions": 3}),
        ("robe", {"rows": 5, "block": 2}),
        ("cafe", {"rows": 50}),
        ("basis", {"parts": 2, "clusters": 3}),
    ],
)
def test_rows_of_other_kinds_are_updated_too(kind, options, device):
    weights = []
    for fused, dtype in ((False, None), (True, None), (True, torch.bfloat16)):
        torch.manual_seed(0)
        group = build(kind, [40, 9], 4, **options).to(device)
        ids = torch.stack([torch.randint(40, (30,)), torch.randint(9, (30,))]).to(device)
        rows = [p for name, p in group.named_parameters() if name != "projection"]
        optimizer = RowOptimizer(rows, "adagrad", lr=0.1, eps=0.1)
        start = [p.detach().clone() for p in rows]
        with apply_in_backward([optimizer] if fused else []) as updates:
            out = group(ids, context=LookupContext(updates=updates, dtype=dtype))
            assert out.dtype == (dtype or torch.float32)
            (out.float() - 1).square().mean().backward()
        assert all((p.grad is None) == fused for p in rows)
        optimizer.step()
        assert not any(torch.equal(p, old) for p, old in zip(rows, start, strict=True))
        weights.append(torch.cat([p.detach().flatten() for p in rows]))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights[2], weights[0], atol=2e-3, rtol=2e-2)


@pytest.mark.usefixtures("group_of_one")
@first("wanted", ["reducer", "norms", "clip_norm"])
def test_a_training_step_updates_them_unless_gradients_are_wanted(wanted, device, bags):
    weights = []
    for asks in ("", wanted):
        torch.manual_seed(0)
        model = DLRM(4, [50, 60], 8, [("dense", {})] * 2, bottom_mlp=[8], top_mlp=[8]).to(device)
        optimizer = RowOptimizer(model.parameters(), "adagrad", lr=0.05, eps=0.1)
        options = {"clip_norm": 1e9} if asks == "clip_norm" else {}
        if asks == "reducer":
            options["reducer"] = GradientReducer(model, optimizer, World())
        step = TrainStep(model, [optimizer], mode="eager", **options)

        (table,) = model.sparse_arch.parameters()
        given = []
        optimizer.register_step_pre_hook(lambda *_, t=table, g=given: g.append(t.grad is not None))
        for _ in range(2):
            ids, offsets = torch.randint(0, 50, (32,)), torch.arange(0, 33, 2)
            if not bags:
                ids, offsets = ids[:16].view(2, 8), None
            labels = (torch.rand(8) < 0.3).float()
            step(Batch(torch.randn(4, 8), ids, labels, offsets).to(device), norms=asks == "norms")
        assert given == [bool(asks)] * 2
        weights.append(table.detach())
    torch.testing.assert_close(*weights)
