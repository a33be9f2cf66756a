"""What every embedding kind promises, run on every kind that there is."""

import copy
import inspect
import itertools
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

from dlrm.data.schema import KAGGLE_CARDINALITIES
from dlrm.embeddings import EmbeddingBag, available, build
from dlrm.embeddings.common.budget import Budget
from dlrm.embeddings.common.context import LookupContext
from dlrm.embeddings.offload import Offload
from dlrm.embeddings.paged import Paged
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.sparse_arch.arch import SparseArch

SIZES = [1, 3, 40, 131]
# Options under which small tables are compressed; kinds that are not named have none to set.
COMPRESSED = [
    ("hash", {"rows": 7}),
    ("qr", {"collisions": 5, "operation": "multiply"}),
    ("qr", {"collisions": 5, "operation": "add"}),
    ("qr", {"collisions": 5, "operation": "concat"}),
    ("block", {"dim": 3}),
    ("block", {"dim": 3, "keep": 5}),
    ("drop", {"keep": 5}),
    ("short", {"dim": 3}),
    ("short", {"dim": 1, "keep": 90, "scale": 2.5}),
    ("tt", {"rank": 3}),
    ("tt", {"rank": 3, "keep": 5}),
    ("robe", {"rows": 7, "block": 2}),
    ("robe", {"rows": 7, "block": 80}),
    ("robe", {"rows": 7}),
    ("cafe", {"rows": 40, "pieces": 1}),
    ("cafe", {"rows": 40}),
    ("dynamic", {"rows": 30, "shared": 2}),
    ("dynamic", {"rows": 30, "shared": 3, "pieces": 2}),
    ("dynamic", {}),
    ("basis", {"parts": 2, "clusters": 5}),
    ("paged", {}),
    ("paged", {"page_size": 7, "devices": ["cpu", "cpu"]}),
]
# Options under which a kind can hold any table of these sizes.
LOSSLESS = {
    "hash": {"rows": 200},
    "qr": {"collisions": 1},
    "block": {"dim": 8},
    "drop": {"keep": 200},
    "short": {"dim": 8},
    "tt": {"rank": 200},
    "robe": {"rows": 200, "block": 1 << 30},
    "cafe": {"rows": 400, "hot": 1.0},
    "dynamic": {"rows": 200},
    "basis": {"clusters": 200},
}
KINDS = sorted(available())
CASES = COMPRESSED + [(kind, {}) for kind in KINDS if kind not in dict(COMPRESSED)]
NAMES = ["-".join([kind, *(str(value) for value in options.values())]) for kind, options in CASES]
every_case = pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)


def mostly_slow(names, fast, *values):
    """All combinations of some values, those that are not listed marked as slow."""
    params = [
        pytest.param(*each, marks=() if each in fast else pytest.mark.slow)
        for each in itertools.product(*values)
    ]
    return pytest.mark.parametrize(names, params)


every_mode = pytest.mark.parametrize("mode", ["sum", "mean", "max"])


def make(kind, options, dim=8, **common):
    """A group over SIZES in double precision with rows of a size that shows errors."""
    group = build(kind, SIZES, dim, **options, **common).double()
    with torch.no_grad():
        for parameter in group.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return group


def one_hot(batch, dtype=torch.int64):
    """Ids ``[F, B]`` that include both ends of every table."""
    ids = torch.stack([torch.randint(rows, (batch,)) for rows in SIZES])
    if batch > 1:
        ids[:, 0], ids[:, -1] = 0, torch.tensor(SIZES) - 1
    return ids.to(dtype)


def bags(dtype=torch.int64):
    """Ids, offsets and bags by table and sample: empty ones, duplicates, both ends of a table."""
    nested = [
        [[], [0, rows - 1, 0, rows // 2], [rows - 1], [rows // 3, rows // 2], []] for rows in SIZES
    ]
    flat = [bag for table in nested for bag in table]
    offsets = torch.tensor([0, *(len(bag) for bag in flat)]).cumsum(0)
    return torch.tensor([i for bag in flat for i in bag], dtype=dtype), offsets, nested


def pooled(group, nested, weights=None):
    """The oracle: rows of one table at a time, pooled bag by bag."""
    out = torch.zeros(len(nested[0]), len(nested), group.embedding_dim, dtype=torch.float64)
    position = 0
    for table, samples in enumerate(nested):
        for sample, bag in enumerate(samples):
            factors = None if weights is None else weights[position : position + len(bag)]
            position += len(bag)
            bag = [i for i in bag if i != group.padding_idx]
            if bag:
                rows = group.rows(table, torch.tensor(bag))
                if factors is not None:
                    rows = rows * factors[:, None]
                out[sample, table] = {
                    "sum": lambda rows: rows.sum(0),
                    "mean": lambda rows: rows.mean(0),
                    "max": lambda rows: rows.max(0).values,
                }[group.mode](rows)
    return out


def gradients(group):
    return {
        name: p.grad.to_dense() if p.grad is not None else torch.zeros_like(p)
        for name, p in group.named_parameters()
    }


@every_case
@mostly_slow(
    ("dim", "batch", "dtype"),
    [
        *((4, 33, torch.int64), (8, 33, torch.int32), (10, 33, torch.int64), (16, 33, torch.int32)),
        *((8, 0, torch.int64), (10, 1, torch.int32)),
    ],
    [4, 8, 10, 16],
    [0, 1, 33],
    [torch.int32, torch.int64],
)
def test_one_hot_gives_the_rows(kind, options, dim, batch, dtype):
    group = make(kind, options, dim)
    ids = one_hot(batch, dtype)
    out = group(ids)
    assert out.shape == (batch, len(SIZES), dim)
    assert out.dtype == torch.float64
    for table in range(len(SIZES)):
        torch.testing.assert_close(out[:, table], group.rows(table, ids[table]))


@every_case
def test_rows_keep_the_shape_of_their_ids(kind, options):
    group = make(kind, options)
    ids = torch.randint(SIZES[3], (2, 3))
    rows = group.rows(3, ids)
    assert rows.shape == (2, 3, 8)
    assert group.rows(3, ids[1, 2]).shape == (8,)
    torch.testing.assert_close(rows[1, 2], group.rows(3, ids[1, 2]))


@pytest.mark.parametrize(
    ("kind", "options"), [("cafe", {"rows": 10}), ("tt", {"rank": 2, "cache_rows": 8})]
)
def test_rows_of_int32_ids_in_tables_of_more_than_2_to_31_rows(kind, options):
    group = build(kind, [2**31 - 10, 100], 4, **options)
    ids = torch.arange(40, 44)
    for _ in range(3):
        group(ids.repeat(2, 1))
    if kind == "tt":
        assert group.cache_populate().resident > 0
    group.eval()
    with torch.no_grad():
        for parameter in group.parameters():
            parameter.copy_(torch.randn_like(parameter))
    rows = group(ids.repeat(2, 1))[:, 1]
    assert torch.equal(group.rows(1, ids.int()), rows)


@every_case
@every_mode
def test_autocast_leaves_rows_and_gradients_in_full_precision(kind, options, mode):
    group = make(kind, options, mode=mode).float()
    ids, offsets = torch.zeros(24, dtype=torch.int64), torch.arange(0, 25, 2)
    group(ids.view(4, 6))  # where ids have rows of their own from the next step on
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            rows, pooled = group(ids.view(4, 6)), group(ids, offsets)
        grads = torch.autograd.grad(rows.sum() + pooled.sum(), list(group.parameters()))
        found.append([rows, pooled, *(grad.to_dense() for grad in grads)])
    for cast, expected in zip(found[1], found[0], strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(cast, expected)


@every_case
def test_to_dense_gives_every_row(kind, options):
    group = make(kind, options).float()
    for table, rows in enumerate(SIZES):
        dense = group.to_dense(table, chunk=16)
        torch.testing.assert_close(dense, group.rows(table, torch.arange(rows)).detach())


@every_case
@mostly_slow(
    ("mode", "dtype", "padding_idx"),
    [
        *(("sum", torch.int32, None), ("mean", torch.int64, None), ("max", torch.int32, None)),
        *(("sum", torch.int64, 0), ("mean", torch.int32, 0), ("max", torch.int64, 0)),
    ],
    ["sum", "mean", "max"],
    [torch.int32, torch.int64],
    [None, 0],
)
def test_bags_are_pooled(kind, options, mode, dtype, padding_idx):
    group = make(kind, options, mode=mode, padding_idx=padding_idx)
    ids, offsets, nested = bags(dtype)
    torch.testing.assert_close(group(ids, offsets), pooled(group, nested))


@every_case
@every_mode
def test_pooled_vectors_may_be_in_bf16(kind, options, mode):
    group = make(kind, options, mode=mode).float()
    ids, offsets, nested = bags()
    out = group(ids, offsets, context=LookupContext(dtype=torch.bfloat16))
    out.sum().backward()
    expected = pooled(group.double(), nested).to(out)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@every_case
def test_look_ups_are_weighted(kind, options):
    group = make(kind, options)
    ids = one_hot(6)
    weights = torch.randn(ids.shape, dtype=torch.float64)
    torch.testing.assert_close(group(ids, None, weights), group(ids) * weights.T[..., None])
    ids, offsets, nested = bags()
    weights = torch.randn(len(ids), dtype=torch.float64, requires_grad=True)
    up = torch.randn(5, len(SIZES), 8, dtype=torch.float64)
    both = group(ids, offsets, weights), pooled(group, nested, weights)
    torch.testing.assert_close(*both)
    grads = [torch.autograd.grad((out * up).sum(), weights)[0] for out in both]
    torch.testing.assert_close(*grads)


@every_case
def test_one_hot_padding_gives_zeros(kind, options):
    group = make(kind, options, padding_idx=0)
    ids = one_hot(9)
    out = group(ids)
    out.sum().backward()
    assert (out[ids.T == 0] == 0).all()
    alone = make(kind, options)
    alone.load_state_dict(group.state_dict())
    torch.testing.assert_close(out[ids.T != 0], alone(ids)[ids.T != 0])


@every_case
def test_no_bags_and_only_empty_bags(kind, options):
    group = make(kind, options)
    none = torch.tensor([], dtype=torch.int64)
    assert group(none, torch.tensor([0])).shape == (0, len(SIZES), 8)
    out = group(none, torch.zeros(2 * len(SIZES) + 1, dtype=torch.int64))
    assert out.shape == (2, len(SIZES), 8)
    assert not out.any()
    out.sum().backward()


@every_case
@every_mode
def test_gradient_of_every_parameter_by_finite_differences(kind, options, mode):
    group = make(kind, options, dim=4, mode=mode, sparse=False)
    ids, offsets, _ = bags()
    single = one_hot(5)
    names, values = zip(*group.named_parameters(), strict=True)

    def forward(*parameters):
        own = dict(zip(names, parameters, strict=True))
        return tuple(functional_call(group, own, given) for given in ((ids, offsets), (single,)))

    forward(*values)  # rows of new ids may be copies of others, which have the same maximum
    with torch.no_grad():
        for value in values:
            value.copy_(torch.randn_like(value))
    assert torch.autograd.gradcheck(forward, values, fast_mode=True)


@every_case
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_may_be_scaled_in_place(kind, options, sparse):
    group = make(kind, options, sparse=sparse)
    for given in ((one_hot(4),), bags()[:2]):
        group.zero_grad()
        group(*given).square().sum().backward()
        before = {name: grad.clone() for name, grad in gradients(group).items()}
        for parameter in group.parameters():
            grad = parameter.grad
            if grad is not None:
                (grad._values() if grad.is_sparse else grad).mul_(2)
        for name, grad in gradients(group).items():
            torch.testing.assert_close(grad, 2 * before[name], msg=name)


@every_case
def test_sparse_gradients_equal_dense_ones(kind, options):
    sparse, dense = make(kind, options, sparse=True), make(kind, options, sparse=False)
    dense.load_state_dict(sparse.state_dict())
    for given in (bags()[:2], (one_hot(33),)):
        for group in (sparse, dense):
            group.zero_grad()
            group(*given).square().sum().backward()
        assert not any(p.grad.is_sparse for p in dense.parameters() if p.grad is not None)
        for name, expected in gradients(dense).items():
            torch.testing.assert_close(gradients(sparse)[name], expected)
            assert expected.any()


@every_case
@pytest.mark.parametrize("bad", [-1, "end"])
def test_ids_outside_their_table_raise(kind, options, bad):
    if kind == "dynamic":
        pytest.skip("any integer is an id")
    group = make(kind, options)
    for table, rows in enumerate(SIZES):
        wrong = rows if bad == "end" else bad
        message = re.escape(f"id {wrong} of table {table} is outside [0, {rows})")
        ids = one_hot(4)
        ids[table, 2] = wrong
        with pytest.raises(IndexError, match=message):
            group(ids)
        with pytest.raises(IndexError, match=message):
            group(ids.reshape(-1), torch.arange(ids.numel() + 1))
        with pytest.raises(IndexError, match=message):
            group.rows(table, ids[table])


@every_case
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float])
def test_ids_of_other_types_raise(kind, options, dtype):
    """As in nn.EmbeddingBag: in their type, sizes of tables and divisors would overflow."""
    group = make(kind, options)
    ids, offsets, _ = bags()
    with pytest.raises(ValueError, match=f"ids must be integers, got {dtype}: cast them to int32"):
        group(torch.zeros(4, 2, dtype=dtype))
    with pytest.raises(ValueError, match=f"ids must be integers, got {dtype}"):
        group(torch.zeros(len(ids), dtype=dtype), offsets)
    with pytest.raises(ValueError, match=f"ids must be integers, got {dtype}"):
        group.rows(3, torch.zeros(2, dtype=dtype))
    with pytest.raises(ValueError, match=f"offsets must be integers, got {dtype}"):
        group(ids, offsets.to(dtype))


@every_case
def test_footprint_counts_all_that_is_saved(kind, options):
    group = build(kind, SIZES, 8, **options)
    footprint = group.footprint()
    assert len(footprint) == len(SIZES)
    total = sum(sum(parts.values()) for parts in footprint)
    assert total == sum(t.numel() * t.element_size() for t in group.state_dict().values())
    parameters = {t.dtype: sum(p.numel() for p in group.parameters()) for t in group.parameters()}
    grown = sum(sum(parts.values()) for parts in group.double().footprint())
    assert grown - total == 4 * parameters[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_from_dense_with_room_for_all_reproduces(kind):
    weights = [torch.randn(rows, 8) for rows in SIZES]
    group = available()[kind].from_dense(weights, **LOSSLESS.get(kind, {}))
    for table, weight in enumerate(weights):
        torch.testing.assert_close(group.to_dense(table), weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"), [("drop", {}), ("block", {"dim": 8}), ("short", {"dim": 8})]
)
def test_ids_beyond_those_kept_share_the_mean_of_their_rows(kind, options):
    keep, weights = [0, 5, 7, 0], [torch.randn(rows, 8) for rows in SIZES]
    group = available()[kind].from_dense(weights, keep=keep, **options)
    for table, (weight, own) in enumerate(zip(weights, keep, strict=True)):
        rest = weight[own:].mean(0).expand(len(weight[own:]), -1)
        torch.testing.assert_close(group.to_dense(table), torch.cat([weight[:own], rest]))
    assert [part["weights"] for part in group.footprint()] == [32 * n for n in (1, 3, 8, 1)]


@every_case
def test_dense_tables_of_other_shapes_are_refused(kind, options):
    group = build(kind, [20, 30], 8, **options)
    for shapes in ([(20, 8)], [(20, 8), (29, 8)], [(20, 8), (30, 7)], [(20, 8), (30, 8), (5, 8)]):
        with pytest.raises(ValueError, match=r"dense tables have shapes .*, they must have"):
            group.load_dense([torch.zeros(shape) for shape in shapes])


@every_case
def test_tables_of_zeros_are_fitted(kind, options):
    group = available()[kind].from_dense([torch.zeros(rows, 8) for rows in SIZES], **options)
    assert not any(group.to_dense(table).any() for table in range(len(SIZES)))


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trained_rows_keep_their_type(kind, options, dtype):
    rows = torch.randn(40, 8, dtype=dtype)
    bag = EmbeddingBag.from_pretrained(rows, kind=kind, **options)
    assert bag(torch.tensor([[1, 2]])).dtype == dtype
    if kind == "dense":
        assert torch.equal(bag.embedding.to_dense(), rows)


@every_case
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_tables_of_another_type_are_fitted(kind, options, dtypes):
    own, given = dtypes
    group = build(kind, [20, 30], 8, **options).to(own)
    group.load_dense([torch.rand(rows, 8).to(given) for rows in (20, 30)])
    assert all(p.dtype == own for p in group.parameters())
    assert group.to_dense(1).isfinite().all()


@every_case
def test_tables_that_lie_transposed_are_fitted(kind, options):
    fits = []
    weights = [torch.randn(rows, 8) for rows in (20, 30)]
    for given in (weights, [weight.t().contiguous().t() for weight in weights]):
        torch.manual_seed(1)  # basis draws
        group = available()[kind].from_dense(given, **options)
        fits.append(torch.cat([group.to_dense(table) for table in range(2)]))
    torch.testing.assert_close(*fits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@every_case
def test_tables_in_fp16_are_fitted_as_well_as_in_fp32(kind, options, scale):
    """Counts of rows, sums of them and products of small weights leave the range of fp16."""
    rows = (scale * (torch.randn(70_000, 8).mul_(0.1) + torch.arange(8))).half()
    fitted = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        fitted.append(available()[kind].from_dense([rows.to(dtype)], **options).to_dense().float())
    errors = [(made - rows.float()).norm() for made in fitted]
    assert errors[1] <= 1.02 * errors[0] + 2e-3 * rows.float().norm()


@every_case
def test_fits_are_equal_to_the_bit(kind, options, device):
    """Of several processes each fits its replica."""
    device = "cpu" if "devices" in options else device
    weights = [torch.randn(rows, 8, device=device) for rows in (20_000, 700)]
    fits = []
    for _ in range(4):
        torch.manual_seed(1)
        group = available()[kind].from_dense(weights, **options)
        fits.append([group.to_dense(table) for table in range(2)])
    for fit in fits[1:]:
        assert all(torch.equal(a, b) for a, b in zip(fits[0], fit, strict=True))


@every_case
def test_from_dense_of_its_own_tables_reproduces(kind, options):
    if kind == "tt" and "keep" in options:
        pytest.skip("the mean of the rows in the train becomes the shared row: its rank differs")
    sizes = [1, 8, 60, 125]  # products of three equal factors or nearly so, as tt likes them
    made = build(kind, sizes, 8, **options)
    weights = [made.to_dense(table) for table in range(len(sizes))]
    again = available()[kind].from_dense(weights, **options)
    for table, weight in enumerate(weights):
        torch.testing.assert_close(again.to_dense(table), weight, rtol=1e-3, atol=1e-5)


@every_case
def test_rows_start_with_the_deviation_of_the_reference_or_a_tenth_of_it(kind, options):
    group = build(kind, [2000] * 16, 16, **options)
    tenth = isinstance(group, SharedRows | Paged | Offload)  # they store rows as dense tables do
    rows = torch.stack([group.to_dense(table) for table in range(16)]) * (3 * 2000) ** 0.5
    rows = rows[rows != 0].unique()  # of short rows, of which many ids share one
    assert rows.std() == pytest.approx(0.1 if tenth else 1, rel=0.05)
    assert abs(rows.mean()) < 0.05 * rows.std()


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_narrow_types_are_drawn_as_those_of_fp32(kind, options, dtype):
    groups = [build(kind, SIZES, 8, **options) for _ in range(2)]
    groups[1].to(dtype)
    for group in groups:
        torch.manual_seed(1)
        group.reset_parameters()
    for (name, wide), narrow in zip(
        groups[0].state_dict().items(), groups[1].state_dict().values(), strict=True
    ):
        if wide.is_floating_point():
            chance = 3 / wide.numel() ** 0.5  # types may be drawn in another order
            close = wide.float().std() * (0.1 + chance) + 1e-3
            assert abs(wide.float().std() - narrow.float().std()) < close, name


@every_case
def test_a_gradient_is_cast_with_its_parameter(kind, options):
    group = build(kind, SIZES, 8, **options)
    ids = one_hot(5)
    group(ids)  # where ids have rows of their own from the next step on
    group(ids).sum().backward()
    once = {name: gradient.double() for name, gradient in gradients(group).items()}
    group.double()
    group(ids).sum().backward()
    for name, twice in gradients(group).items():
        assert twice.dtype == torch.float64, name
        torch.testing.assert_close(twice, 2 * once[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_options_suit_the_command_line(kind):
    help_text = inspect.getdoc(available()[kind])
    assert help_text, "the docstring is the help text"
    for name, parameter in available()[kind].options().items():
        assert parameter.default is not parameter.empty, f"{name} needs a default"
        assert parameter.annotation is not parameter.empty, f"{name} needs a type"
        assert re.search(rf"^ +{name}: \S", help_text, re.MULTILINE), f"{name} is undocumented"


@every_case
def test_states_and_copies_are_independent(kind, options):
    group, fresh = make(kind, options), make(kind, options)
    ids = one_hot(9)
    before = group(ids).detach()
    assert not torch.equal(fresh(ids), before)
    fresh.load_state_dict(group.state_dict())
    for twin in (fresh, copy.deepcopy(group)):
        assert torch.equal(twin(ids), before)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1)
        assert not torch.equal(twin(ids), before)
    assert torch.equal(group(ids), before)


@every_case
@mostly_slow(
    ("mode", "padding_idx"),
    [("sum", None), ("sum", 3), ("mean", -1), ("mean", None), ("max", 3)],
    ["sum", "mean", "max"],
    [None, 3, -1],
)
def test_drop_in_agrees_with_the_original(kind, options, mode, padding_idx):
    arguments = {"mode": mode, "padding_idx": padding_idx}
    bag = EmbeddingBag(41, 8, kind=kind, **arguments, **options)
    bag.train(kind != "dynamic")  # which gives new ids a row in training
    original = nn.EmbeddingBag.from_pretrained(bag.embedding.to_dense(), **arguments)
    ids = torch.tensor([0, 3, 40, 3, 3, 17, 40, 2])
    inputs = [
        (ids.view(2, 4),),
        (ids.view(8, 1),),
        (ids, torch.tensor([0, 0, 4, 5, 8])),
        (ids.int(), torch.tensor([0, 3], dtype=torch.int32)),
    ]
    if mode == "sum":
        inputs += [(ids.view(2, 4), None, torch.randn(2, 4)), (*inputs[2], torch.randn(8))]
    for arguments in inputs:
        torch.testing.assert_close(bag(*arguments), original(*arguments))
    bag.include_last_offset = original.include_last_offset = True
    arguments = (ids, torch.tensor([0, 2, 2, 8]))
    torch.testing.assert_close(bag(*arguments), original(*arguments))


@pytest.mark.parametrize("kind", ["tt", "short", "offload", "qr"])
def test_compiled_models_run_it_as_it_is(kind, device):
    """The compiler can't trace how kernels are launched."""
    torch._dynamo.reset()
    bag = EmbeddingBag(40, 8, mode="sum", sparse=True, kind=kind, device=device)
    ids, graphs = torch.randint(40, (6, 3), device=device), []
    backend = lambda graph, _: graphs.append(graph.code) or graph  # noqa: E731
    found = torch.compile(lambda ids: 2 * bag(ids), backend=backend)(ids)
    assert torch.equal(found, 2 * bag(ids))
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in bag.parameters())
    assert len(graphs) == 3  # the offsets before it, its first table after it, and the product


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_may_be_generous_or_too_small(kind):
    if "for_budget" not in vars(available()[kind]):
        with pytest.raises(ValueError, match=f"{kind} takes no budget"):
            available()[kind].for_budget(Budget([500, 3], 8, 10))
        return
    assert available()[kind].for_budget(Budget([500, 3], 8, 503 * 8 * 4)) == [None, None]
    with pytest.raises(ValueError, match=r"budget of 10 bytes .* at least (\d+)") as error:
        available()[kind].for_budget(Budget([500, 3], 8, 10))
    smallest = int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))
    available()[kind].for_budget(Budget([500, 3], 8, smallest))
    with pytest.raises(ValueError, match="budget"):
        available()[kind].for_budget(Budget([500, 3], 8, smallest - 1))


@pytest.mark.parametrize(
    ("kind", "options", "used"),
    [
        ("basis", {}, 0.9),
        ("block", {}, 0.95),
        ("cafe", {}, 0.97),
        ("drop", {}, 0.999),
        ("hash", {}, 0.999),
        ("qr", {"operation": "multiply"}, 0.95),
        ("qr", {"operation": "concat"}, 0.95),
        ("robe", {}, 0.999),
    ],
)
@pytest.mark.parametrize("compression", [4, 10, 50, 1000])
def test_the_budget_is_used_up_at_kaggle_size(kind, options, used, compression):
    budget = Budget(KAGGLE_CARDINALITIES, 16, 64 * sum(KAGGLE_CARDINALITIES) // compression)
    if compression > {"block": 16, "basis": 60}.get(kind, 1000):
        with pytest.raises(ValueError, match=rf"too small for --emb {kind}"):
            available()[kind].for_budget(budget, **options)
        return
    chosen = available()[kind].for_budget(budget, **options)
    plan = [("dense", {}) if own is None else (kind, options | own) for own in chosen]
    with torch.device("meta"):
        total = SparseArch(KAGGLE_CARDINALITIES, 16, plan).sizes()["bytes"]
    assert used * budget.size <= total <= budget.size
    if kind in ("hash", "robe"):
        assert len({own["rows"] for own in chosen if own}) == 1, "one cap: one group"
