import copy
import pickle

import pytest
import torch

from dlrm.kernels.lookup.source import row_gradient
from dlrm.kernels.update.rounding import round_stochastic
from dlrm.optim import RULES, RowOptimizer, Schedule, gradient_norm

TORCH = {  # rule, options as of both, torch's class
    "sgd": ("sgd", {}, torch.optim.SGD),
    "momentum": ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD),
    "adagrad": ("adagrad", {"eps": 1e-8, "weight_decay": 0.1}, torch.optim.Adagrad),
    "adam": ("adam", {"betas": (0.8, 0.9), "weight_decay": 0.1}, torch.optim.Adam),
    "adamw": ("adamw", {"weight_decay": 0.3}, torch.optim.AdamW),
    "rmsprop": ("rmsprop", {"alpha": 0.9}, torch.optim.RMSprop),
    "rmsprop_momentum": ("rmsprop", {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.RMSprop),
    "adamax": ("adamax", {}, torch.optim.Adamax),
    "adadelta": ("adadelta", {"rho": 0.8}, torch.optim.Adadelta),
}


def sparse(parameter, rows, values):
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, parameter.shape)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_rules_equal_torch(name, gradient):
    rule, options, reference = TORCH[name]
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    optimizer = RowOptimizer([ours], rule, lr=0.1, **options)
    other = reference([theirs], lr=0.1, **options)
    for _ in range(8):
        rows, values = [3, 0, 1, 1, 4, 2, 0], torch.randn(7, 3)  # every row in every step
        theirs.grad = torch.zeros(5, 3).index_add_(0, torch.tensor(rows), values)
        if gradient == "sparse":
            sparse(ours, rows, values)
        else:
            ours.grad = theirs.grad.clone()
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("shapes", "dtype", "rtol"),
    [([(), (3,), (2, 3, 4)], torch.float32, 1.3e-6), ([(5, 3)], torch.float64, 1e-12)],
)
def test_parameters_of_any_shape_and_precision_equal_torch(shapes, dtype, rtol):
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes] for _ in range(2)
    )
    options = {"lr": 0.125, "weight_decay": 0.3}
    optimizers = RowOptimizer(ours, "adamw", **options), torch.optim.AdamW(theirs, **options)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-5 if rtol > 1e-9 else 0)


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


def test_rows_are_reset_alone():
    table = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = RowOptimizer([table], "adagrad")
    sparse(table, [0, 2], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer.step()
    optimizer.reset_rows(table, torch.tensor([2]))
    assert optimizer.state[table]["sum"].tolist() == [[1, 4], [0, 0], [0, 0]]


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


@pytest.mark.parametrize("triton", [False, True])
def test_saved_state_continues_the_stochastic_rounding(device, monkeypatch, triton):
    """It draws from the seed of the parameter group, and nothing from PyTorch's generator."""
    triton = triton or device.type == "cuda"
    monkeypatch.setattr("dlrm.kernels.update.sparse.use_triton", lambda *_: triton)
    before = torch.get_rng_state()

    def make(weight):
        table = torch.nn.Parameter(weight.clone())
        return table, RowOptimizer([table], "sgd", lr=1 / 1024)  # an eighth of a spacing

    def step(table, optimizer):
        values = torch.full_like(table, -1.0)
        rows = torch.arange(len(table), device=device)
        table.grad = row_gradient(table, rows, values, sparse=True)
        optimizer.step()

    table, optimizer = make(torch.ones(16, 8, dtype=torch.bfloat16, device=device))
    for _ in range(2):
        step(table, optimizer)
    other, restored = make(table.detach())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert restored.param_groups[0]["seed"] == 2
    for each in ((table, optimizer), (other, restored)):
        step(*each)
    assert torch.equal(table, other)
    assert torch.equal(torch.get_rng_state(), before)

    optimizer.zero_grad()
    optimizer.step()  # moves on without a gradient too
    assert optimizer.param_groups[0]["seed"] == 4


def test_foreign_state_is_refused():
    table = torch.nn.Parameter(torch.ones(4, 2))
    state = RowOptimizer([table], "sgd").state_dict()
    with pytest.raises(ValueError, match="the saved optimizer is sgd, this is adam"):
        RowOptimizer([table], "adam").load_state_dict(state)
    with pytest.raises(ValueError, match="the saved optimizer has other parameters"):
        RowOptimizer([table, torch.nn.Parameter(torch.ones(1))], "sgd").load_state_dict(state)
    with pytest.raises(ValueError, match="the saved sgd keeps nothing, this one momentum"):
        RowOptimizer([table], "sgd", momentum=0.9).load_state_dict(state)
    state = torch.optim.Adam([table]).state_dict()
    with pytest.raises(ValueError, match=r"the saved optimizer is one of torch\.optim, this is"):
        RowOptimizer([table], "adam").load_state_dict(state)
    state = RowOptimizer([torch.nn.Parameter(torch.ones(1, 2))], "adagrad").state_dict()
    with pytest.raises(ValueError, match=r"saved sum has shape \(1, 2\), this .* \(4, 2\)"):
        RowOptimizer([table], "adagrad").load_state_dict(state)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copied_optimizer_goes_on_with_the_copied_parameter(again):
    table = torch.nn.Parameter(torch.randn(4, 2))
    optimizer = RowOptimizer([table], "adam", lr=0.1, stochastic=False)
    table.grad = torch.randn(4, 2)
    optimizer.step()
    twin, of_twin = again((table, optimizer))
    twin.grad = table.grad.clone()
    for each in (optimizer, of_twin):
        each.step()
    assert torch.equal(twin, table)
    assert twin is not table


@pytest.mark.parametrize(
    ("rule", "options", "told"),
    [
        ("adagrd", {}, "did you mean 'adagrad'"),
        ("sgd", {"lr": -1}, "learning rate is -1"),
        ("sgd", {"lr": float("nan")}, "the learning rate is nan"),
        ("sgd", {"betas": (0.9, 0.9)}, "sgd has no use for betas; its options are momentum, w"),
        ("rmsprop", {"alpha": 1.0}, r"alpha is 1.0, it must be in \[0, 1\)"),
        ("sgd", {"momentum": 2}, r"momentum is 2, it must be in \[0, 1\)"),
    ],
)
def test_bad_arguments(rule, options, told):
    with pytest.raises(ValueError, match=told):
        RowOptimizer([torch.nn.Parameter(torch.ones(4, 2))], rule, **options)


def test_schedule_warms_up_holds_and_decays():
    optimizer = RowOptimizer([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = Schedule([optimizer], warmup=4, decay_start=6, decay_steps=4, power=2)
    rates = []
    for step in range(12):
        schedule.set(step)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    expected = [0.5, 1, 1.5, 2, 2, 2, 2, 2 * 0.75**2, 0.5, 2 * 0.25**2, 0, 0]
    assert rates == pytest.approx(expected)


def test_schedule_sets_rates_that_change():
    """Setting one takes a launch, which at a small batch takes as long as some of a step."""
    optimizer = RowOptimizer([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    schedule, rate = Schedule([optimizer], warmup=2), optimizer.param_groups[0]["lr"]
    versions = []
    for step in range(5):
        schedule.set(step)
        versions.append(rate._version)
    schedule.fine_tune = 0.5
    schedule.set(5)
    assert float(rate) == 1.0
    assert versions[0] < versions[1] == versions[4] < rate._version


@pytest.mark.parametrize("make", [RowOptimizer, torch.optim.SGD, torch.optim.Adam])
def test_schedule_takes_rates_that_are_numbers(make):
    """As optimizers of torch have them, and whoever sets a rate by hand."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = make([weight], lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    Schedule([optimizer], warmup=4).set(1)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(0.75)


def test_gradient_norm_merges_duplicates():
    table, weight = torch.nn.Parameter(torch.zeros(3, 1)), torch.nn.Parameter(torch.zeros(1))
    sparse(table, [1, 1], torch.tensor([[1.0], [2.0]]))
    weight.grad = torch.tensor([4.0])
    assert gradient_norm([table, weight]).item() == pytest.approx(5.0)
    assert gradient_norm([torch.nn.Parameter(torch.zeros(1))]).item() == 0.0
    rows, values = torch.tensor([1, -1, 1]), torch.tensor([[1.0], [torch.nan], [2.0]])
    table.grad = row_gradient(table, rows, values, sparse=True)  # one entry has no row
    assert gradient_norm([table]).item() == pytest.approx(3.0)


@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_gradient_norm_of_bf16_tables_is_in_fp32(sparse_gradient):
    table = torch.nn.Parameter(torch.zeros(1, 300, dtype=torch.bfloat16))
    values = torch.ones(300, 300).bfloat16()  # of one row, which sums to 300; bf16 ends at 256
    rows = torch.zeros(300, dtype=torch.long)
    table.grad = row_gradient(table, rows, values, sparse=True)
    if not sparse_gradient:
        table.grad = torch.full_like(table, 300)
    norm = gradient_norm([table])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(300 * 300**0.5)


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


def test_parameters_that_became_bf16_later():
    table = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = RowOptimizer([table], "sgd", lr=0.1)
    table.data = table.data.bfloat16()
    table.grad = torch.ones_like(table)
    with pytest.raises(ValueError, match="became bf16, int8 or int4 after their"):
        optimizer.step()


@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_bf16_parameters_move_on_average_by_steps_too_small_for_them(sparse_gradient):
    def train(**options):
        table = torch.nn.Parameter(torch.ones(64, 8, dtype=torch.bfloat16))
        optimizer = RowOptimizer([table], "sgd", lr=1 / 1024, **options)  # an eighth of a spacing
        for _ in range(16):
            values = torch.full((64, 8), -1.0, dtype=torch.bfloat16)
            table.grad = values
            if sparse_gradient:
                sparse(table, list(range(64)), values)
            optimizer.step()
        return table.detach().double()

    assert (train(stochastic=False) == 1).all()
    assert train().mean().item() == pytest.approx(1 + 16 / 1024, abs=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_every_update_is_rounded_anew_on_a_device_beside_the_first(sparse_gradient, device):
    here = torch.nn.Parameter(torch.ones(2, 8))
    there = torch.nn.Parameter(torch.ones(64, 8, dtype=torch.bfloat16, device=device))
    optimizer = RowOptimizer([here, there], "sgd", lr=1 / 1024)  # an eighth of a spacing
    for _ in range(16):
        there.grad = torch.full_like(there, -1.0)
        if sparse_gradient:
            rows = torch.arange(64, device=device)
            there.grad = row_gradient(there, rows, there.grad, sparse=True)
        optimizer.step()
    # With the same chances in every step an eighth of the weights would move by 16 spacings.
    assert there.detach().double().mean().item() == pytest.approx(1 + 16 / 1024, abs=2e-3)
    assert there.max() < 1 + 12 / 128


def test_no_nan_is_rounded_away():
    values = torch.tensor([2**31 - 1, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert round_stochastic(values).isnan().all()


def test_parameters_may_join_later():
    first, second = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = RowOptimizer([first], "adagrad", lr=0.5)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    second.grad = torch.ones(2, 3)
    optimizer.step()
    torch.testing.assert_close(second.detach(), torch.full((2, 3), 0.75))
    with pytest.raises(ValueError, match=r"learning rate is -1.0, it must be finite"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": -1.0})


def test_a_closure_gives_gradients_and_loss():
    table = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RowOptimizer([table], "sgd", lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = table.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert table.tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize("gradient", ["dense", "sparse"])
def test_a_rate_may_be_set_by_hand(gradient):
    table = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RowOptimizer([table], "sgd", lr=0.5)
    for rate, left in ((0.25, 0.75), (0.5, 0.25)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        sparse(table, [0, 1], torch.ones(2, 3))
        if gradient == "dense":
            table.grad = table.grad.to_dense()
        optimizer.step()
        assert table.tolist() == [[left] * 3] * 2
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert float(optimizer.param_groups[0]["lr"]) == 0.125


def test_a_group_may_be_empty():
    table = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RowOptimizer([{"params": []}, {"params": [table]}], "sgd", lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    table.grad = torch.ones(2, 3)
    optimizer.step()
    assert table.tolist() == [[0.5] * 3] * 2


def test_a_group_may_have_a_rule_of_its_own():
    ours, theirs = ([torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)] for _ in range(2))
    optimizer = RowOptimizer([{"params": ours[0], "rule": "adam"}, {"params": ours[1]}], "sgd")
    others = torch.optim.Adam(theirs[:1], lr=0.01), torch.optim.SGD(theirs[1:], lr=0.01)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(2, 3)
            other.grad = one.grad.clone()
        for each in (optimizer, *others):
            each.step()
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="unknown optimizer 'adma', did you mean"):
        RowOptimizer([{"params": ours[0], "rule": "adma"}], "sgd")


@pytest.mark.parametrize("again", [lambda optimizer: optimizer, copy.deepcopy])
def test_a_group_with_a_rule_of_its_own_has_the_defaults_of_that(again):
    first, *others = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    optimizer = again(RowOptimizer([first], "rmsprop", eps=0.1))
    for parameter, own in zip(
        others, ({}, {"rule": "adamw"}, {"rule": "adadelta", "eps": 1}), strict=True
    ):
        optimizer.add_param_group({"params": [parameter], **own})
    found = [(group["weight_decay"], group["eps"]) for group in optimizer.param_groups]
    assert found == [(0, 0.1), (0, 0.1), (0.01, 0.1), (0, 1)]


def test_a_schedule_of_torch_resumes():
    """What it keeps in the groups, and options that it moves, are saved and loaded."""

    def make():
        return RowOptimizer([torch.nn.Parameter(torch.ones(2, 3))], "adam", betas=(0.8, 0.99))

    def schedule(optimizer, last=-1):
        rates = {"max_lr": 0.1, "total_steps": 9}
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, last_epoch=last, **rates)

    first, again = make(), make()
    steps = schedule(first)
    for _ in range(3):
        first.step()
        steps.step()
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    options, restored = first.param_groups[0], again.param_groups[0]
    for name in ("lr", "betas", "initial_lr", "max_lr"):
        assert restored[name] == options[name], name
    assert restored["betas"][0] != 0.8
    schedule(again, 2)
    assert restored["lr"] == options["lr"]


@pytest.mark.parametrize("gradient", ["dense", "sparse"])
@pytest.mark.parametrize(("made", "now"), [(0.0, 0.9), (0.9, 0.0)])
def test_momentum_that_comes_or_goes_later(gradient, made, now):
    """As OneCycleLR moves that of sgd: what it keeps was made, or not, with the optimizer."""
    table = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = RowOptimizer([table], "sgd", momentum=made)
    optimizer.param_groups[0]["momentum"] = now
    sparse(table, [0, 1], torch.ones(2, 3))
    if gradient == "dense":
        table.grad = table.grad.to_dense()
    with pytest.raises(ValueError, match=f"momentum became {now} after .* cycle_momentum=False"):
        optimizer.step()
