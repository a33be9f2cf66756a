"""TT look-up: every way through the kernels against plain PyTorch in float64."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from dlrm.kernels.tt import (
    TTShape,
    factors,
    layout,
    lookup,
    op,
    tt_bags,
    tt_vectors,
    tt_vectors_torch,
)
from dlrm.kernels.tt.layout import factor_layout
from dlrm.kernels.update.dense import update_dense

GPU = torch.cuda.is_available()
WAYS = ("direct", "unique", "ordered")
ROUNDING = {"ieee": 2e-6, "tf32": 3e-3, "bf16": 1e-2}  # relative RMS; tf32 keeps 10 bits, bf16 7

# p of each table, q, ranks: odd and even sizes; more slices than a slice has entries; one slice
SHAPES = {
    "d2": ([[7, 9], [3, 11]], (3, 5), (1, 4, 1)),
    "d2-tall": ([[70, 60]], (1, 2), (1, 1, 1)),
    "d3": ([[3, 4, 5], [2, 7, 3], [1, 1, 1]], (2, 3, 1), (1, 3, 5, 1)),
    "d3-kaggle": ([[10, 11, 12], [5, 4, 6]], (2, 2, 4), (1, 8, 8, 1)),
    "d3-tall": ([[30, 20, 40]], (1, 1, 2), (1, 2, 1, 1)),
    "d4": ([[3, 2, 4, 2], [1, 1, 1, 1]], (2, 1, 3, 2), (1, 2, 3, 4, 1)),
}
WIDE = {
    "d3-wide": ([[50, 30, 40]], (2, 4, 2), (1, 16, 16, 1)),
    "d3-pairs": ([[35, 3, 2]], (1, 2, 1), (1, 2, 9, 1)),
    "d3-broad": ([[5, 9, 6], [7, 3, 4]], (4, 4, 4), (1, 4, 4, 1)),
}
LARGE = {
    "readme": ([[200, 220, 250]], (4, 4, 4), (1, 32, 32, 1)),
    "kaggle": ([[200, 220, 250], [200, 200, 209], [50, 52, 55]], (2, 2, 4), (1, 32, 32, 1)),
    "rank64": ([[200, 220, 250]], (4, 4, 8), (1, 64, 64, 1)),
    "odd": ([[211, 223, 227]], (3, 5, 1), (1, 17, 33, 1)),
    "d4": ([[57, 58, 59, 60]], (2, 2, 2, 2), (1, 16, 32, 16, 1)),
    "d2": ([[3163, 3163], [400, 900]], (4, 4), (1, 32, 1)),
    "beyond-int32": ([[1500, 1500, 1500]], (2, 2, 4), (1, 8, 8, 1)),  # 3.4e9 rows
}
ALL = SHAPES | LARGE if GPU else SHAPES


class Group:
    """Random cores of a group of tables, and ids for them."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        shapes, self.q, self.ranks = (ALL | WIDE)[name]
        self.p = torch.tensor(shapes, device=device)
        self.offsets = self.p.cumsum(0) - self.p
        self.tables, self.dim = len(shapes), prod(self.q)
        self.rows = [prod(p) for p in shapes]
        self.cores = []
        for k, q in enumerate(self.q):
            size = int(self.p[:, k].sum()), self.ranks[k] * q * self.ranks[k + 1]
            core = torch.randn(size, device=device) / self.ranks[k + 1] ** 0.5
            self.cores.append(core.to(dtype).requires_grad_())
        self.shape = TTShape(self.p, self.q, self.ranks)
        self.device = device

    @property
    def arguments(self) -> tuple:
        return self.cores, self.shape

    def ids(self, batch: int, kind: str = "uniform") -> Tensor:
        """``[F, batch]`` ids: uniform, one id for all, or both ends of the tables."""
        rows = torch.tensor(self.rows, device=self.device)[:, None]
        ids = (
            torch.rand(self.tables, batch, device=self.device, dtype=torch.float64) * rows
        ).long()
        if kind == "equal":
            ids[:] = ids[:, :1]
        if kind == "skewed":
            ids = torch.where(torch.rand(ids.shape, device=self.device) < 0.7, ids[:, :1], ids)
        if kind == "ends":
            ids = torch.where(ids % 2 == 0, 0, rows - 1)
        return ids

    def index(self) -> Tensor:
        return torch.arange(self.tables, device=self.device)[:, None]

    def reference(self, ids: Tensor, tables: Tensor) -> tuple[list[Tensor], Tensor]:
        cores = [core.detach().double().requires_grad_() for core in self.cores]
        return cores, tt_vectors_torch(cores, *self.arguments[1:], tables, ids)


def close(got: Tensor, want: Tensor, tolerance: float, name: str = "rows") -> None:
    assert got.shape == want.shape, name
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= tolerance, f"{name}: relative RMS {error:.1e}"


def take(monkeypatch: pytest.MonkeyPatch, way: str) -> dict:
    """Arguments that make a look-up go this way, whatever its size."""
    monkeypatch.setattr(op, "_strategy", lambda *_: way)
    return {"impl": "triton"}


def product(group: Group, table: int) -> Tensor:
    """A table in full by einsum, without any of the code under test."""
    rows = torch.ones(1, 1, 1, dtype=torch.float64, device=group.device)
    for k, core in enumerate(group.cores):
        first, many = int(group.offsets[table, k]), int(group.p[table, k])
        slices = core.detach().double()[first : first + many]
        slices = slices.view(many, group.ranks[k], group.q[k], group.ranks[k + 1])
        rows = torch.einsum("vqr,prcs->vpqcs", rows, slices).flatten(0, 1).flatten(1, 2)
    return rows[..., 0]


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_the_product_of_the_cores(name, device):
    group = Group(name, device)
    for table, rows in enumerate(group.rows):
        ids = torch.randint(rows, (min(rows, 500),), device=device)
        cores = [core.double() for core in group.cores]
        at = torch.tensor(table, device=device)
        got = tt_vectors_torch(cores, *group.arguments[1:], at, ids)
        close(got, product(group, table)[ids], 1e-12)


def test_the_reference_shares_large_slices(device):
    """Many ids and slices of 1,024 numbers, some of them used often and some never."""
    group = Group("d3-wide", device)
    cores = [core.detach().double().requires_grad_() for core in group.cores]
    ids = (torch.rand(5000, device=device) ** 1.5 * group.rows[0]).long()
    at = torch.zeros((), dtype=torch.int64, device=device)
    got = tt_vectors_torch(cores, *group.arguments[1:], at, ids)
    slices = [
        core.view(-1, group.ranks[k], group.q[k], group.ranks[k + 1])[digit]
        for k, (core, digit) in enumerate(
            zip(cores, (ids // (30 * 40), ids // 40 % 30, ids % 40), strict=True)
        )
    ]
    want = torch.einsum("nxar,nrbs,nscy->nabc", *slices).reshape(len(ids), -1)
    close(got, want, 1e-12)
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, cores, grad)
    for k, gradient in enumerate(torch.autograd.grad(want, cores, grad)):
        close(gradients[k], gradient, 1e-12, f"core {k}")


def check_rows_and_gradients(group, ids, options, precision="ieee"):
    got = tt_vectors(*group.arguments, group.index(), ids, precision=precision, **options)
    cores, want = group.reference(ids, group.index())
    close(got, want, ROUNDING[precision])
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, group.cores, grad)
    for k, gradient in enumerate(torch.autograd.grad(want, cores, grad.double())):
        assert gradients[k].dtype == torch.float32
        close(gradients[k], gradient, ROUNDING[precision], f"core {k}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_rows_and_the_gradient_of_every_core(name, way, device, monkeypatch):
    group = Group(name, device)
    options = take(monkeypatch, way)
    ids = group.ids(20_000 if name in LARGE and GPU else 45)
    check_rows_and_gradients(group, ids, options)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_takes_several_tiles_of_a_slice(way, device, monkeypatch):
    monkeypatch.setattr(factors, "_PROGRAMS", 1)
    monkeypatch.setattr(lookup, "_PARTS", 1)
    monkeypatch.setattr(factors, "_TILES", dict.fromkeys(factors._TILES, (16, 16)))
    group = Group("d3-pairs", device)
    options = take(monkeypatch, way)
    ids = torch.arange(group.rows[0], device=device)[None]  # 35 rows of every big slice
    check_rows_and_gradients(group, ids, options)


@pytest.mark.parametrize("below", [1, 8, 100])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["d2", "d3-broad", "d3-pairs", "d4"])
def test_the_first_ids_of_a_table_may_be_most_of_a_batch(name, way, below, device, monkeypatch):
    """They add to several places, which others must not."""
    group = Group(name, device)
    options = take(monkeypatch, way)
    ids = group.ids(200 if name == "d3-pairs" else 60)  # with 2 right factors: two parts of each
    check_rows_and_gradients(group, torch.where(ids % 4 > 0, ids % below, ids), options)


@pytest.mark.parametrize("name", ["d2-tall", "d3-broad"])
def test_the_ids_of_a_right_factor_may_be_several_spans(name, device, monkeypatch):
    monkeypatch.setattr(layout, "_SEGMENT", 1)
    group = Group(name, device)
    options = take(monkeypatch, "unique")
    assert factor_layout(group.shape).num_segments > sum(group.p[:, -1])
    ids = group.ids(60)
    check_rows_and_gradients(group, torch.where(ids % 3 > 0, ids % 7, ids), options)
    check_rows_and_gradients(group, ids.clamp(min=int(group.p[0, -1])), options)  # none is hot


@pytest.mark.parametrize("way", WAYS)
def test_a_second_backward_pass_gives_the_same(way, device, monkeypatch):
    group = Group("d4", device)
    options = take(monkeypatch, way)
    rows = tt_vectors(*group.arguments, group.index(), group.ids(20), precision="ieee", **options)
    grad = torch.randn_like(rows)
    first = torch.autograd.grad(rows, group.cores, grad, retain_graph=True)
    for k, again in enumerate(torch.autograd.grad(rows, group.cores, grad)):
        close(again, first[k].double(), ROUNDING["ieee"], f"core {k}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["equal", "skewed", "ends"])
def test_ids_that_repeat_and_ids_at_both_ends(kind, way, device, monkeypatch):
    group = Group("kaggle" if GPU else "d3-kaggle", device)
    ids = group.ids(70_000 if GPU else 90, kind)
    got = tt_vectors(
        *group.arguments, group.index(), ids, precision="ieee", **take(monkeypatch, way)
    )
    cores, want = group.reference(ids, group.index())
    close(got, want, ROUNDING["ieee"])
    gradients = torch.autograd.grad(got.square().sum(), group.cores)
    # 70,000 numbers of one sign, added one after another in fp32, lose some digits.
    tolerance = 1e-3 if GPU and way != "ordered" else 2e-5
    for k, gradient in enumerate(torch.autograd.grad(want.square().sum(), cores)):
        close(gradients[k], gradient, tolerance, f"core {k}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3, 4), (0,), (2, 0)])
def test_ids_of_any_shape(shape, way, device, monkeypatch):
    group = Group("d3", device)
    ids = torch.randint(30, shape, device=device, dtype=torch.int32)
    tables = torch.ones((), dtype=torch.int64, device=device)
    got = tt_vectors(*group.arguments, tables, ids, **take(monkeypatch, way))
    _, want = group.reference(ids, tables)
    assert got.shape == (*shape, group.dim)
    close(got, want, ROUNDING["tf32"])
    assert got.sum().requires_grad
    got.sum().backward()
    assert all(core.grad is not None and core.grad.isfinite().all() for core in group.cores)


@pytest.mark.parametrize("way", ["direct", "unique"])
def test_tables_may_be_named_per_id(way, device, monkeypatch):
    group = Group("d3-kaggle", device)
    tables = torch.randint(group.tables, (80,), device=device)
    ids = torch.randint(min(group.rows), (80,), device=device)
    got = tt_vectors(*group.arguments, tables, ids, precision="ieee", **take(monkeypatch, way))
    close(got, group.reference(ids, tables)[1], ROUNDING["ieee"])


@pytest.mark.parametrize("way", [*WAYS, "torch"])
def test_skipped_ids_have_neither_rows_nor_gradients(way, device, monkeypatch):
    group = Group("d3-kaggle", device)
    ids = group.ids(40)
    skip = torch.rand(ids.shape, device=device) < 0.5
    skip[1, 5:] = True
    options = take(monkeypatch, way) if way != "torch" else {"impl": "torch"}
    got = tt_vectors(*group.arguments, group.index(), ids, skip=skip, precision="ieee", **options)
    cores, want = group.reference(ids, group.index())
    want = torch.where(skip[..., None], 0.0, want)
    assert (got[skip] == 0).all()
    close(got, want, ROUNDING["ieee"])
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, group.cores, grad)
    for k, gradient in enumerate(torch.autograd.grad(want, cores, grad.double())):
        close(gradients[k], gradient, ROUNDING["ieee"], f"core {k}")


def test_rows_of_a_batch_lie_sample_after_sample(device):
    group = Group("d3-kaggle", device)
    got = tt_vectors(*group.arguments, group.index(), group.ids(5), impl="triton")
    assert got.shape == (2, 5, 16)
    assert got.transpose(0, 1).is_contiguous()


def bags(group: Group, batch: int, nnz: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets of ``F * batch`` bags, some of them empty, and three ids behind the last."""
    cuts = torch.randint(nnz + 1, (group.tables * batch - 1,), device=group.device).sort().values
    ends = torch.tensor([0, nnz], device=group.device)
    offsets = torch.cat([ends[:1], cuts, ends[1:]])
    assert (offsets.diff() == 0).any()
    table = torch.repeat_interleave(offsets.diff()) // batch
    rows = torch.tensor(group.rows, device=group.device)[table]
    ids = (torch.rand(nnz, device=group.device, dtype=torch.float64) * rows).long()
    return torch.cat([ids, ids[:3]]), offsets


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pooling", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("name", ["readme", "kaggle"] if GPU else ["d3", "d4"])
def test_bags(name, pooling, way, device, monkeypatch):
    group = Group(name, device)
    options = {"mode": "mean"} if pooling == "mean" else {}
    ids, offsets = bags(group, *((2000, 20_000) if GPU else (12, 50)))
    inputs = list(group.cores)
    weights = None
    if pooling == "weighted":
        weights = torch.randn(len(ids), device=device, requires_grad=True)
        inputs.append(weights)
    way_options = take(monkeypatch, way)
    got = tt_bags(
        *group.arguments, ids, offsets, weights, precision="ieee", **options, **way_options
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted_weights = None if weights is None else exact[-1]
    want = tt_bags(
        exact[: len(group.cores)], *group.arguments[1:], ids, offsets, wanted_weights,
        impl="torch", **options,
    )  # fmt: skip
    close(got, want, ROUNDING["ieee"])
    assert (got.flatten(0, 1)[offsets.diff() == 0] == 0).all()
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, inputs, grad)
    for k, gradient in enumerate(torch.autograd.grad(want, exact, grad.double())):
        close(gradients[k], gradient, ROUNDING["ieee"], f"input {k}")


def test_bags_agree_with_embedding_bag(device):
    group = Group("d3", device)
    ids, offsets = bags(group, 8, 40)
    tables = [torch.cat([product(group, t)]).float() for t in range(group.tables)]
    got = tt_bags(*group.arguments, ids, offsets, precision="ieee", impl="triton")
    for t, table in enumerate(tables):
        bag = offsets[t * 8 : t * 8 + 9]
        want = torch.nn.functional.embedding_bag(
            ids[bag[0] : bag[-1]], table, bag - bag[0], mode="sum", include_last_offset=True
        )
        close(got[t], want.double(), 1e-6, f"table {t}")


@pytest.mark.parametrize("kind", ["uniform", "skewed"])
def test_ordered_gradients_are_equal_to_the_last_bit(kind, device):
    group = Group("kaggle" if GPU else "d3-kaggle", device)
    ids = group.ids(30_000 if GPU else 100, kind)
    grad = torch.randn(group.tables, ids.shape[1], group.dim, device=device)
    runs = []
    for _ in range(2):
        rows = tt_vectors(*group.arguments, group.index(), ids, impl="triton", deterministic=True)
        runs.append(torch.autograd.grad(rows, group.cores, grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu  # a program a run is too much for the interpreter
def test_more_runs_of_one_table_than_the_second_side_of_a_grid_has_programs(device):
    group = Group("kaggle", device)
    tables = torch.randint(group.tables, (70_000, 1), device=device)
    rows = torch.tensor(group.rows, device=device)[tables]
    ids = (torch.rand(70_000, 2, device=device, dtype=torch.float64) * rows).long()
    got = tt_vectors(*group.arguments, tables, ids, precision="ieee", impl="triton")
    close(got, group.reference(ids, tables)[1], ROUNDING["ieee"])


# The interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_cores(way, device, monkeypatch):
    group = Group("kaggle", device, torch.bfloat16)
    ids = group.ids(1000)
    got = tt_vectors(*group.arguments, group.index(), ids, **take(monkeypatch, way))
    cores, want = group.reference(ids, group.index())
    assert got.dtype == torch.bfloat16
    close(got, want, 2e-2)
    grad = torch.randn_like(got)
    gradients = torch.autograd.grad(got, group.cores, grad)
    for k, gradient in enumerate(torch.autograd.grad(want, cores, grad.double())):
        assert gradients[k].dtype == torch.bfloat16
        close(gradients[k], gradient, 2e-2, f"core {k}")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LARGE)
def test_products_of_cores_may_be_kept_in_bf16(name, way, device, monkeypatch):
    group = Group(name, device)
    check_rows_and_gradients(group, group.ids(1000), take(monkeypatch, way), "bf16")


@pytest.mark.gpu
def test_under_autocast_products_are_bf16_and_rows_are_not(device):
    group = Group("kaggle", device)
    arguments = *group.arguments, group.index(), group.ids(1000)
    with torch.autocast(device.type, torch.bfloat16):
        rows = tt_vectors(*arguments, impl="triton")
    assert rows.dtype == torch.float32
    assert torch.equal(rows, tt_vectors(*arguments, impl="triton", precision="bf16"))
    exact = tt_vectors(*arguments, impl="triton", precision="ieee")
    assert (rows - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.gpu
def test_precision_is_what_torch_says_or_the_caller(device):
    group = Group("readme", device)
    ids = group.ids(4096)
    want = group.reference(ids, group.index())[1].detach()

    def error(**options) -> float:
        with torch.no_grad():
            got = tt_vectors(*group.arguments, group.index(), ids, **options)
        return float((got.double() - want).norm() / want.norm())

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert error() < 2e-6
        assert error(precision="tf32x3") < 2e-5
        assert 1e-4 < error(precision="tf32") < 3e-3
        torch.set_float32_matmul_precision("high")
        assert 1e-4 < error() < 3e-3
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("way", WAYS)
def test_training_follows_the_reference_without_drift(way, device, monkeypatch):
    group = Group("kaggle" if GPU else "d3", device)
    steps, batch = (1000, 4096) if GPU else (8, 20)
    options = take(monkeypatch, way)
    ours = [core.detach().clone().requires_grad_() for core in group.cores]
    theirs = [core.detach().double().clone().requires_grad_() for core in group.cores]
    lr = torch.tensor(0.01, device=device)
    for _ in range(steps):
        ids = group.ids(batch, "skewed")
        target = torch.sin(ids.double())[..., None]
        rest = group.arguments[1:]
        loss = tt_vectors(ours, *rest, group.index(), ids, precision="ieee", **options) - target
        grads = torch.autograd.grad(loss.square().mean(), ours)
        update_dense("sgd", ours, grads, [()] * len(ours), lr=lr, impl="triton")
        loss = tt_vectors_torch(theirs, *rest, group.index(), ids) - target
        for core, grad in zip(
            theirs, torch.autograd.grad(loss.square().mean(), theirs), strict=True
        ):
            core.data -= 0.01 * grad
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert not torch.equal(a, group.cores[k])
        close(a, b.detach(), 1e-4, f"core {k}")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_cuda_graph_replays_on_new_ids(way, device, monkeypatch):
    group = Group("kaggle", device)
    options = take(monkeypatch, way) | {"precision": "ieee"}
    ids = group.ids(3000)
    grad = torch.randn(group.tables, 3000, group.dim, device=device)

    def step() -> tuple[Tensor, ...]:
        rows = tt_vectors(*group.arguments, group.index(), ids, **options)
        return rows.detach(), *torch.autograd.grad(rows, group.cores, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
    for kind in ("uniform", "equal", "skewed"):
        ids.copy_(group.ids(3000, kind))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        cores, want = group.reference(ids, group.index())
        close(results[0], want.detach(), ROUNDING["ieee"])
        for k, gradient in enumerate(torch.autograd.grad(want, cores, grad.double())):
            close(results[1 + k], gradient, 10 * ROUNDING["ieee"], f"core {k}")


def test_many_ids_are_merged_where_a_map_of_all_rows_is_small(device):
    small, huge = (
        factor_layout(TTShape(torch.tensor([[side] * 3], device=device), (2, 2, 2), (1, 2, 2, 1)))
        for side in (100, 1000)
    )
    assert op._strategy(small, 30_000, False) == "unique"
    assert op._strategy(small, 30_000, True) == "ordered"
    assert op._strategy(small, 3_000, False) == "direct"
    assert op._strategy(huge, 30_000, False) == "direct"
    tall_p = torch.tensor([[2, 2, 40_000]], device=device)
    tall = factor_layout(TTShape(tall_p, (2, 2, 2), (1, 2, 2, 1)))
    assert op._strategy(tall, 30_000, False) == "direct"  # each right factor has few ids
    assert op._strategy(tall, 50_000, False) == "unique"
    torch.use_deterministic_algorithms(True)
    try:
        assert op._strategy(small, 30_000, None) == "ordered"
    finally:
        torch.use_deterministic_algorithms(False)
    assert op._strategy(small, 30_000, None) == "unique"


def test_errors_name_the_remedy(device):
    group = Group("d3", device)
    ids = group.ids(3)
    with pytest.raises(ValueError, match="did you mean 'tf32'"):
        tt_vectors(*group.arguments, group.index(), ids, impl="triton", precision="tf23")
    cores = [core.double() for core in group.cores]
    with pytest.raises(ValueError, match="2 to 4 cores of float32 or bfloat16; leave out impl"):
        tt_vectors(cores, *group.arguments[1:], group.index(), ids, impl="triton")
    offsets = torch.arange(4, device=device)
    with pytest.raises(ValueError, match="mode is 'max', it must be sum or mean"):
        tt_bags(*group.arguments, ids[0], offsets, mode="max")
    with pytest.raises(ValueError, match="weights need mode sum"):
        tt_bags(*group.arguments, ids[0], offsets, torch.ones(3, device=device), mode="mean")
    with pytest.raises(ValueError, match=r"weights have shape \(2,\), they must have that of ids"):
        tt_bags(*group.arguments, ids[0], offsets, torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"ids must be integers, got torch\.float32"):
        tt_vectors(*group.arguments, group.index(), ids.float())
    with pytest.raises(ValueError, match=r"offsets must be integers, got torch\.float32"):
        tt_bags(*group.arguments, ids[0], offsets.float())
    with pytest.raises(ValueError, match=r"skip is torch\.int64 .*, it must be bool"):
        tt_vectors(*group.arguments, group.index(), ids, skip=ids.long())
    tables = group.tables
    with pytest.raises(ValueError, match=rf"offsets are {tables + 2}, they must be {tables} \* B"):
        tt_bags(*group.arguments, ids[0], torch.zeros(tables + 2, dtype=torch.long, device=device))
    alone = Group("d2-tall", device)
    with pytest.raises(ValueError, match=r"offsets are 0, they must be 1 \* B"):
        tt_bags(*alone.arguments, ids[0, :0], ids[0, :0])
    huge = torch.tensor([[1 << 16, 1 << 16, 1]], device=device)
    with pytest.raises(ValueError, match=r"4294967296 pairs .* more balanced factors p"):
        tt_vectors(
            group.cores, TTShape(huge, group.q, group.ranks), group.index()[:1], ids[:1],
            impl="triton",
        )  # fmt: skip
