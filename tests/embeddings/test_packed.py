"""Groups of tables in int8 and int4."""

import copy

import pytest
import torch

from dlrm.embeddings import EmbeddingBag, available, build
from dlrm.embeddings.common.budget import row_bytes
from dlrm.embeddings.shared_rows import SharedRows
from dlrm.kernels.update.packed import packed_rows, read_rows
from dlrm.optim import RowOptimizer
from dlrm.sparse_arch.arch import SparseArch
from tests.kit import first

SIZES = [1, 3, 40, 131]
CASES = {  # a kind, and for some also a name of its options
    "dense": {},
    "drop": {"keep": 9},
    "hash": {"rows": 13},
    "block": {"dim": 4, "keep": 30},
    "short": {"dim": 4, "keep": 30},
    "robe": {"rows": 13},
    "cafe": {"rows": 40},
    "qr": {"collisions": 9},
    "qr add": {"collisions": 9, "operation": "add"},
    "qr concat": {"collisions": 9, "operation": "concat"},
}
QR = [case for case in CASES if case.startswith("qr")]
every_kind = pytest.mark.parametrize("kind", CASES)
row_by_row = pytest.mark.parametrize("kind", ["dense", "drop", "hash", "block", *QR])
every_dtype = pytest.mark.parametrize("dtype", ["int8", "int4"])


def make(kind, dtype=None, **common):
    """A group of one of the cases."""
    return build(kind.split()[0], SIZES, 8, dtype=dtype, **CASES[kind], **common)


def packed_names(group):
    """The parameters with packed rows."""
    return [name for name, p in group.named_parameters() if packed_rows(p) is not None]


def pair(kind, dtype, device="cpu", **common):
    """A packed group, and one in fp32 that holds the same rows."""
    packed, plain = (make(kind, own, **common).to(device) for own in (dtype, None))
    packed.load_dense([torch.randn(rows, 8, device=device) for rows in SIZES])
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            other = packed.get_parameter(name)
            rows = torch.arange(len(other), device=device)
            weight.copy_(read_rows(other, rows) if packed_rows(other) else other)
        for table, own in enumerate(plain.num_kept if isinstance(plain, SharedRows) else ()):
            ids = torch.arange(own, device=device)  # those of int4 lie in another order
            rows = SharedRows.vectors(packed, packed._tables[table], ids)
            for at, part in plain.rows_to_write(table):
                part.copy_(rows[at : at + len(part)])
    return packed, plain


@every_kind
@every_dtype
def test_rows_are_those_of_dense_tables_rounded(kind, dtype, device):
    weights = [torch.randn(rows, 8, device=device) for rows in SIZES]
    packed, plain = (make(kind, own).to(device) for own in (dtype, None))
    packed.load_dense(weights)
    plain.load_dense(weights)
    for table in range(len(SIZES)):
        off = packed.to_dense(table) - plain.to_dense(table)
        rows = plain.to_dense(table)
        deviation = rows[rows != 0].std() if SIZES[table] > 1 else 1
        assert off.square().mean().sqrt() < {"int8": 0.01, "int4": 0.12}[dtype] * deviation


@row_by_row
@every_dtype
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_gradients_are_those_of_the_rows(kind, dtype, mode, device):
    packed, plain = pair(kind, dtype, device, mode=mode)
    lengths = torch.randint(4, (len(SIZES), 5), device=device)
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    ids = torch.cat(
        [
            torch.randint(rows, (int(n),), device=device)
            for rows, n in zip(SIZES, lengths.sum(1), strict=True)
        ]
    )
    one_hot = torch.stack([torch.randint(rows, (6,), device=device) for rows in SIZES])
    for given in ((one_hot,), (ids, offsets)):
        found, expected = packed(*given), plain(*given)
        torch.testing.assert_close(found, expected)
        grad = torch.randn_like(found)
        ours = torch.autograd.grad(found, [*packed.parameters()], grad)
        theirs = torch.autograd.grad(expected, [*plain.parameters()], grad)
        for name, mine, other in zip(dict(packed.named_parameters()), ours, theirs, strict=True):
            mine, other = mine.to_dense(), other.to_dense()
            if name == "weight":  # in another order of rows
                mine, other = (each.norm(dim=1).sort()[0] for each in (mine, other))
            torch.testing.assert_close(mine, other)


def losses(kind, dtype, device):
    """Of training to a common target by many small steps: most are below a scale."""
    torch.manual_seed(0)
    own = {"rank": 3, "keep": 9}
    group = build(kind, SIZES, 8, dtype=dtype, **own) if kind == "tt" else make(kind, dtype)
    group = group.to(device)
    optimizer = RowOptimizer(group.parameters(), "rowwise_adagrad", lr=0.02)
    target = torch.randn(len(SIZES), 8, device=device) / 4
    found = []
    for _ in range(150):
        ids = torch.stack([torch.randint(rows, (64,), device=device) for rows in SIZES])
        loss = (group(ids) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found[0], sum(found[-20:]) / 20


@first("kind", ["dense", "tt", *(kind for kind in CASES if kind != "dense")], slow=pytest.mark.slow)
def test_training_moves_rows_as_in_fp32(kind, device):
    _, exact = losses(kind, None, device)
    for dtype, bound in (("int8", 0.02), ("int4", 0.05)):
        first, last = losses(kind, dtype, device)
        assert last < exact + bound * first
        assert kind == "short" or last < first / 2


@every_kind
@every_dtype
def test_state_dict_copies_and_moves(kind, dtype, device):
    group = make(kind, dtype)
    names = [name for name, _ in group.named_parameters()]
    every = [group.to_dense(table) for table in range(len(SIZES))]
    state = {name: value.clone() for name, value in group.state_dict().items()}
    packed = packed_names(group)
    assert all(state[name].dtype == torch.uint8 for name in packed)
    assert sum(v.nbytes for v in state.values()) == sum(sum(f.values()) for f in group.footprint())
    twin = make(kind, dtype)
    twin.load_state_dict(state)
    held = twin.get_parameter(packed[0])
    for other in (twin, copy.deepcopy(group), twin.to(device).to(torch.bfloat16).float()):
        assert [name for name, _ in other.named_parameters()] == names
        if kind != "block":
            for table, rows in enumerate(every):
                assert torch.equal(other.to_dense(table).cpu(), rows)
    assert twin.get_parameter(packed[0]) is held, "an optimizer may hold it"
    with pytest.raises(RuntimeError, match="create the tables with the dtype of the saved ones"):
        twin.load_state_dict({**state, packed[0]: torch.zeros(3)})
    with pytest.raises(RuntimeError, match=rf"Missing key.*{packed[0]}"):
        twin.load_state_dict({k: v for k, v in state.items() if k != packed[0]})
    with torch.device("meta"):
        meta = make(kind, dtype)
    assert meta.footprint() == group.footprint()


@pytest.mark.parametrize(
    "kind", sorted(available().keys() - {*CASES, "dynamic", "offload", "qr", "tt"})
)
@every_dtype
def test_other_kinds_are_refused(kind, dtype):
    with pytest.raises(ValueError, match=f"--emb {kind} has no {dtype} rows: set --tables.dtype"):
        build(kind, SIZES, 8, dtype=dtype)


def test_dense_gradients_and_unknown_types_are_refused():
    with pytest.raises(ValueError, match="int4 rows have sparse gradients only: set sparse=True"):
        build("dense", SIZES, 8, dtype="int4", sparse=False)
    with pytest.raises(ValueError, match="dtype is 'int5', it must be one of int8, int4"):
        build("dense", SIZES, 8, dtype="int5")
    weight = build("dense", SIZES, 8, dtype="int8").weight
    weight.grad = torch.zeros(len(weight), 8)
    with pytest.raises(ValueError, match="need sparse gradients: this one is dense"):
        RowOptimizer([weight], "sgd").step()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "adam"])
@pytest.mark.parametrize(("dtype", "ratio"), [("int8", 3.0), ("int4", 5.0)])
def test_bytes_in_training(dtype, ratio, optimizer):
    rows = [10_000, 300]
    groups = [build("dense", rows, 16, dtype=own) for own in (None, dtype)]
    sizes = [
        sum(sum(f.values()) for f in group.footprint())
        + RowOptimizer(group.parameters(), optimizer).state_bytes(group.parameters())
        for group in groups
    ]
    if optimizer != "adam":  # its two numbers per weight stay in fp32
        assert sizes[0] / sizes[1] > ratio
    assert sizes[0] > sizes[1]


def test_bytes_of_rows():
    assert [row_bytes(16, dtype) for dtype in ("fp32", "bf16", "int8", "int4")] == [64, 32, 18, 11]
    assert [row_bytes(128, dtype) for dtype in ("int8", "int4")] == [130, 74]


def test_one_row_in_eight_of_int4_has_8_bits_the_first_ones():
    group = build("dense", [4, 12, 400], 16, dtype="int4")
    assert group.num_wide == (4, 12, 36)
    assert build("dense", [16], 16, dtype="int4").num_wide == (2,)
    qr = make("qr", "int4")  # many ids share a remainder row
    assert (qr.quotient.packed.format, qr.remainder.packed.format) == (4, 8)
    drop = build("drop", [400], 16, keep=15, dtype="int4")
    assert drop.num_wide == (2,)
    drop.load_dense([torch.linspace(0.5, 1, 400)[:, None].expand(400, 16)])
    table, mean = drop.to_dense(), torch.linspace(0.5, 1, 400)[15:].mean()
    assert (table[15:] - mean).abs().max() < 0.004, "the row that ids share has 8 bits"


def test_tables_of_a_plan_have_types_of_their_own():
    plan = [("dense", {"dtype": "int8"}), ("dense", {}), ("drop", {"keep": 5, "dtype": "bf16"})]
    plan += [("dense", {"dtype": "fp32"})]
    arch = SparseArch(SIZES, 8, plan, dtype="int4")
    kinds = {slots[0]: (group.dtype, group.weight.dtype) for group, slots in arch.embeddings()}
    assert kinds[0][0] == "int8"
    assert kinds[1][0] == "int4"
    assert kinds[2] == (None, torch.bfloat16)
    assert kinds[3] == (None, torch.float32)
    assert [sum(table.values()) for table in arch.footprint()] == [10, 18, 6 * 16, 131 * 32]


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "int4"])
def test_embedding_bag_takes_the_type(dtype):
    bag = EmbeddingBag(50, 8, dtype=dtype, sparse=True, padding_idx=3, mode="sum")
    plain = torch.nn.EmbeddingBag(50, 8, padding_idx=3, mode="sum")
    assert bag.weight[3].eq(0).all()
    bag.load_state_dict(plain.state_dict())
    ids = torch.randint(50, (6, 4))
    torch.testing.assert_close(bag(ids), plain(ids), atol=1.0, rtol=0)
    assert (bag.weight - plain.weight).abs().max() < 0.35
    assert 4 * 50 * 8 / bag.footprint()["weights"] > 3
    with pytest.raises(ValueError, match="sparse gradients only: set sparse=True"):
        EmbeddingBag(50, 8, dtype=dtype)
    again = EmbeddingBag.from_pretrained(plain.weight.detach(), dtype=dtype, sparse=True)
    torch.testing.assert_close(again.weight, bag.weight)
