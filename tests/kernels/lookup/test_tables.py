"""Look-ups against ``torch.nn.functional`` in float64, outputs and gradients."""

import pytest
import torch
from torch.nn import functional

from dlrm.kernels.lookup import pool as bags
from dlrm.kernels.lookup import tables as kernel
from dlrm.kernels.lookup.pool import MODES, lookup_bags
from dlrm.kernels.lookup.tables import RowContext, TableRows, lookup, lookup_tables
from dlrm.kernels.update.in_backward import FusedUpdate, FusedUpdates
from dlrm.kernels.update.rules import make_rule
from dlrm.kernels.update.sparse import update_rows_torch
from dlrm.utils.bags import Bags

GPU = torch.cuda.is_available()
SMALL = {kernel: {"TILE": 64}, bags: {"TILE": 16}}
SCALE = 400 if GPU else 1
SIZES = [3, 1, 20 * SCALE, 7 * SCALE]
pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


def tables(dim, device, dtype=torch.float32):
    weight = torch.randn(sum(SIZES), dim, device=device, dtype=dtype).requires_grad_()
    starts = torch.tensor([0, *SIZES[:-1]], device=device).cumsum(0)
    return weight, starts


def ids_of(batch, device):
    """Uniform ids, with the first and the last row of every table among them."""
    ids = torch.stack([torch.randint(size, (batch,), device=device) for size in SIZES])
    ids[:, 0] = 0
    ids[:, -1] = torch.tensor(SIZES, device=device) - 1
    return ids


def bags_of(batch, device):
    """Ids of bags of 0 to 4 ids, the first bag and the last empty, and their offsets."""
    lengths = torch.randint(5, (len(SIZES), batch), device=device)
    lengths[0, 0] = lengths[-1, -1] = 0
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=device)
    offsets[1:] = lengths.flatten().cumsum(0)
    counts = lengths.sum(1).tolist()
    ids = [torch.randint(s, (n,), device=device) for s, n in zip(SIZES, counts, strict=True)]
    return torch.cat(ids), offsets


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "dim", "index", "sparse"),
    [
        (9, 16, torch.int32, True),
        (1, 4, torch.int64, True),
        (11, 5, torch.int64, False),
        (2, 100, torch.int32, True),
    ],
)
def test_one_id_per_table(device, assert_matches, impl, dtype, batch, dim, index, sparse):
    weight, starts = tables(dim, device, dtype)
    ids = ids_of(batch * (SCALE if batch > 1 else 1), device)
    rows = (ids + starts[:, None]).t()
    out, grads = assert_matches(
        lambda weight: lookup_tables(
            weight, TableRows(starts), ids.to(index), sparse=sparse, impl=impl
        ),
        lambda weight: weight[rows],
        {"weight": weight},
    )
    assert torch.equal(out, weight[rows])
    assert grads["weight"].is_sparse == sparse


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("share", ["divisor", "modulo", "last"])
def test_ids_that_share_rows(device, assert_matches, impl, index, share):
    weight, starts = tables(8, device)
    ids = 3 * ids_of(9 * SCALE, device)
    sizes = torch.tensor(SIZES, device=device)
    values, shared = {
        "divisor": (torch.full_like(sizes, 3), torch.Tensor.floor_divide),
        "modulo": (sizes, torch.remainder),
        "last": (sizes - 1, torch.minimum),
    }[share]
    local, number = shared(ids, values[:, None]), {share: values}
    rows = (local + starts[:, None]).t()
    out, _ = assert_matches(
        lambda weight: lookup_tables(weight, TableRows(starts, **number), ids.to(index), impl=impl),
        lambda weight: weight[rows],
        {"weight": weight},
    )
    assert torch.equal(out, weight[rows])


def test_gradient_is_one_entry_per_lookup_and_no_copy(device):
    weight, starts = tables(16, device)
    ids = ids_of(6, device)
    out = lookup_tables(weight, TableRows(starts), ids, impl="triton")
    grad = torch.randn_like(out)
    out.backward(grad)
    assert not weight.grad.is_coalesced()
    assert weight.grad._nnz() == ids.numel()
    assert weight.grad._indices().tolist() == [(ids + starts[:, None]).t().flatten().tolist()]
    assert weight.grad._values().data_ptr() == grad.data_ptr()


def test_gradient_of_a_slice_of_a_larger_buffer(device, assert_close):
    weight, starts = tables(8, device)
    ids = ids_of(6, device)
    out = lookup_tables(weight, TableRows(starts), ids, impl="triton")
    joint = torch.cat([out.new_zeros(6, 2, 8), out], dim=1)
    grad = torch.randn_like(joint)
    joint.backward(grad)
    exact = torch.zeros_like(weight)
    exact.index_add_(0, (ids + starts[:, None]).t().flatten(), grad[:, 2:].reshape(-1, 8))
    assert_close(weight.grad, exact, "weight")


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 2), (0,)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_any_shape(device, impl, shape, index):
    weight = torch.randn(13, 6, device=device).requires_grad_()
    rows = torch.randint(13, shape, device=device, dtype=index)
    out = lookup(weight, rows, impl=impl)
    assert torch.equal(out, weight[rows.long()])
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = torch.zeros_like(weight).index_add_(0, rows.flatten().long(), grad.view(-1, 6))
    torch.testing.assert_close(weight.grad.to_dense(), exact)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_rows_that_lie_apart(device, impl):
    weight = torch.randn(20, 6, device=device)
    for rows in (torch.arange(20, device=device)[::2], torch.tensor([7], device=device).expand(5)):
        assert torch.equal(lookup(weight, rows, impl=impl), weight[rows])


def test_gradient_of_one_weight_that_lies_apart(device):
    """One row of one weight is contiguous however far its neighbours are, which PyTorch trusts."""
    weight = torch.zeros(3, 1, device=device, requires_grad=True)
    out = lookup(weight, torch.tensor([1], device=device), impl="triton")
    out.backward(torch.tensor([[5.0, 7.0]], device=device)[:, ::2])
    assert weight.grad._values().stride() == (1, 1)
    assert weight.grad.to_dense().tolist() == [[0], [5], [0]]


def exact_bags(weight, starts, ids, offsets, scale, mode):
    """The pooled bags by ``nn.functional`` in float64, ``[B, F, D]``."""
    batch = (len(offsets) - 1) // len(starts)
    out = []
    for table, start in enumerate(starts.tolist()):
        bounds = offsets[table * batch : (table + 1) * batch + 1]
        span = slice(int(bounds[0]), int(bounds[-1]))
        out.append(
            functional.embedding_bag(
                ids[span].long() + start, weight, bounds - bounds[0], mode=mode,
                per_sample_weights=None if scale is None else scale[span],
                include_last_offset=True,
            )
        )  # fmt: skip
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("mode", [*MODES, "weighted"])
@pytest.mark.parametrize(
    ("batch", "dim", "index", "room", "sparse", "share"),
    [
        (6, 16, torch.int64, 0, True, "none"),
        (5, 7, torch.int32, 0, False, "none"),
        (6, 4, torch.int64, 7, True, "modulo"),
        (6, 4, torch.int64, 7, False, "last"),
        (4, 16, "bf16", 0, True, "none"),
    ],
)
def test_bags(device, assert_matches, impl, mode, batch, dim, index, room, sparse, share):
    """There may be more ids than the last offset says."""
    dtype, index = (torch.bfloat16, torch.int64) if index == "bf16" else (torch.float32, index)
    if dtype == torch.bfloat16 and (impl == "torch" or mode == "weighted"):
        pytest.skip("PyTorch rounds each sum on a CPU")
    weight, starts = tables(dim, device, dtype)
    ids, offsets = bags_of(batch * SCALE, device)

    # Ids that share rows are of tables of three times as many.
    sizes, number, given = torch.tensor(SIZES, device=device), {}, ids
    if share != "none":
        given = 3 * ids
        size = sizes.repeat_interleave(offsets[:: batch * SCALE].diff())
        ids = given % size if share == "modulo" else given.minimum(size - 1)
        number = {share: sizes if share == "modulo" else sizes - 1}
    given, inputs = torch.cat([given, ids.new_full((room,), 10**6)]).to(index), {"weight": weight}
    if mode == "weighted":
        mode, inputs["scale"] = "sum", torch.randn(ids.shape, device=device).requires_grad_()

    def pooled(weight, scale=None):
        scale = scale if scale is None else functional.pad(scale, (0, room))
        options = {"mode": mode, "sparse": sparse, "impl": impl}
        options["context"] = RowContext(padded=room > 0)
        bags = Bags(given, offsets, scale)
        return lookup_bags(weight, TableRows(starts, **number), bags, **options)

    out, grads = assert_matches(
        pooled,
        lambda weight, scale=None: exact_bags(weight, starts, ids, offsets, scale, mode),
        inputs,
        factors={"weight": 10},
    )
    assert not out[0, 0].any()
    assert grads["weight"].is_sparse == sparse


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_bf16_rows_are_summed_in_fp32(device, impl):
    rows = torch.full((301, 2), 1.0, device=device)
    rows[0] = 256
    tables = TableRows(torch.zeros(1, dtype=torch.int64, device=device))
    bags = Bags(torch.arange(301, device=device), torch.tensor([0, 301], device=device))
    context = RowContext(dtype=torch.bfloat16)
    out = lookup_bags(rows, tables, bags, context=context, impl=impl)
    assert out.dtype == torch.bfloat16
    assert out.flatten().tolist() == [556.0] * 2
    if impl == "triton":  # where PyTorch sums bf16 rows, it rounds each time on a CPU
        found = lookup_bags(rows.bfloat16(), tables, bags, impl=impl)
        assert found.flatten().tolist() == [556.0] * 2


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_maxima_may_be_deterministic(device, impl):
    torch.use_deterministic_algorithms(True)  # an error where there is no such algorithm
    (weight, starts), given = tables(5, device), bags_of(9, device)
    grads = []
    for _ in range(2):
        out = lookup_bags(weight, TableRows(starts), Bags(*given), mode="max", impl=impl)
        out.square().sum().backward()
        grads.append(weight.grad._values())
        weight.grad = None
    assert torch.equal(*grads)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_ids_whose_rows_are_elsewhere_add_nothing(device, assert_matches, impl):
    weight, starts = tables(8, device)
    ids, offsets = bags_of(6 * SCALE, device)
    counts = offsets[:: 6 * SCALE].diff()
    sizes = torch.tensor(SIZES, device=device)
    first, count = sizes // 3, sizes // 2  # the local rows of each table begin where it begins
    local = ids - first.repeat_interleave(counts)
    here = (local >= 0) & (local < count.repeat_interleave(counts))
    assert here.any()
    assert not here.all()
    held = torch.stack([first, count])
    assert_matches(
        lambda weight: lookup_bags(
            weight, TableRows(starts, held=held), Bags(ids, offsets), impl=impl
        ),
        lambda weight: exact_bags(
            weight, starts, local.where(here, 0), offsets, here.double(), "sum"
        ),
        {"weight": weight},
        factors={"weight": 10},
    )


def test_max_gives_the_gradient_to_the_first_of_equal_entries(device):
    weight = torch.tensor([[1.0], [1.0], [0.0]], device=device).requires_grad_()
    ids, offsets = torch.tensor([2, 1, 0], device=device), torch.tensor([0, 3], device=device)
    starts = torch.tensor([0], device=device)
    lookup_bags(
        weight, TableRows(starts), Bags(ids, offsets), mode="max", impl="triton"
    ).sum().backward()
    assert weight.grad.to_dense().flatten().tolist() == [0, 1, 0]


def test_inputs_may_be_views(device):
    weight, starts = tables(4, device)
    ids = ids_of(6, device)
    assert torch.equal(
        lookup_tables(weight, TableRows(starts), ids.t().contiguous().t(), impl="triton"),
        lookup_tables(weight, TableRows(starts), ids, impl="triton"),
    )
    ids, offsets = bags_of(5, device)
    scale = torch.randn(len(ids), device=device)
    views = [torch.stack([x, x], dim=1)[:, 1] for x in (ids, offsets, scale)]
    for mode, used in (("sum", 3), ("mean", 2)):
        out, expected = (
            lookup_bags(weight, TableRows(starts), Bags(*given[:used]), mode=mode, impl="triton")
            for given in (views, (ids, offsets, scale))
        )
        assert torch.equal(out, expected)


def test_what_kernels_read_in_order_must_lie_so(device):
    """Weights cut from wider ones, or turned: other elements were read, silently."""
    weight, starts = tables(4, device)
    ids, (bags, offsets) = ids_of(3, device), bags_of(3, device)
    turned = weight.t().contiguous().t()
    second = torch.stack([starts, starts], dim=1)[:, 1]
    for name, call in (
        ("weight", lambda **use: lookup(turned, ids, **use)),
        ("weight", lambda **use: lookup_tables(turned, TableRows(starts), ids, **use)),
        ("starts", lambda **use: lookup_tables(weight, TableRows(second), ids, **use)),
        ("last", lambda **use: lookup_tables(weight, TableRows(starts, last=second), ids, **use)),
        (
            "last",
            lambda **use: lookup_bags(
                weight, TableRows(starts, last=second), Bags(bags, offsets), **use
            ),
        ),
    ):
        with pytest.raises(ValueError, match=rf"^{name} has .* strides .* contiguous: give"):
            call(impl="triton")
        call(impl="torch")


def test_all_bags_empty(device):
    weight, starts = tables(4, device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    offsets = torch.zeros(2 * len(SIZES) + 1, dtype=torch.int64, device=device)
    for mode in MODES:
        out = lookup_bags(weight, TableRows(starts), Bags(ids, offsets), mode=mode, impl="triton")
        assert out.shape == (2, len(SIZES), 4)
        assert not out.any()


def test_messages():
    weight, starts = tables(4, "cpu")
    ids, offsets = bags_of(3, "cpu")
    with pytest.raises(ValueError, match=r"ids have shape \(3, 2\), they must be \[4, B\]"):
        lookup_tables(weight, TableRows(starts), torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="unknown mode 'maen', did you mean 'mean'"):
        lookup_bags(weight, TableRows(starts), Bags(ids, offsets), mode="maen")
    weighted = Bags(ids, offsets, torch.ones(len(ids)))
    with pytest.raises(ValueError, match="per_sample_weights need mode sum, the mode is max"):
        lookup_bags(weight, TableRows(starts), weighted, mode="max")
    with pytest.raises(ValueError, match="12 offsets for 4 tables"):
        lookup_bags(weight, TableRows(starts), Bags(ids, offsets[:-1]))
    with pytest.raises(ValueError, match="0 offsets for 1 tables"):
        lookup_bags(weight, TableRows(starts[:1]), Bags(ids[:0], offsets[:0]))
    with pytest.raises(ValueError, match=r"per_sample_weights have shape \(1,\), they must have"):
        lookup_bags(weight, TableRows(starts), Bags(ids, offsets, torch.ones(1)))


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_indices_are_integers_beside_the_weights(impl):
    weight, starts = tables(4, "cpu")
    one_each = torch.zeros(4, 2, dtype=torch.int64)
    bags, offsets = bags_of(3, "cpu")
    for bad, message in (
        (lambda ids: ids.float(), "must be integers, got torch.float32"),
        (lambda ids: ids.bool(), "must be integers, got torch.bool"),
        (lambda ids: ids.to("meta"), "are on meta and the weights on cpu"),
    ):
        for call in (
            lambda bad=bad: lookup(weight, bad(one_each), impl=impl),
            lambda bad=bad: lookup_tables(weight, TableRows(starts), bad(one_each), impl=impl),
            lambda bad=bad: lookup_bags(
                weight, TableRows(starts), Bags(bad(bags), offsets), impl=impl
            ),
            lambda bad=bad: lookup_bags(
                weight, TableRows(starts), Bags(bags, bad(offsets)), impl=impl
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.gpu
def test_flat_index_beyond_two_to_the_31():
    weight = torch.zeros(2**27 + 5, 16, device="cuda", dtype=torch.bfloat16)
    weight[-1] = 7
    ids = torch.tensor([[2, 2], [4, 0]], dtype=torch.int32, device="cuda")
    out = lookup_tables(weight, TableRows(torch.tensor([0, 2**27], device="cuda")), ids)
    assert out.sum(2).tolist() == [[0, 16 * 7], [0, 0]]


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spare", [0, 9])
def test_bags_are_updated_in_the_backward_pass(device, assert_close, rule, dtype, spare):
    """As by an optimizer that gets the gradient; ids beyond the last offset change nothing."""
    rule = make_rule(rule)
    weight, starts = tables(8, device)
    batch = 5 * SCALE
    ids, offsets = bags_of(batch, device)
    room = torch.cat([ids, ids.new_full((spare,), 10**6)])
    expected, lr = weight.detach().double(), torch.tensor(0.5, device=device)
    grads = torch.randn(batch, len(starts), 8, device=device).to(dtype)
    owner = torch.repeat_interleave(offsets.diff())
    rows = ids + starts[owner // batch]
    each = grads.transpose(0, 1).reshape(-1, 8)[owner].double()
    zeros = [weight.new_zeros(len(weight), 1 if own else 8) for own in rule.states.values()]
    update_rows_torch(rule, expected, rows, each, [s.double() for s in zeros], lr=lr.double())
    update = FusedUpdate(rule=rule, lr=lr, states=zeros)
    with FusedUpdates([(weight, update)]) as updates:
        context = RowContext(updates=updates, padded=spare > 0, dtype=dtype)
        out = lookup_bags(
            weight, TableRows(starts), Bags(room, offsets), context=context, impl="triton"
        )
        assert out.dtype == dtype
        out.backward(grads)
    assert weight.grad is None
    assert update.applied
    assert_close(weight.detach(), expected, "weight", factor=10)
