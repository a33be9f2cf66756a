import copy

import pytest
import torch

from dlrm.optim import RULES, RowOptimizer, Schedule, gradient_norm

TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def sparse(parameter, rows, values):
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, parameter.shape)


@pytest.mark.parametrize("rule", sorted(TORCH))
def test_dense_gradients_equal_torch(rule):
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    optimizer, reference = RowOptimizer([ours], rule, lr=0.1), TORCH[rule]([theirs])
    for _ in range(5):
        grad = torch.randn(5, 3)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_gradients_update_touched_rows_like_dense_ones(rule):
    rows = [4, 1, 4, 0]
    table, dense = (torch.nn.Parameter(torch.ones(6, 3)) for _ in range(2))
    a, b = RowOptimizer([table], rule, lr=0.1), RowOptimizer([dense], rule, lr=0.1)
    for _ in range(4):
        values = torch.randn(4, 3)
        sparse(table, rows, values)
        dense.grad = torch.zeros(6, 3).index_add_(0, torch.tensor(rows), values)
        a.step()
        b.step()
    touched = [0, 1, 4]
    torch.testing.assert_close(table[touched], dense[touched])
    assert (table[[2, 3, 5]] == 1).all()


def test_duplicates_are_merged_before_the_update():
    table = torch.nn.Parameter(torch.zeros(3, 1))
    sparse(table, [1, 1], torch.tensor([[1.0], [10.0]]))
    RowOptimizer([table], "sgd", lr=1.0).step()
    assert table.flatten().tolist() == [0.0, -11.0, 0.0]
    table = torch.nn.Parameter(torch.zeros(3, 1))
    optimizer = RowOptimizer([table], "adagrad", lr=1.0)
    sparse(table, [1, 1], torch.tensor([[1.0], [10.0]]))
    optimizer.step()
    assert optimizer.state[table]["sum"][1].item() == 121.0


def test_rowwise_adagrad_keeps_one_number_per_row():
    table = torch.nn.Parameter(torch.zeros(4, 8))
    optimizer = RowOptimizer([table], "rowwise_adagrad", lr=0.1)
    sparse(table, [2], torch.full((1, 8), 3.0))
    optimizer.step()
    assert optimizer.state[table]["sum"].flatten().tolist() == [0, 0, 9, 0]
    torch.testing.assert_close(table[2], torch.full((8,), -0.1))
    assert optimizer.state_bytes([table]) == 4 * 4


def test_adam_counts_steps_per_row():
    table = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = RowOptimizer([table], "adam", lr=0.1)
    for _ in range(9):
        sparse(table, [0], torch.ones(1, 2))
        optimizer.step()
    sparse(table, [1], torch.ones(1, 2))
    optimizer.step()
    assert optimizer.state[table]["steps"].flatten().tolist() == [9, 1, 0]
    torch.testing.assert_close(table[1], torch.full((2,), -0.1))  # a full first step


def test_accumulated_sparse_gradients():
    table = torch.nn.Parameter(torch.zeros(3, 1))
    for _ in range(2):
        torch.nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True).sum().backward()
    RowOptimizer([table], "sgd", lr=1.0).step()
    assert table.flatten().tolist() == [0.0, -4.0, 0.0]


def test_reset_rows_forgets_their_state_alone():
    table = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = RowOptimizer([table], "adagrad")
    sparse(table, [0, 2], torch.ones(2, 2))
    optimizer.step()
    optimizer.reset_rows(table, torch.tensor([2]))
    assert optimizer.state[table]["sum"].tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("rule", RULES)
def test_saved_state_continues_to_the_last_digit(rule):
    def train(table, optimizer, seed):
        torch.manual_seed(seed)
        for _ in range(3):
            sparse(table, [0, 2, 2], torch.randn(3, 2))
            optimizer.step()

    table = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = RowOptimizer([table], rule, lr=0.1)
    train(table, optimizer, 1)
    other = torch.nn.Parameter(table.detach().clone())
    restored = RowOptimizer([other], rule, lr=0.5)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(table, optimizer, 2)
    train(other, restored, 2)
    assert torch.equal(table, other)


def test_foreign_state_is_refused():
    table = torch.nn.Parameter(torch.ones(4, 2))
    state = RowOptimizer([table], "sgd").state_dict()
    with pytest.raises(ValueError, match="the saved optimizer is sgd, this is adam"):
        RowOptimizer([table], "adam").load_state_dict(state)
    with pytest.raises(ValueError, match="of other parameters"):
        RowOptimizer([table, torch.nn.Parameter(torch.ones(1))], "sgd").load_state_dict(state)


def test_bad_arguments():
    table = torch.nn.Parameter(torch.ones(4, 2))
    with pytest.raises(ValueError, match="did you mean 'adagrad'"):
        RowOptimizer([table], "adagrd")
    with pytest.raises(ValueError, match="must not be negative"):
        RowOptimizer([table], "sgd", lr=-1)


def test_schedule_warms_up_holds_and_decays():
    optimizer = RowOptimizer([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = Schedule([optimizer], warmup=4, decay_start=6, decay_steps=4, power=2)
    rates = []
    for step in range(12):
        schedule.set(step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    expected = [0.5, 1, 1.5, 2, 2, 2, 2, 2 * 0.75**2, 0.5, 2 * 0.25**2, 0, 0]
    assert rates == pytest.approx(expected)


def test_gradient_norm_merges_duplicates():
    table, weight = torch.nn.Parameter(torch.zeros(3, 1)), torch.nn.Parameter(torch.zeros(1))
    sparse(table, [1, 1], torch.tensor([[1.0], [2.0]]))
    weight.grad = torch.tensor([4.0])
    assert gradient_norm([table, weight]).item() == pytest.approx(5.0)
    assert gradient_norm([torch.nn.Parameter(torch.zeros(1))]).item() == 0.0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_bf16_parameters_are_updated_from_fp32_state(rule, sparse_gradient):
    table = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(4, 3))
    optimizers = [RowOptimizer([p], rule, lr=0.01) for p in (table, wide)]
    for _ in range(300):  # beyond 256, where a count in bf16 would stand still
        grad = torch.full((4, 3), 0.25)
        for parameter in (table, wide):
            values = grad.to(parameter.dtype)
            if sparse_gradient:
                sparse(parameter, [0, 1, 2, 3], values)
            else:
                parameter.grad = values
        for optimizer in optimizers:
            optimizer.step()
    for name, state in optimizers[0].state[table].items():
        assert state.dtype == torch.float32
        torch.testing.assert_close(state, optimizers[1].state[wide][name])
    assert (table < 1).all()


def test_parameters_may_join_later():
    first, second = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = RowOptimizer([first], "adagrad", lr=0.5)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    second.grad = torch.ones(2, 3)
    optimizer.step()
    torch.testing.assert_close(second.detach(), torch.full((2, 3), 0.75))
    with pytest.raises(ValueError, match=r"learning rate is -1.0, it must not be negative"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": -1.0})
