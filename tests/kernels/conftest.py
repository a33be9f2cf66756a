"""What the tests of the kernels share: one table of tolerances, and one way to compare."""

import pytest
import torch

GPU = torch.cuda.is_available()

TOLERANCE = {  # relative RMS error of an output or a gradient, for each type it is stored in
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 8e-3,
}


def relative_rms(found, expected):
    """The error of ``found`` relative to ``expected``, in float64."""
    found, expected = dense(found).double(), dense(expected).double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def dense(tensor):
    """A gradient as a dense tensor, equal rows summed in float64; entries below 0 are none."""
    if not tensor.is_sparse:
        return tensor
    sums = torch.zeros(tensor.shape, dtype=torch.float64, device=tensor.device)
    rows, values = tensor._indices()[0], tensor._values().double()
    return sums.index_add_(0, rows[rows >= 0], values[rows >= 0])


@pytest.fixture
def assert_close():
    """``assert_close(found, expected, name="output", *, dtype=None, factor=1)``.

    The tolerance is that of the type of ``found``, or of ``dtype``, times ``factor``.
    """

    def check(found, expected, name="output", *, dtype=None, factor=1):
        assert found.shape == expected.shape, name
        error, limit = relative_rms(found, expected), factor * TOLERANCE[dtype or found.dtype]
        assert error < limit, f"{name}: relative error {error:.2e}, at most {limit:.2e} allowed"

    return check


@pytest.fixture
def assert_matches(assert_close):
    """``assert_matches(op, reference, inputs, *, grad=None, factors={})``.

    Compares the output of ``op(**inputs)`` and its gradient for every input that requires one, by
    name, with those of ``reference`` on the same inputs in float64. ``grad`` makes the gradient
    that arrives, given the output; ``factors`` widens the tolerance of single names. Returns the
    output and the gradients by name.
    """

    def check(op, reference, inputs, *, grad=torch.randn_like, factors=None):
        factors = factors or {}
        exact = {
            name: x.detach().double().requires_grad_(x.requires_grad) for name, x in inputs.items()
        }
        out, expected = op(**inputs), reference(**exact)
        assert_close(out, expected, factor=factors.get("output", 1))
        wanted = [name for name, x in inputs.items() if x.requires_grad]
        arrived = grad(out)
        found = torch.autograd.grad(out, [inputs[name] for name in wanted], arrived)
        true = torch.autograd.grad(expected, [exact[name] for name in wanted], arrived.double())
        for name, mine, other in zip(wanted, found, true, strict=True):
            assert mine.dtype == inputs[name].dtype, name
            dtype = max(mine.dtype, out.dtype, key=TOLERANCE.__getitem__)
            assert_close(mine, other, name, dtype=dtype, factor=factors.get(name, 1))
        return out, dict(zip(wanted, found, strict=True))

    return check


@pytest.fixture(autouse=True)
def _small_programs(request, monkeypatch):
    """Without a GPU, the constants by module in ``SMALL`` of the file of a test: in Triton's
    interpreter, which runs programs in turn, there are several small ones.
    """
    for module, constants in getattr(request.module, "SMALL", {}).items() if not GPU else ():
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def nan_in_new_memory():
    """``torch.empty`` gives NaN (and the largest integer), so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
