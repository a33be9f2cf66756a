import re

import pytest
import torch
from torch import nn

from dlrm.data.schema import HASHED
from dlrm.embeddings import Embedding, EmbeddingBag, available, build
from dlrm.kernels.lookup.pool import pool_bags_torch
from dlrm.utils.bags import Bags
from dlrm.utils.offsets import row_offsets


def test_a_kind_is_named_after_its_file():
    kinds = available()
    assert {"dense", "hash", "qr", "block", "drop"} <= set(kinds)
    for name, kind in kinds.items():
        assert issubclass(kind, Embedding)
        assert kind.kind() == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3, 4, 5], [0, 2, 7]), "offsets must rise from 0 to the number of ids"),
        (([1, 2, 3, 4, 5], [0, 2, 3]), "offsets must rise from 0 to the number of ids"),
        (([1, 2, 3, 4, 5], [1, 2, 5]), "offsets must rise from 0 to the number of ids"),
        (([1, 2, 3, 4, 5], [0, -1, 5]), "offsets must rise from 0 to the number of ids"),
        (([1, 2, 3, 4, 5], [0, 6, 5]), "offsets must rise from 0 to the number of ids"),
        (([[1, 2]],), r"ids have shape \(1, 2\), without offsets they must be \[2, B\]"),
        (([1, 2],), r"ids have shape \(2,\), without offsets"),
        (([1, 2], [0, 1, 1, 2]), r"ids must be \[nnz\] and offsets \[2 \* B \+ 1\]; got \(2,\)"),
        (([[1], [2]], [0, 1, 2]), r"with offsets, ids must be \[nnz\]"),
        (([1, 2], [[0], [1], [2]]), r"and offsets \[2 \* B \+ 1\]; got \(2,\) and \(3, 1\)"),
        (([[1], [2]], None, [1.0, 2.0]), r"weights have shape \(2,\), .* ids, \(2, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arguments, message):
    tensors = [None if values is None else torch.tensor(values) for values in arguments]
    with pytest.raises(ValueError, match=message):
        build("dense", [10, 10], 4)(*tensors)


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_weights_need_sum(mode):
    with pytest.raises(ValueError, match=f"per_sample_weights need mode sum, the mode is {mode}"):
        build("dense", [5], 4, mode=mode)(torch.tensor([[1]]), None, torch.tensor([[1.0]]))


def test_checks_may_be_turned_off():
    group = build("hash", [5], 4, rows=3, check_ids=False)
    torch.testing.assert_close(group(torch.tensor([[7]])), group(torch.tensor([[1]])))


def test_row_offsets():
    assert row_offsets([3, 1, 5]).tolist() == [0, 3, 4]


def test_the_gradient_of_max_goes_to_the_first_of_equal_entries():
    vectors = torch.tensor([[1.0, 5.0], [2.0, 5.0], [2.0, 4.0], [7.0, 7.0]], requires_grad=True)
    bags = Bags(torch.arange(4), torch.tensor([0, 0, 3, 4]))
    out = pool_bags_torch(vectors, bags, 3, mode="max").squeeze(0)
    assert out.tolist() == [[0, 0], [2, 5], [7, 7]]
    out.sum().backward()
    assert vectors.grad.tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]


def test_the_drop_in_is_the_original_for_dense_tables():
    ours, original = EmbeddingBag(50, 6), nn.EmbeddingBag(50, 6)
    assert ours.embedding.mode == original.mode == "mean"
    ours.embedding.load_dense([original.weight])
    ids, offsets = torch.randint(50, (20,)), torch.tensor([0, 3, 3, 11])
    for module in (ours, original):
        module(ids, offsets).square().sum().backward()
    torch.testing.assert_close(ours(ids, offsets), original(ids, offsets))
    torch.testing.assert_close(ours.embedding.weight.grad, original.weight.grad)


def test_the_drop_in_takes_a_dtype_and_trained_rows():
    weight = torch.randn(50, 6)
    bag = EmbeddingBag(50, 6, _weight=weight, dtype=torch.float64)
    assert bag(torch.tensor([[7]])).dtype == torch.float64
    frozen = EmbeddingBag.from_pretrained(weight, kind="block", dim=6, mode="sum")
    torch.testing.assert_close(frozen(torch.tensor([[7, 8]]))[0], weight[7] + weight[8])
    assert not any(p.requires_grad for p in frozen.parameters())
    thawed = EmbeddingBag.from_pretrained(weight, freeze=False)
    assert all(p.requires_grad for p in thawed.parameters())


def test_bags_of_no_columns_are_empty():
    out = EmbeddingBag(50, 6)(torch.zeros(3, 0, dtype=torch.int64))
    assert out.shape == (3, 6)
    assert not out.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 1.0}, "max_norm and scale_grad_by_freq are not supported"),
        ({"scale_grad_by_freq": True}, "max_norm and scale_grad_by_freq are not supported"),
        ({"padding_idx": 50}, "padding_idx 50 is outside 50 rows"),
        ({"padding_idx": -51}, "padding_idx -51 is outside 50 rows"),
        ({"kind": "qr", "collision": 2}, "did you mean 'collisions'"),
    ],
)
def test_the_drop_in_refuses_what_no_kind_has(options, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(50, 6, **options)


@pytest.mark.parametrize(
    ("ids", "offsets", "weights", "message"),
    [
        ([[1, 2]], [0], None, "offsets must be None for 2-D input"),
        ([1, 2], None, None, "1-D input needs 1-D offsets"),
        ([1, 2], [[0]], None, "1-D input needs 1-D offsets"),
        (1, [0], None, "input has 0 dimensions, it must have 1 or 2"),
        ([1, 2], [1], None, "offsets must rise from 0 to the number of ids, 2; got"),
        ([1, 2], [0, 2, 1], None, "offsets must rise from 0"),
        ([1, 2], [0, 3], None, "offsets must rise from 0"),
        ([1, 2], [0.0, 1.0], None, "offsets must be integers, got torch.float32"),
        ([[0, 0]] * 2, None, [1.0] * 4, r"have shape \(4,\), they must have the shape of the ids"),
        ([[1, 2]], None, [[1, 1]], "are torch.int64, they must be torch.float32 like the rows"),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_the_drop_in_refuses_what_does_not_fit(kind, ids, offsets, weights, message):
    given = [None if x is None else torch.tensor(x) for x in (ids, offsets, weights)]
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(50, 6, mode="sum", kind=kind)(*given)
    none = torch.tensor([], dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets need at least the last offset"):
        EmbeddingBag(50, 6, kind=kind, include_last_offset=True)(none, none)


def test_the_drop_in_has_the_attributes_of_the_original():
    arguments = {"mode": "max", "sparse": True, "include_last_offset": True, "padding_idx": -1}
    ours, original = EmbeddingBag(7, 4, **arguments), nn.EmbeddingBag(7, 4, **arguments)
    plain = ("num_embeddings", "embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq")
    for name in (*plain, *arguments):
        assert getattr(ours, name) == getattr(original, name)


def test_the_drop_in_has_zeros_at_the_padding_as_the_original():
    bag, original = EmbeddingBag(7, 4, padding_idx=-2), nn.EmbeddingBag(7, 4, padding_idx=-2)
    assert torch.equal(bag.weight == 0, original.weight == 0)
    given = torch.ones(7, 4)
    assert torch.equal(EmbeddingBag.from_pretrained(given, padding_idx=0).weight, given)
    assert EmbeddingBag(7, 4, padding_idx=0, device="meta").weight.is_meta


def test_the_drop_in_has_the_weight_of_the_original():
    bag = EmbeddingBag(7, 4, mode="sum")
    nn.init.ones_(bag.weight)
    assert bag(torch.tensor([[1, 2]])).tolist() == [[2.0] * 4]
    small = EmbeddingBag(7, 4, kind="hash", rows=2)
    assert small.weight.shape == (7, 4)
    torch.testing.assert_close(small.weight[5:6], small(torch.tensor([[5]])))


@pytest.mark.parametrize(
    ("kind", "options"), [("dense", {}), ("block", {"dim": 4}), ("offload", {})]
)
def test_the_drop_in_loads_what_the_original_saved(kind, options):
    """Inside a model, and what it saves itself it loads too."""
    original = nn.ModuleDict({"bag": nn.EmbeddingBag(7, 4), "top": nn.Linear(4, 1)})
    ours, again = (
        nn.ModuleDict({"bag": EmbeddingBag(7, 4, kind=kind, **options), "top": nn.Linear(4, 1)})
        for _ in range(2)
    )
    ours.load_state_dict(original.state_dict())
    again.load_state_dict(ours.state_dict())
    ids = torch.randint(7, (5, 3))
    for model in (ours, again):
        torch.testing.assert_close(model["bag"](ids), original["bag"](ids))
    with pytest.raises(ValueError, match="dense tables have shapes"):
        ours["bag"].load_state_dict({"weight": torch.zeros(8, 4)})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["dense", "qr"])
def test_the_drop_in_refuses_to_load_without_memory(kind, assign):
    with torch.device("meta"):
        model = nn.ModuleDict({"bag": EmbeddingBag(7, 4, kind=kind)})
    saved = {"bag.weight": torch.ones(7, 4)}
    with pytest.raises(ValueError, match=r"bag.weight can't be fitted to a table on the meta dev"):
        model.load_state_dict(saved, assign=assign)


@pytest.mark.parametrize("kind", sorted(available()))
def test_the_drop_in_looks_up_in_a_replica_of_data_parallel(kind):
    """Which has tensors in the place of parameters, and a StopIteration would tell nothing."""

    def replica(module):
        twin = module._replicate_for_data_parallel()  # as torch.nn.parallel.replicate, on a CPU
        twin._modules = {name: child and replica(child) for name, child in twin._modules.items()}
        twin.__dict__.update(module._parameters)
        return twin

    bag, ids = EmbeddingBag(7, 4, mode="sum", kind=kind), torch.tensor([[1, 2]])
    for weights in (None, torch.rand(1, 2)):
        assert torch.equal(replica(bag)(ids, None, weights), bag(ids, None, weights))


@pytest.mark.parametrize("kind", ["dense", "robe", "cafe", "paged", "tt"])
def test_tables_from_the_meta_device_are_given_no_memory(kind):
    """Where rows lie is not in the state dict: robe would look up others, and say nothing."""
    model = nn.Sequential(EmbeddingBag(50, 8, kind=kind)).to("meta")
    with pytest.raises(ValueError, match="create them on a real device"):
        model.to_empty(device="cpu")


BAD_OPTIONS = [  # of two tables of 10 rows of 16 weights
    ("hash", {"rows": 0}, "hash rows is 0; set --hash.rows to 1 or more"),
    *(("robe", {"block": n}, f"block is {n}; set --robe.block to a divisor") for n in (0, 3, 24)),
    ("robe", {"rows": 0}, "robe rows is 0; set --robe.rows to 1 or more"),
    ("qr", {"collisions": 0}, "qr collisions is 0; set --qr.collisions to 1 or more"),
    ("qr", {"operation": "mult"}, "is 'mult'; set --qr.operation to one of multiply, add"),
    *(("block", {"dim": n}, f"dim is {n}; set --block.dim to 1 .. 16") for n in (0, 17)),
    *(("short", {"dim": n}, f"short dim is {n}; set --short.dim to 1 .. 16") for n in (0, 17)),
    ("basis", {"parts": 3}, "parts is 3; set --basis.parts to a divisor of the embedding dim, 16"),
    ("basis", {"clusters": 0}, "basis clusters is 0; set --basis.clusters to 1 .. 65,536"),
    ("basis", {"clusters": 70_000}, "basis clusters is 70000"),
    ("cafe", {"rows": 0}, "cafe rows is 0; set --cafe.rows to 1 or more"),
    ("cafe", {"hot": 1.5}, "cafe hot is 1.5, it must be between 0 and 1; set --cafe.hot"),
    ("cafe", {"pieces": 3}, "set --cafe.pieces to a divisor of the embedding dim, 16"),
    ("cafe", {"half_life": 0}, "cafe half_life is 0; set --cafe.half_life to 1 or more"),
    *(("drop", {"keep": n}, "set --drop.keep to a number of ids") for n in (-1, [4, -1], [4])),
    ("drop", {"keep": [[4], 5]}, "set --drop.keep to a number of ids"),
    ("offload", {"cache_rows": -1}, "cache_rows is -1, it must not be negative"),
    ("offload", {"cache_share": 1.5}, "cache_share is 1.5, it must be between 0 and 1"),
    ("offload", {"half_life": 0}, "half_life is 0, it must be above 0"),
    ("offload", {"dtype": "int4"}, "rows in host memory have no int4: set --tables.dtype int8"),
    ("paged", {"page_size": 0}, "page_size is 0; set --paged.page_size to 1 or more"),
    ("paged", {"placement": "cylic"}, "unknown placement 'cylic', did you mean 'cyclic'"),
    ("paged", {"devices": ["gpu"]}, "paged.devices contains 'gpu'; each must be cuda:0"),
    ("paged", {"devices": ["cpu+hots"]}, "paged.devices contains 'cpu+hots'; each must be"),
    ("paged", {"devices": ["cuda:99"]}, "contains 'cuda:99', but this machine has"),
    ("dynamic", {"evict": "mru"}, "set --dynamic.evict to one of lfu, lru, age, score"),
    ("dynamic", {"rows": 0}, "rows is 0: set --dynamic.rows to 1 or more"),
    ("dynamic", {"rows": [5]}, "a list of one for each of the 2 tables"),
    ("dynamic", {"shared": 0}, "shared is 0; set --dynamic.shared to 1 or more"),
    ("dynamic", {"half_life": 0}, "half_life is 0; set --dynamic.half_life"),
    ("dynamic", {"chance": 0.0}, "chance is 0.0, it must be above 0, at most 1"),
    ("dynamic", {"cache_share": 2.0}, "cache_share is 2.0, it must be between 0 and 1"),
    ("tt", {"rank": 0}, "rank must be at least 1, got 0: set --tt.rank 32"),
    ("tt", {"d": 1}, "at least 2 cores, got d 1: set --tt.d 3"),
    ("tt", {"d": 10_000}, "at most 63 cores, got d 10000: set --tt.d 3"),
    (
        "tt",
        {"q": [4, 4]},
        "q is [4, 4], it must have d = 3 factors of at least 1: change --tt.q or",
    ),
    ("tt", {"q": [4, -2, -2]}, "q is [4, -2, -2], it must have d = 3 factors of at least 1"),
    ("tt", {"q": [2, 2, 2]}, "product is 8; it must be the dim, 16: set --tt.q 2 2 4"),
    ("tt", {"p": [2, 5]}, "p is [2, 5], it must have d = 3 factors of at least 1: change --tt.p"),
    ("tt", {"p": [1, 3, 3]}, "product is 9; it must be at least the rows of the table, 10: set"),
    ("tt", {"cache_rows": -1}, "cache_rows is -1: set --tt.cache_rows 0"),
    ("tt", {"cache_rows": 5, "cache_first": 6}, "6: set --tt.cache_first to a number of ids, 0 or"),
    ("tt", {"cache_rows": 5, "cache_first": -1}, "cache_first is -1: set --tt.cache_first"),
    ("tt", {"cache_rows": 5, "cache_window": 0}, "cache_window is 0, it must be at least 1"),
    ("tt", {"cache_rows": 5, "cache_decay": 1.5}, "cache_decay is 1.5, it must be between 0 and 1"),
    ("dynamic", {"cache_share": 1.0, "evict": "score"}, "leave out --dynamic.cache_share"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_options_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind, [10, 10], 16, **options)


@pytest.mark.parametrize(
    ("kind", "sizes", "dim", "options", "message"),
    [
        (
            "hsah",
            [10],
            4,
            {},
            r"unknown embedding kind 'hsah', did you mean 'hash'\? valid: .*dense",
        ),
        ("hash", [10], 4, {"row": 3}, r"kind hash has no option 'row', did you mean 'rows'\?"),
        ("dense", [10], 4, {"zzz": 3}, r"no option 'zzz'; valid: check_ids, dtype, mode"),
        ("dense", [], 4, {}, r"every table needs at least one row, got \[\]"),
        ("dense", [3, 0], 4, {}, r"every table needs at least one row, got \[3, 0\]"),
        ("dense", [3], 0, {}, "embedding_dim must be at least 1, got 0"),
        ("dense", [3], 4, {"mode": "avg"}, "mode is 'avg', it must be one of sum, mean, max"),
        ("qr", [10], 1, {"operation": "concat"}, "qr concat needs an embedding_dim of at least 2"),
        ("offload", [2**30, 2**30], 1, {}, r"2,147,483,648 rows together, offload takes up to"),
        ("dynamic", [HASHED], 1, {"rows": 2**31}, r"dynamic takes up to 2\^31 - 1"),
    ],
)
def test_kinds_and_sizes_that_cannot_be_are_refused(kind, sizes, dim, options, message):
    with pytest.raises(ValueError, match=message):
        build(kind, sizes, dim, **options)
