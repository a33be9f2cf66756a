import re

import pytest
import torch

from dlrm.embeddings.common.budget import DTYPES
from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import (
    KnownIds,
    format_ratio,
    format_table_plan,
    make_table_plan,
    owners_of,
    parse_bytes,
    with_pooling,
)
from tests.kit import combinations

NAMES = ["a", "b", "c", "d"]
NAMES_OF = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SIZES = [50, 4000, 7, 900]


def kinds_of(*args, **kwargs):
    return [kind for kind, _ in make_table_plan(NAMES, SIZES, 8, *args, **kwargs)]


def test_which_tables_are_compressed():
    assert kinds_of("tt", threshold=900) == ["dense", "tt", "dense", "tt"]
    assert kinds_of("tt", largest=1) == ["dense", "tt", "dense", "dense"]
    assert kinds_of("tt", threshold=900, kinds={"c": "hash", "b": "dense"}) == [
        *("dense", "dense", "hash", "tt")
    ]


def test_options_per_table():
    found = make_table_plan(
        NAMES, SIZES, 8, "tt", threshold=900, options={"tt": {"rank": {"b": 4, "default": 2}}}
    )
    assert found == [("dense", {}), ("tt", {"rank": 4}), ("dense", {}), ("tt", {"rank": 2})]


@combinations(
    slow=pytest.mark.slow,
    kind=["hash", "drop", "block", "robe", "cafe", "qr", "tt", "auto"],
    ratio=[3, 8, 40],
    dtype=DTYPES,
)
def test_a_budget_is_kept_and_used(kind, ratio, dtype):
    """In all types, the scales of packed rows included."""
    sizes, dense = [50, 40_000, 7, 9000], 64 * 49_057
    if (kind, ratio) == ("block", 40):
        return  # rows of one weight, and matrices, are more
    ids = KnownIds(counts=lambda: [torch.arange(rows, 0, -1) for rows in sizes])
    plan = make_table_plan(NAMES, sizes, 16, kind, budget=f"{ratio}x", dtype=dtype, ids=ids)
    used = SparseArch(sizes, 16, plan, dtype=dtype).sizes()["bytes"]
    least = 0 if ratio == 3 and dtype != "fp32" else 0.6 if kind in ("qr", "tt") else 0.8
    assert least * dense / ratio < used <= dense / ratio


def test_a_budget_that_all_dense_tables_fit_into_is_no_error():
    assert make_table_plan(NAMES, SIZES, 8, "hash", largest=0, budget="1x") == [
        ("dense", {})
    ] * len(NAMES)


def test_amounts_of_memory():
    assert parse_bytes("20MB", 0) == 20_000_000
    assert parse_bytes("1.5 KiB", 0) == 1536
    assert parse_bytes("4000", 0) == 4000
    assert parse_bytes("100x", 1000) == 10
    for ratio, text in {2.5: "2.5x", 10.0: "10x", 1e6: "1000000x", 1234567: "1234567x"}.items():
        assert format_ratio(ratio) == text
        assert parse_bytes(text, 10**12) == int(10**12 / ratio)
    assert format_ratio(1e-5) == "0.00001x"
    too_much = ("99999999999GB", "9" * 400, "0." + "0" * 30 + "1x")
    for text in ("much", "-3MB", "0", "5 parsecs", "", *too_much):
        with pytest.raises(ValueError, match="not an amount of memory"):
            parse_bytes(text, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": {"z": "tt"}}, "names table 'z'"),
        ({"kind": "hash", "threshold": 1000, "budget": "100B"}, "100B is 100 bytes, of which"),
        ({"kind": "hsh", "budget": "10KB"}, "unknown embedding kind 'hsh', did you mean 'hash'"),
        ({"kinds": {"a": "hsh"}}, "unknown embedding kind 'hsh', did you mean 'hash'"),
        ({"budget": "10KB", "kinds": {"a": "hash"}}, r"tables\.kinds exclude each other: drop one"),
        ({"options": {"tt": {"rank": {"z": 4}}}}, r"tt.rank names table 'z'; the data has a, b"),
        (
            {"options": {"tt": {"d": {"b": 2}}}, "budget": "3x"},
            r"with a budget all tables have the same tt.d",
        ),
        (
            {"options": {"tt": {"cache_decay": {"b": 0.5}, "cache_rows": 20}}, "budget": "3x"},
            r"with a budget all tables have the same tt.cache_decay",  # and one cache
        ),
        (
            {"options": {"tt": {"cache_rows": 4000}}, "budget": "30x"},
            r"used up by the cache of 4000 rows",
        ),
    ],
)
def test_options_that_cannot_be_met_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kinds_of(**{"kind": "tt"} | arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"d": 2},
        {"d": 4},
        {"q": [1, 1, 8]},
        {"p": [40, 40, 40]},
        {"cache_rows": 100},
        {"cache_rows": 50, "cache_window": 5000},
    ],
)
@pytest.mark.parametrize("ratio", [3, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_budget_counts_the_options_of_tt(options, ratio, dtype):
    sizes = [50, 40000, 7, 9000]
    wishes = {"options": {"tt": options}, "dtype": NAMES_OF[dtype]}
    found = make_table_plan(NAMES, sizes, 8, "tt", **wishes, budget=f"{ratio}x")
    arch = SparseArch(sizes, 8, found).to(dtype)
    kind, chosen = found[1]
    assert kind == "tt"
    assert options == {k: v for k, v in chosen.items() if k in options}
    assert chosen.keys() - options.keys() <= {"rank", "keep", "cache_first"}
    assert 0.5 / ratio <= arch.sizes()["bytes"] / (32 * sum(sizes)) <= 1 / ratio


def test_features_with_one_vocabulary_have_one_table():
    given = {"ids": KnownIds(owners=[0, 2, 2, 3]), "budget": "4x"}
    plan = make_table_plan(["a", "b", "c", "d"], [50, 4000, 4000, 900], 8, "hash", **given)
    assert plan[1] == ("shared", {"with": 2})
    rows = [50, *(plan[slot][1]["rows"] for slot in (2, 3))]
    assert 1000 < sum(rows) <= (50 + 4000 + 900) / 4, "the shared table counts once"
    assert owners_of(plan) == [0, 2, 2, 3]
    text = format_table_plan(["a", "b", "c", "d"], [50, 4000, 4000, 900], plan)
    assert re.search(r"b 4,000 +shared +with c$", text, re.MULTILINE)


def test_lists_are_pooled_as_given():
    plan = [("dense", {}), ("shared", {"with": 2}), ("hash", {"rows": 9}), ("dense", {})]
    names, lists = ["a", "b", "c", "d"], ["b", "d"]
    assert with_pooling(plan, names, lists, {}) == plan
    pooled = with_pooling(plan, names, lists, {"b": "mean", "default": "max"})
    assert [options.get("mode") for _, options in pooled] == [None, None, "mean", "max"]
    with pytest.raises(ValueError, match=r"tables\.pooling names 'a', which has no lists of ids"):
        with_pooling(plan, names, lists, {"a": "mean"})
    with pytest.raises(
        ValueError, match=r"pools 'c' by sum, but another list .* by mean: pool both"
    ):
        with_pooling(plan, names, ["b", "c"], {"b": "mean"})
