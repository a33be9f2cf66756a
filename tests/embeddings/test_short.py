"""Short rows: what is theirs beside the contract of all kinds."""

import pytest
import torch

from dlrm.embeddings import build
from dlrm.embeddings.common.context import LookupContext
from dlrm.kernels.lookup import source
from dlrm.kernels.lookup.pool import MODES
from dlrm.optim import RowOptimizer
from tests.kit import combinations


def test_zeros_follow_the_weights():
    group = build("short", [50, 9], 8, dim=3)
    for table in range(2):
        rows = group.to_dense(table)
        assert rows[:, :3].count_nonzero() == rows[:, :3].numel()
        assert not rows[:, 3:].any()


def test_rare_ids_share_the_row_that_is_stored_first():
    group = build("short", [50, 9], 8, dim=2, keep=[20, 9])
    rows = group.to_dense(0)
    assert (rows[20:] == rows[20]).all()
    assert len(rows[:, :2].unique(dim=0)) == 21
    assert len(group.to_dense(1).unique(dim=0)) == 9
    torch.testing.assert_close(group.weight[0, :2], rows[20, :2])  # and the others follow
    torch.testing.assert_close(group.weight[0, 2:], rows[:3, :2].reshape(-1))


@pytest.mark.parametrize(("dim", "keep"), [(1, 90), (2, 30), (3, 7), (8, 5)])
def test_every_row_has_a_place_of_its_own(dim, keep):
    group = build("short", [100], 8, dim=dim, keep=keep)
    assert len(group.to_dense().unique(dim=0)) == keep + 1
    assert len(group.weight) == -(-(keep + 1) // (8 // dim))


def test_an_update_moves_the_weights_of_the_ids_that_were_used():
    group = build("short", [50], 8, dim=2, keep=20)
    before = group.to_dense()
    optimizer = RowOptimizer(group.parameters(), "sgd", lr=1.0)
    group(torch.tensor([[3, 3, 30]])).sum().backward()
    optimizer.step()
    step = before - group.to_dense()
    expected = torch.zeros_like(before)
    expected[3, :2] = 2
    expected[20:, :2] = 1
    torch.testing.assert_close(step, expected)


@pytest.mark.parametrize(("dtype", "size"), [("int8", 18), ("int4", 10), (None, 64)])
def test_the_ids_of_a_stored_row_share_its_scale(dtype, size):
    """11 stored rows for 161 ids; the first of int4 has 8 bits."""
    group = build("short", [5000], 16, dim=1, keep=160, dtype=dtype)
    wide = 8 if dtype == "int4" else 0
    assert group.footprint() == [{"weights": 11 * size + wide}]


def bags_of(lengths, room=0):
    """Ids of bags of two tables of 50 and 9 ids, their offsets, and a factor per id."""
    torch.manual_seed(1)
    counts = lengths.view(2, -1).sum(1).tolist()
    ids = torch.cat([torch.randint(own, (n,)) for own, n in zip((50, 9), counts, strict=True)])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.cat([ids, ids.new_full((room,), 2**31 - 1)]), offsets, torch.rand(len(ids) + room)


FIXED = torch.tensor([3] * 4 + [2] * 4)
RAGGED = torch.tensor([0, 5, 1, 2, 4, 0, 1, 0])


@combinations(
    dtype=[None, "bf16", "int8", "int4"],
    lengths=[FIXED, RAGGED, RAGGED * 0],
    mode=["weighted", *MODES],
)
def test_kernels_pool_bags_as_pytorch_does(monkeypatch, device, dtype, lengths, mode):
    """Vectors and gradients; in a captured step there may be more ids than the offsets say."""
    results = []
    for kernels, room in ((False, 0), (True, 0), (True, 5)):
        torch.manual_seed(0)
        packed = None if dtype == "bf16" else dtype
        options = {"dim": 3, "keep": [20, 9], "mode": mode.replace("weighted", "sum")}
        group = build("short", [50, 9], 8, dtype=packed, check_ids=False, **options)
        group = group.bfloat16() if dtype == "bf16" else group
        ids, offsets, factors = bags_of(lengths, room)
        factors = factors.bfloat16() if dtype == "bf16" else factors
        given = (ids, offsets, factors) if mode == "weighted" else (ids, offsets)
        with monkeypatch.context() as patched:
            if kernels:
                group, given = group.to(device), [each.to(device) for each in given]
                patched.setattr(source, "use_triton", lambda *_: True)
            out = group(*given, context=LookupContext(padded=room > 0))
            arrived = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
            out.backward(arrived.to(out.dtype))
        entries = group.weight.grad
        rows, values = entries._indices()[0].cpu(), entries._values().float().cpu()
        used = rows >= 0  # an optimizer leaves out the others
        assert used.sum() == len(rows) - room
        grad = torch.zeros(entries.shape).index_add_(0, rows[used], values[used])
        results.append((out.detach().float().cpu(), grad))
    close = {"rtol": 0.02, "atol": 0.02} if dtype == "bf16" else {}
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], **close)


def test_a_scale_multiplies_the_weights():
    group = build("short", [50], 8, dim=2, keep=20, scale=3.0)
    torch.testing.assert_close(group.to_dense()[0, :2], 3 * group.weight[0, 2:4])
    weight = torch.randn(50, 8)
    fitted = type(group).from_dense([weight], dim=2, keep=20, scale=3.0).to_dense()
    torch.testing.assert_close(fitted[:20, :2], weight[:20, :2])
    with pytest.raises(
        ValueError, match=r"short scale is 0; set --short.scale to a number above 0"
    ):
        build("short", [50], 8, scale=0)
