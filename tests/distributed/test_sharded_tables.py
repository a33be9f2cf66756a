"""What needs no other process; test_distributed.py has the rest."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dlrm.data.schema import HASHED
from dlrm.distributed.sharded_kinds import ShardedDense, ShardedDrop
from dlrm.distributed.sharding_plan import LARGE, LONG_AT_PEERS, make_sharding_plan
from dlrm.distributed.world import World
from dlrm.embeddings.dense import Dense
from dlrm.embeddings.drop import Drop

NAMES = ["a", "b", "c"]
SIZES = [300, 20, 150]
PLAN = [("dense", {}), ("dense", {}), ("tt", {"rank": 2})]
RECIPE = {"num_dense": 2, "num_embeddings": SIZES, "embedding_dim": 8, "plan": PLAN}


def test_which_tables_are_held_in_pieces(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world = World(rank=0, size=2)
    assert make_sharding_plan(World(), NAMES, RECIPE) is None
    assert make_sharding_plan(world, NAMES, RECIPE, by="replicate") is None
    for threshold, sharded in ((100, {0}), (10, {0, 1})):
        found = make_sharding_plan(world, NAMES, RECIPE, threshold=threshold)
        assert {shard.table for shard in found.shards} == sharded
    assert make_sharding_plan(world, NAMES, RECIPE, threshold=None) is None
    for dim, exchange, least in (
        (8, "auto", LARGE // 8),
        (8, "peers", LONG_AT_PEERS),
        (100, "peers", LARGE // 100),
    ):
        sizes = {"num_embeddings": [least, least - 1, 150], "embedding_dim": dim}
        large = {**RECIPE, **sizes}
        found = make_sharding_plan(world, NAMES, large, threshold=None, exchange=exchange)
        assert {shard.table for shard in found.shards} == {0}
    bags = make_sharding_plan(world, NAMES, RECIPE, lambda: [torch.tensor([2])] * 3, threshold=None)
    assert {p.table for p in bags.shards} == {0, 1}
    paged = {**RECIPE, "plan": [("paged", {"page_size": 64})] * 3}
    found = make_sharding_plan(
        world, NAMES, paged, by="row", tables={"b": "replicate"}, comm_dtype="bf16"
    )
    assert [(p.table, p.rows) for p in found.shards] == [
        *((0, (0, 128)), (0, (128, 300)), (2, (0, 64)), (2, (64, 150)))
    ]
    assert found.comm_dtype is torch.bfloat16
    assert "a rows 0-128" in found.text


def test_tables_are_placed_by_their_counted_load():
    recipe = {**RECIPE, "num_embeddings": [100] * 4, "plan": [("dense", {})] * 4}
    counts = [torch.tensor([load - 1, 1]) for load in (90, 10, 50, 50)]
    world = World(rank=0, size=2)
    found = make_sharding_plan(world, [*"abcd"], recipe, lambda: counts, by="table")
    held = {frozenset(p.table for p in found.shards if p.rank == rank) for rank in (0, 1)}
    assert held == {frozenset({0, 1}), frozenset({2, 3})}
    assert "50% of the look-ups" in found.text


INT4, WHOLE = {"tables_dtype": "int4"}, "shards a by column, but --optim.embeddings rowwise_adag"


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({}, {"tables": {"z": "row"}}, "sharding.tables names table 'z'; the data has a, b, c"),
        ({}, {"tables": {"c": "row"}}, "c by row, but tables of kind tt are replicated: remove it"),
        (INT4, {"tables": {"a": "row"}}, "a by row, but tables in int4 are replicated: remove it"),
        (
            {},
            {"exchange": "peers"},
            "needs all processes on one host.*use --sharding.exchange",
        ),
        ({}, {"rule": "rowwise_adagrad", "by": "column"}, WHOLE),
        ({}, {"rule": "rowwise_adagrad", "by": "row", "tables": {"a": "column"}}, WHOLE),
        (
            {"tables_dtype": "int8"},
            {"by": "column"},
            "a by column, but its packed rows have one",
        ),
    ],
)
def test_wishes_that_cannot_be_met_say_why(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        make_sharding_plan(World(0, 2), NAMES, RECIPE | recipe, threshold=100, **options)
    if "rule" in options:
        others = options | {"threshold": 100}
        assert make_sharding_plan(World(), NAMES, RECIPE, **others) is None
        assert make_sharding_plan(World(0, 2), NAMES, RECIPE, **others | {"rule": "adagrad"})


def test_rows_of_any_ids_are_sharded_by_row_and_those_in_int4_not():
    plan = [("dynamic", {"rows": 1000}), ("dynamic", {}), ("dense", {"dtype": "int4"})]
    recipe = {**RECIPE, "num_embeddings": [HASHED, 20, 10**6], "plan": plan}
    world = World(rank=0, size=2)
    found = make_sharding_plan(world, NAMES, recipe, threshold=100)
    assert [(shard.table, shard.rows) for shard in found.shards] == [
        (0, (0, 515)),
        (0, (515, 1031)),
    ]
    assert "every rank: 0.0 MB, the index of dynamic tables" in found.text
    for tables in ({"a": "table"}, {"a": "table", "b": "auto"}):
        found = make_sharding_plan(world, NAMES, recipe, threshold=100, tables=tables)
        assert {shard.table for shard in found.shards} == {0, *range(1, len(tables))}
    for option in ({"cache_share": 0.1}, {"pieces": 2}):
        whole = {**recipe, "plan": [("dynamic", {"rows": 1000, **option}), *plan[1:]]}
        assert make_sharding_plan(world, NAMES, whole, threshold=100) is None
        with pytest.raises(ValueError, match="rows in pieces or in host memory, are replicated: r"):
            make_sharding_plan(world, NAMES, whole, tables={"a": "row"})
    with pytest.raises(ValueError, match="shards a by column, but a row of --emb dynamic is made"):
        make_sharding_plan(world, NAMES, recipe, threshold=100, by="column")


def test_rows_that_drop_keeps_are_sharded():
    plan = [("drop", {"keep": 99}), ("drop", {"keep": 9}), ("drop", {"keep": 99, "dtype": "int4"})]
    found = make_sharding_plan(
        World(rank=0, size=2), NAMES, {**RECIPE, "plan": plan}, threshold=100, by="row"
    )
    assert [(shard.table, shard.rows) for shard in found.shards] == [(0, (0, 50)), (0, (50, 100))]
    group = ShardedDrop(SIZES[:1], 8, replace(found, world=World()), keep=99)
    with pytest.raises(ValueError, match=r"drop keep is -1: set --drop.keep to a number of ids"):
        ShardedDrop(SIZES[:1], 8, found, keep=-1)
    assert group.footprint() == [{"weights": 100 * 8 * 4}]
    assert group.kind() == "drop"


@pytest.mark.parametrize(
    ("rule", "dtype", "columns"),
    [
        ("adagrad", "fp32", {(0, 16), (16, 32)}),
        ("rowwise_adagrad", "fp32", {(0, 32)}),
        ("adagrad", "int8", {(0, 32)}),
    ],
)
def test_auto_cuts_no_columns_that_belong_together(rule, dtype, columns):
    recipe = {**RECIPE, "embedding_dim": 32, "tables_dtype": dtype}
    found = make_sharding_plan(World(0, 2), NAMES, recipe, rule=rule, threshold=100)
    assert {piece.columns for piece in found.shards} == columns


def test_peers_are_for_processes_of_one_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world = World(rank=1, size=2)
    found = make_sharding_plan(world, NAMES, RECIPE, threshold=100, exchange="peers")
    assert found.peers
    assert found.text.endswith("exchange by peers")
    bags = make_sharding_plan(
        world, NAMES, RECIPE, lambda: [torch.ones(5)] * 3, threshold=100, exchange="peers"
    )
    assert not bags.peers  # no memory for peers, who never read the rows of bags
    assert bags.linked
    assert bags.text.endswith("exchange by copies to peers")
    if not torch.cuda.is_available():  # auto: where GPUs reach each other
        assert not make_sharding_plan(world, NAMES, RECIPE, threshold=100).peers
    assert not make_sharding_plan(world, NAMES, RECIPE, threshold=100, exchange="collective").peers


@pytest.mark.parametrize("reach", [True, False])
def test_peers_are_gpus_that_reach_each_other(monkeypatch, reach):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: reach)
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: memory)
    world = World(rank=0, size=2, device=torch.device("cuda", 0))
    assert make_sharding_plan(world, NAMES, RECIPE, threshold=100).peers == reach
    if reach:
        assert make_sharding_plan(world, NAMES, RECIPE, threshold=100, exchange="peers").peers
    else:
        with pytest.raises(ValueError, match="memory, these can't: use"):
            make_sharding_plan(world, NAMES, RECIPE, threshold=100, exchange="peers")


@pytest.mark.parametrize(
    ("rule", "whole"), [("sgd", True), ("rowwise_adagrad", True), ("adam", False)]
)
def test_tables_stay_whole_where_they_and_their_states_have_room(monkeypatch, rule, whole):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: True)
    memory = SimpleNamespace(total_memory=6 * 8100 * 64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: memory)
    sizes = [4000, 4000, 4000, 400, 40, 4]
    recipe = {"num_embeddings": sizes, "embedding_dim": 64, "plan": [("dense", {})] * 6}
    found = make_sharding_plan(World(rank=0, size=2), [*"abcdef"], recipe, rule=rule)
    assert (len({shard.table for shard in found.shards}) == len(found.shards)) == whole


def test_pages_have_no_devices_of_their_own_under_torchrun():
    recipe = {**RECIPE, "plan": [("paged", {"devices": ["cpu", "cpu"]})] * 3}
    assert make_sharding_plan(World(), NAMES, recipe) is None
    for by in ("row", "replicate"):
        with pytest.raises(ValueError, match="under torchrun every process holds its shards"):
            make_sharding_plan(World(rank=0, size=2), NAMES, recipe, by=by)


@pytest.mark.parametrize("by", ["table", "row", "column"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_ranks_are_the_dense_tables(by, size):
    torch.manual_seed(0)
    dense = Dense(SIZES, 8)
    recipe = {**RECIPE, "plan": [("dense", {})] * 3}
    seen = torch.zeros_like(dense.weight)
    for rank in range(size):
        world = World(rank=rank, size=size)
        sharding = make_sharding_plan(world, NAMES, recipe, by=by, threshold=100)
        torch.manual_seed(0)
        group = ShardedDense(SIZES, 8, sharding)
        shards = group.state_dict()["weight"]
        assert shards.size() == dense.weight.shape
        for (row, column), values in shards.parts.items():
            height, width = values.shape
            expected = dense.weight[row : row + height, column : column + width]
            assert torch.equal(values, expected)
            seen[row : row + height, column : column + width] += 1
        assert group.footprint() == dense.footprint()
        group.load_state_dict({"weight": dense.weight * 2})
        for (row, column), values in group.state_dict()["weight"].parts.items():
            height, width = values.shape
            expected = 2 * dense.weight[row : row + height, column : column + width]
            assert torch.equal(values, expected)
        with pytest.raises(RuntimeError, match=r"weight has shape \(3, 8\), it must be \("):
            group.load_state_dict({"weight": torch.zeros(3, 8)})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            group.load_state_dict({"weight": dense.weight, "more": torch.zeros(1)})
    assert (seen[300:320] == size).all()  # replicated
    assert (seen[:300] == 1).all()
    assert (seen[320:] == 1).all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_parts_of_all_ranks_are_the_rows_that_drop_keeps(shared):
    options = {"keep": [99, 5, 60], "shared": shared}
    tables = [torch.randn(rows, 8) for rows in SIZES]
    torch.manual_seed(0)
    drop, fitted = Drop(SIZES, 8, **options), Drop(SIZES, 8, **options)
    fitted.load_dense(tables)
    recipe = {**RECIPE, "plan": [("drop", {**options, "keep": own}) for own in options["keep"]]}
    for rank in range(2):
        sharding = make_sharding_plan(
            World(rank=rank, size=2), NAMES, recipe, by="row", threshold=50
        )
        torch.manual_seed(0)
        group = ShardedDrop(SIZES, 8, sharding, **options)
        for expected in (drop, fitted):
            for (row, column), values in group.state_dict()["weight"].parts.items():
                there = expected.weight[row : row + len(values), column : column + 8]
                assert torch.equal(values, there)
            group.load_dense(tables)
        group.clear_shared_rows()
        values = torch.cat([*group.state_dict()["weight"].parts.values()])
        assert (values == 0).all(1).any() != shared


@pytest.mark.parametrize("by", ["table", "row"])
def test_the_records_of_all_ranks_are_those_of_dense_tables(by):
    torch.manual_seed(0)
    dense = Dense(SIZES, 8, dtype="int8")
    records = dense.state_dict()["weight"]
    recipe = {**RECIPE, "plan": [("dense", {})] * 3, "tables_dtype": "int8"}
    seen = torch.zeros_like(records)
    for rank in range(2):
        world = World(rank=rank, size=2)
        sharding = make_sharding_plan(world, NAMES, recipe, by=by, threshold=100)
        torch.manual_seed(0)
        group = ShardedDense(SIZES, 8, sharding, dtype="int8")
        assert group.footprint() == dense.footprint()
        shards = group.state_dict()["weight"]
        assert shards.size() == records.shape
        for (begin,), values in shards.parts.items():
            assert torch.equal(values, records[begin : begin + len(values)])
            seen[begin : begin + len(values)] += 1
        group.load_state_dict({"weight": records ^ 1})
        for (begin,), values in group.state_dict()["weight"].parts.items():
            assert torch.equal(values, records[begin : begin + len(values)] ^ 1)
        with pytest.raises(RuntimeError, match=r"weight has shape \(470, 8\), it must be \(4700,"):
            group.load_state_dict({"weight": torch.zeros(470, 8)})
    record = len(records) // 470
    assert (seen[300 * record : 320 * record] == 2).all()  # replicated
    assert (seen[: 300 * record] == 1).all()
    assert (seen[320 * record :] == 1).all()
