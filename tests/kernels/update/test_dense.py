"""The update of many parameters at once against plain PyTorch and torch.optim."""

import pytest
import torch

from dlrm.kernels.update import dense
from dlrm.kernels.update.dense import update_dense
from dlrm.kernels.update.rules import RULES, make_rule
from dlrm.optim import RowOptimizer
from tests.kit import GPU, RULE_OPTIONS, first

SHAPES = [(5, 3), (7,), (1, 2500), (), (3, 2, 4), (0, 4), *([(30,)] if GPU else [])]


def make(rule, device, shapes=SHAPES, dtype=torch.float32, **options):
    parameters = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    optimizer = RowOptimizer([p.requires_grad_() for p in parameters], rule, lr=0.1, **options)
    return parameters, [list(optimizer.state[p].values()) for p in parameters]


def run(rule, parameters, states, grads, impl):
    """All tensors after steps with these gradients, by name."""
    parameters = [parameter.detach().clone() for parameter in parameters]
    states = [[tensor.clone() for tensor in state] for state in states]
    lr = torch.tensor(0.1, device=parameters[0].device)
    for grad in grads:
        update_dense(rule, parameters, grad, states, lr=lr, impl=impl)
    moved = {f"parameter {i}": parameter for i, parameter in enumerate(parameters)}
    names = list(rule.states)
    for i, own in enumerate(states):
        moved |= {f"{names[j]} of parameter {i}": state for j, state in enumerate(own)}
    return moved


def check(assert_close, rule, parameters, states, grads):
    """The kernels' steps equal PyTorch's, and every parameter moves."""
    found = run(rule, parameters, states, grads, "triton")
    expected = run(rule, parameters, states, grads, "torch")
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert_close(tensor, expected[name], name, factor=2)  # of decay and gradient
    for i, parameter in enumerate(parameters):
        assert not parameter.numel() or not torch.equal(found[f"parameter {i}"], parameter), i
    return found


@pytest.mark.parametrize(("rule", "options"), RULE_OPTIONS.values(), ids=RULE_OPTIONS)
def test_every_parameter_and_state_equal_pytorch(rule, options, device, assert_close):
    parameters, states = make(rule, device, **options)
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(3 if GPU else 2)]
    check(assert_close, make_rule(rule, **options), parameters, states, grads)


@first("rule", ["rowwise_adagrad", *(name for name in RULES if name != "rowwise_adagrad")])
def test_runs_are_equal(rule, device):
    """Also where several warps have a part each of a row, of which the rule keeps one number."""
    many = 20 if GPU else 1
    shapes = [(12, 384), (40,), (4, 300), (6, 7), (), (3, 512)] if GPU else [(2, 384), (3, 7), ()]
    shapes = [(shape[0] * many, *shape[1:]) if len(shape) > 1 else shape for shape in shapes]
    parameters, states = make(rule, device, shapes)
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(2)]
    first, *others = (
        run(make_rule(rule), parameters, states, grads, "triton") for _ in range(1 + 2 * many)
    )
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_more_parameters_than_one_launch_takes(rule, device, monkeypatch, assert_close):
    monkeypatch.setattr(dense, "TENSORS", 2)
    parameters, states = make(rule, device, [(2, 3)] * 5)
    grads = [[torch.randn_like(p) for p in parameters]]
    check(assert_close, make_rule(rule), parameters, states, grads)


FUSED = [own for own in RULE_OPTIONS.values() if own[0] in ("sgd", "adagrad", "adam", "adamw")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "options"), FUSED)
def test_fused_on_a_cpu(rule, options, dtype, assert_close, monkeypatch):
    shapes = [(5, 3), (7,), (40, 1100), (), (3, 2, 4)]
    parameters, states = make(rule, "cpu", shapes, dtype, **options)
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(3)]
    grads[1][0] = torch.randn(3, 5, dtype=dtype).t()
    rule = make_rule(rule, **options)
    expected = run(rule, parameters, states, grads, "torch")
    monkeypatch.setattr(dense, "update_dense_torch", None)
    for name, tensor in run(rule, parameters, states, grads, None).items():
        assert_close(tensor, expected[name], name)


def test_rows_at_other_steps_on_a_cpu():
    """As after sparse gradients, or a reset of some rows."""
    parameters, states = make("adam", "cpu", [(4, 3)])
    states[0][2][1] = 7
    grads = [[torch.randn_like(parameters[0])] for _ in range(2)]
    found, expected = (
        run(make_rule("adam"), parameters, states, grads, i) for i in (None, "torch")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert found["steps of parameter 0"].flatten().tolist() == [2, 9, 2, 2]


@pytest.mark.parametrize("turned", ["parameter", "gradient"])
@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
def test_one_may_be_transposed(rule, turned, device, assert_close):
    _, states = make(rule, device, [(4, 6)])
    both = torch.randn(4, 6, device=device), torch.randn(6, 4, device=device).t()
    parameters, grads = ([own] for own in (both if turned == "gradient" else both[::-1]))
    contiguous = [parameters[0].clone(memory_format=torch.contiguous_format)]
    lr = torch.tensor(0.1, device=device)
    expected = run(make_rule(rule), contiguous, states, [grads], "torch")["parameter 0"]
    update_dense(rule, parameters, grads, states, lr=lr, impl="triton")
    assert_close(parameters[0], expected)


@pytest.mark.gpu  # the interpreter knows no bfloat16
def test_bf16_is_rounded_stochastically(device):
    parameters, states = make("sgd", device, [(300, 300)], torch.bfloat16)
    before = parameters[0].detach().float()
    seed, lr = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(1.0, device=device)
    grads = [torch.full_like(parameters[0], 1e-3)]
    for _ in range(20):
        update_dense("sgd", parameters, grads, states, lr=lr, seed=seed, impl="triton")
        seed += 1
    # To nearest, most would not move at all.
    torch.testing.assert_close(
        (before - parameters[0].float()).mean().item(), 0.02, atol=2e-4, rtol=0
    )


@pytest.mark.gpu  # the interpreter multiplies the bits of bfloat16 as integers
@pytest.mark.parametrize("rule", RULES)
def test_bf16_and_fp32_together(rule, device, assert_close):
    parameters, states = make(rule, device, [(5, 300)])
    narrow, narrow_states = make(rule, device, [(40, 8)], torch.bfloat16)
    parameters, states = parameters + narrow, states + narrow_states
    grads = [[torch.randn_like(p) for p in parameters] for _ in range(3)]
    check(assert_close, make_rule(rule), parameters, states, grads)


def test_errors_name_what_is_missing(device):
    parameters, states = make("adagrad", device, [(2, 2), (3,)])
    lr = torch.tensor(0.1, device=device)
    with pytest.raises(ValueError, match="did you mean 'adagrad'"):
        update_dense("adagrat", parameters, parameters, states, lr=lr)
    with pytest.raises(ValueError, match="2 parameters, 1 gradients, 2 states: give one"):
        update_dense("adagrad", parameters, parameters[:1], states, lr=lr)
    with pytest.raises(
        ValueError, match=r"has a gradient \(1,\) and 1 states; adagrad needs one of"
    ):
        update_dense("adagrad", parameters, [torch.zeros(1)] * 2, states, lr=lr)
    with pytest.raises(ValueError, match=r"and 0 states; adagrad needs one of its shape and 1"):
        update_dense("adagrad", parameters, parameters, [[], []], lr=lr)
