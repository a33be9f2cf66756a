import copy
import warnings
from dataclasses import replace

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.kernels.loss import mean_loss
from dlrm.model import DLRM
from dlrm.optim import RULES
from dlrm.training import modes
from dlrm.training.modes import seed_dropout
from dlrm.training.step import TrainStep
from tests.kit import optimizers_of

SIZES = [50, 3000, 400]
PLANS = {
    "dense": [("dense", {})] * 3,
    "tt": [("dense", {}), ("tt", {"rank": 4}), ("dense", {})],
    "tt alone": [("tt", {"rank": 4})] * 3,  # no row gradient to be sorted
    "tt exact": [("dense", {}), *[("tt", {"rank": 4, "keep": own}) for own in (300, 30)]],
    "tt cached": [("dense", {}), *[("tt", {"rank": 4, "keep": 9, "cache_rows": 20})] * 2],
    "mixed": [("hash", {"rows": 20}), ("qr", {"collisions": 9}), ("block", {"dim": 2})],
    "zeros": [
        ("drop", {"keep": 20, "shared": False}),
        ("short", {"dim": 2, "keep": 600, "shared": False, "dtype": "int8"}),
        ("drop", {"keep": 90, "shared": False, "dtype": "int8"}),
    ],
}


def batches(count, size, device, dense=4):
    for _ in range(count):
        ids = torch.stack([torch.randint(0, rows, (size,)) for rows in SIZES])
        batch = Batch(torch.randn(dense, size), ids, (torch.rand(size) < 0.3).float())
        yield batch.to(device)


def make(plan, rule="adagrad", device="cpu", width=16, dropout=0.0, **options):
    torch.manual_seed(0)
    shape = {"bottom_mlp": [width, 16], "top_mlp": [width], "dropout": dropout}
    model = DLRM(4, SIZES, 8, PLANS[plan], **shape).to(device)
    # The first steps of RMSprop are as long where the gradient is next to nothing, and noise.
    lr = 0.002 if rule == "rmsprop" else 0.05
    return model, TrainStep(model, optimizers_of(model, rule, lr=lr), **options)


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_the_loss_falls(plan):
    _, step = make(plan)
    batch = next(batches(1, 64, "cpu"))
    losses = [step(batch)["loss"].item() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("rule", ["sgd", "adam", "rowwise_adagrad"])
def test_rare_ids_have_zeros_that_do_not_learn(rule, device):
    model, step = make("zeros", rule, device=device)
    seen = list(batches(5, 256, device))
    for batch in seen:
        step(batch)
    ids = torch.cat([batch.ids for batch in seen], dim=1)
    plan, tables = PLANS["zeros"], model.sparse_arch.to_dense()
    for (_, options), own, dense in zip(plan, ids, tables, strict=True):
        assert not dense[options["keep"] :].any()
        learned = dense[own[own < options["keep"]].unique()].any(1)
        assert learned.float().mean() > 0.95  # in int8, a few small ones are rounded to zero


@pytest.mark.parametrize("plan", sorted(PLANS.keys() - {"zeros"}))  # they have gradients, too
def test_clipping_limits_the_update_and_keeps_its_direction(plan):
    def moves(clip_norm):
        model, step = make(plan, "sgd", clip_norm=clip_norm)
        before = copy.deepcopy(model)
        torch.manual_seed(1)
        out = step(next(batches(1, 32, "cpu")))
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        return torch.cat([(a - b).flatten() for a, b in pairs]), out

    free, out = moves(1e9)
    norm = torch.hypot(out["gradient_norm/dense"], out["gradient_norm/embeddings"])
    torch.testing.assert_close(free.norm(), 0.05 * norm)
    limited, _ = moves(0.01)
    torch.testing.assert_close(limited, free * (0.01 / norm), rtol=1e-3, atol=1e-7)


def test_bf16_autocast_stays_near_fp32():
    results = []
    for precision in ("fp32", "bf16"):
        _, step = make("dense", precision=precision)
        torch.manual_seed(1)
        results.append([step(batch)["loss"].item() for batch in batches(10, 64, "cpu")])
    assert results[0] != results[1]
    assert results[0] == pytest.approx(results[1], abs=0.02)


def test_unknown_modes_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'graph'"):
        make("dense", mode="graphs")
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        make("dense", precision="b16")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU"):
            make("dense", mode="graph")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_is_hashed_ahead_if_steps_need_it(device, monkeypatch):
    done = []
    monkeypatch.setattr(modes, "hash_triton", lambda: done.append("triton"))
    modes.hash_ahead(torch.device(device)).join()
    assert ("triton" in done) == (device == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["mixed", "tt", "tt exact"])
@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_trains_as_a_cpu_does(plan, rule):
    """fp32, to 1e-4; layers so wide that several warps update a row of theirs."""
    losses = {}
    for device in ("cpu", "cuda"):
        _, step = make(plan, rule, device, width=400, mode="eager")
        torch.manual_seed(1)
        losses[device] = [step(b)["loss"].item() for b in batches(6, 256, device)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("rule", RULES)
def test_captured_losses_equal_eager(plan, rule):
    """fp32, 40 steps with short batches between: equal to 1e-4, the rounding of fused sums."""
    results = {}
    for mode in ("eager", "graph"):
        _, step = make(plan, rule, "cuda", mode=mode)
        torch.manual_seed(1)
        losses = []
        for index in range(8):
            norms = index % 2 == 1
            losses += [step(b, norms=norms)["loss"].item() for b in batches(4, 256, "cuda")]
            losses += [step(b)["loss"].item() for b in batches(1, 100 + index, "cuda")]
        results[mode] = losses
    assert results["graph"] == pytest.approx(results["eager"], abs=1e-4)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.gpu)])
def test_the_mean_loss_is_of_the_steps_since_it_was_taken(mode, device):
    """Captured or not, with norms or not, and of short batches too."""
    _, step = make("mixed", "adagrad", device, mode=mode)
    for _ in range(4):
        losses = []
        for index in range(6):
            given = next(batches(1, 100 if index == 3 else 256, device))
            losses.append(step(given, norms=index % 2 == 1)["loss"].item())
        assert float(step.losses.take()) == pytest.approx(sum(losses) / 6, rel=1e-12)
    step(next(batches(1, 256, device)))
    total, count = step.losses.state()
    step.losses.take()
    step.losses.load((2 * total, 2 * count))
    assert float(step.losses.take()) == total


@pytest.mark.gpu
def test_a_closed_step_captures_anew():
    given = list(batches(9, 64, "cuda"))
    found = []
    for closes in (False, True):
        _, step = make("dense", "sgd", "cuda", mode="graph")
        losses = [step(batch)["loss"].item() for batch in given[:5]]
        if closes:
            step.graphs.close()
        found.append(losses + [step(batch)["loss"].item() for batch in given[5:]])
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.usefixtures("_determinism_ends")
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_seeds_give_equal_bits(plan, precision, device):
    runs = []
    for _ in range(2):
        model, step = make(plan, device=device, precision=precision, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        torch.manual_seed(1)
        size = 4096 if step.mode == "graph" else 64
        losses = [step(batch)["loss"].item() for batch in batches(8, size, device)]
        runs.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    (losses, parameters), (again, same) = runs
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))


@pytest.mark.gpu
def test_a_captured_step_follows_the_learning_rate():
    model, step = make("dense", "sgd", "cuda", mode="graph")
    for batch in batches(6, 64, "cuda"):
        step(batch)
    for optimizer in step.optimizers:
        for group in optimizer.param_groups:
            group["lr"].fill_(0.0)
    before = copy.deepcopy(model.state_dict())
    for batch in batches(2, 64, "cuda"):
        step(batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def weighted(count, size, device):
    for batch in batches(count, size, device):
        weights = torch.randint(0, 4, (size,)).float().to(device)
        yield replace(batch, weights=weights)


def test_a_weight_counts_a_sample_so_many_times():
    """The loss is the sum over all, divided by the number of samples, not of repetitions."""
    (batch,) = weighted(1, 50, "cpu")
    times = batch.weights.long()
    repeated = Batch(
        batch.dense.repeat_interleave(times, 1),
        batch.ids.repeat_interleave(times, 1),
        batch.labels.repeat_interleave(times),
    )
    model, step = make("dense", "sgd")
    other, step_of_other = make("dense", "sgd")
    for optimizer in step_of_other.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= repeated.size / batch.size
    loss = step(batch)["loss"] * batch.size / repeated.size
    torch.testing.assert_close(loss, step_of_other(repeated)["loss"])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_the_loss_of_chosen_or_weighted_samples_is_least_at_the_odds_of_all_rows():
    labels = torch.tensor([1.0] * 30 + [0.0] * 70)
    kept = torch.tensor([1.0] * 30 + [0.0] * 7)
    weights = torch.where(labels == 1, 8.0, 0.5)
    best = torch.tensor(3 / 7).log().requires_grad_()
    for sample, weight, odds in ((labels, None, 1.0), (kept, None, 10.0), (labels, weights, 16.0)):
        mean_loss(best.expand(len(sample)), sample, weight, odds).backward()
        assert best.grad.abs() < 1e-5


@pytest.mark.gpu
def test_captured_losses_of_weighted_samples_equal_eager():
    results = {}
    for mode in ("eager", "graph"):
        _, step = make("dense", "adagrad", "cuda", mode=mode)
        torch.manual_seed(1)
        losses = [step(batch)["loss"].item() for batch in weighted(12, 256, "cuda")]
        results[mode] = losses
        assert mode != "graph" or step.graphs.count
    assert results["graph"] == pytest.approx(results["eager"], abs=1e-4)


@pytest.mark.gpu
def test_each_step_drops_the_same_in_every_mode_and_after_a_resume():
    """Also the short last batches of three epochs, of which the resumed run sees two."""
    epochs = [batch for _ in range(3) for n, size in ((5, 256), (1, 40))
              for batch in batches(n, size, "cuda")]  # fmt: skip
    given = [*epochs, *batches(2, 256, "cuda")]
    results = {}
    for name, mode, until in (
        ("eager", "eager", 0),
        ("graph", "graph", 0),
        ("resumed", "graph", 8),
    ):
        model, step = make("dense", "sgd", "cuda", mode=mode, dropout=0.4, deterministic=True)
        losses = []
        for number, batch in enumerate(given):
            if number == until > 0:
                state = copy.deepcopy(model.state_dict())
                step.graphs.close()
                model, step = make("dense", "sgd", "cuda", mode=mode, dropout=0.4)
                model.load_state_dict(state)
            seed_dropout(0, number, 0)
            losses.append(step(batch)["loss"].item())
        results[name] = losses
    assert results["graph"] == pytest.approx(results["eager"], abs=1e-5)
    assert results["resumed"] == results["graph"]
    seed_dropout(0, 1, 0)
    dropped = torch.nn.functional.dropout(torch.ones(99, device="cuda"))
    seed_dropout(0, 1, 1)
    assert not torch.equal(dropped, torch.nn.functional.dropout(torch.ones(99, device="cuda")))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("plan", ["mixed", "tt"])
def test_steps_on_the_tensors_of_a_graph_equal_others(plan, fails, recorded_on_a_cpu):
    """Equal bits; also if every capture fails, which is tried once and warned of once."""
    losses = []
    for graph in (False, True):
        _, step = make(plan)
        reruns = recorded_on_a_cpu(step, fails=fails) if graph else None
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = []
            for index in range(9):
                size = 20 if index == 5 else 64
                (batch,) = batches(1, size, "cpu")
                found.append(step(batch, norms=index == 7)["loss"].item())
        losses.append((found, float(step.losses.take())))
    assert losses[0] == losses[1]
    assert reruns.attempts == 1
    assert step.graphs.count == (0 if fails else 1)
    assert len(warned) == fails
    told = "a step for 64 samples can't be captured as a CUDA graph (RuntimeError: operation not"
    assert all(str(warning.message).startswith(told) for warning in warned)


@pytest.mark.gpu
@pytest.mark.parametrize("reason", ["backward", "forked", "capturing"])
def test_a_failed_capture_costs_nothing_but_speed(reason):
    """Whatever ends it: no loss changes, no memory is kept, and random numbers can be drawn."""

    def interrupt(*_):
        if torch.cuda.is_current_stream_capturing():
            if reason == "capturing":
                torch.ones(1, device="cuda").item()
            else:
                raise ArithmeticError(reason)

    losses = []
    for mode in ("eager", "graph"):
        model, step = make("mixed", device="cuda", mode=mode)
        if reason in ("backward", "capturing"):
            model.top_mlp[0].weight.register_hook(interrupt)
        else:
            model.sparse_arch.register_forward_pre_hook(interrupt)
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            losses.append([step(batch)["loss"].item() for batch in batches(12, 256, "cuda")])
    messages = [str(warning.message) for warning in warned]
    (told,) = [message for message in messages if "captured as a CUDA graph" in message]
    assert reason in told
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)

    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")
    other, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    for _ in range(20):  # while a capture is under way, memory of two streams is not freed
        torch.empty(1 << 24, device="cuda").record_stream(other)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < before + 3 * (1 << 26)
    _, step = make("mixed", device="cuda", mode="graph")
    assert all(step(batch)["loss"].isfinite() for batch in batches(6, 256, "cuda"))
    assert step.graphs.count == 1  # others are captured as ever
