import pytest
import torch

from dlrm.sparse_arch.arch import SparseArch
from dlrm.sparse_arch.table_plan import format_ratio, make_table_plan, parse_bytes

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


@pytest.mark.parametrize("kind", ["hash", "qr", "tt", "auto"])
@pytest.mark.parametrize("ratio", [3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_budget_is_kept_and_used(kind, ratio, dtype):
    sizes = [50, 40000, 7, 9000]
    dense = 4 * 8 * sum(sizes)
    counts = [torch.arange(rows, 0, -1) for rows in sizes]
    wishes = {"counts": lambda: counts, "dtype": NAMES_OF[dtype]}
    found = make_table_plan(NAMES, sizes, 8, kind, budget=f"{ratio}x", **wishes)
    arch = SparseArch(sizes, 8, found, dtype=NAMES_OF[dtype])
    total = sum(sum(parts.values()) for parts in arch.footprint())
    assert 0.6 * dense / ratio < total <= dense / ratio


def test_a_budget_that_all_dense_tables_fit_into_is_no_error():
    assert make_table_plan(NAMES, SIZES, 8, "hash", largest=0, budget="1x") == [
        ("dense", {})
    ] * len(NAMES)


def test_impossible_wishes_say_why():
    with pytest.raises(ValueError, match="names table 'z'"):
        kinds_of("tt", kinds={"z": "tt"})
    with pytest.raises(ValueError, match="used up by the dense tables"):
        kinds_of("hash", threshold=1000, budget="100B")
    with pytest.raises(ValueError, match=r"unknown embedding kind 'hsh', did you mean 'hash'"):
        kinds_of("hsh", budget="10KB")
    with pytest.raises(ValueError, match=r"unknown embedding kind 'hsh', did you mean 'hash'"):
        kinds_of("tt", kinds={"a": "hsh"})
    with pytest.raises(ValueError, match=r"budget and tables\.kinds exclude each other: drop one"):
        kinds_of("hash", budget="10KB", kinds={"a": "hash"})


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
        ({"largest": -1}, r"tables.largest is -1, it must not be negative"),
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
        make_table_plan(NAMES, SIZES, 8, "tt", **arguments)


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
