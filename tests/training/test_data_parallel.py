"""How gradients are summed over processes, seen from one whose peers look nothing up."""

import pytest
import torch
import torch.distributed as dist

from dlrm.data.batch import Batch
from dlrm.distributed.world import World
from dlrm.embeddings.common.context import LookupContext
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training.data_parallel import GradientReducer

RULES = {
    "plain": ("sgd", {}),
    "decay": ("sgd", {"weight_decay": 0.1}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "adagrad_decay": ("adagrad", {"weight_decay": 0.1}),
    "adamw": ("adamw", {}),
}


def train(world, rule, options, dtype="fp32"):
    """The rows of a small table after two steps, the second of which looks others up."""
    torch.manual_seed(0)
    recipe = {"num_dense": 2, "num_embeddings": [9], "embedding_dim": 4, "plan": [("dense", {})]}
    model = DLRM(**recipe, bottom_mlp=[4], top_mlp=[4], tables_dtype=dtype)
    optimizer = RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.1, **options)
    reducer = GradientReducer.of(model, optimizer, world)
    for ids in ([0, 3, 3], [3, 7, 8]):
        batch = Batch(torch.randn(2, 3), torch.tensor([ids]), torch.ones(3), total=3 * world.size)
        model(batch.dense, batch.ids).square().sum().backward()
        if reducer is not None:
            reducer.reduce_embeddings(batch, LookupContext())
        optimizer.step()
        optimizer.zero_grad()
    return model.sparse_arch.to_dense()[0]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", RULES)
def test_rows_that_no_process_looks_up_stay(name):
    """Weight decay and momentum move no row without a gradient, as in one process alone."""
    expected = train(World(), *RULES[name])
    torch.testing.assert_close(train(World(0, 2), *RULES[name]), expected)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_packed_rows_are_updated_as_in_one_process(dtype, monkeypatch):
    """Small tables as well: a dense gradient would be refused."""
    monkeypatch.setattr(World, "sizes", lambda _, count, *__, **___: [count, 0])
    monkeypatch.setattr(World, "gather", lambda _, tensor, __: [tensor, tensor[:0]])
    expected = train(World(), "rowwise_adagrad", {}, dtype)
    assert torch.equal(train(World(0, 2), "rowwise_adagrad", {}, dtype), expected)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "one frozen"])
def test_every_dense_gradient_is_summed_once(frozen, monkeypatch):
    """In the backward pass, or after it where one of the same part is missing."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    found = []
    for size in (1, 2):
        torch.manual_seed(0)
        layers = {"interaction": "dcn", "cross_rank": 2, "bottom_mlp": [4], "top_mlp": [4]}
        model = DLRM(2, [9], 4, [("dense", {})], **layers)
        optimizer = RowOptimizer(model.sparse_arch.parameters(), "sgd", lr=0.1)
        reducer = GradientReducer.of(model, optimizer, World(0, size))
        model.top_mlp[0].weight.requires_grad_(not frozen)
        for _ in range(2):
            loss = model(torch.ones(2, 3), torch.tensor([[0, 3, 3]])).square().sum()
            total = (
                loss.detach() * 2 if reducer is None else reducer.sum_loss(loss, torch.zeros(()))
            )
            loss.backward()
            if reducer is not None:
                reducer.reduce_dense()
            grads = [p.grad for p in model.dense_parameters() if p.grad is not None]
            found += [total, *(grad * 2 if reducer is None else grad for grad in grads)]
            model.zero_grad()
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=0, atol=0)
