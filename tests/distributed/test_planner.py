import pytest
import torch

from dlrm.distributed.planner import (
    Shard,
    describe_shards,
    greedy,
    imbalance,
    plan_shards,
    shard_columns,
    shard_rows,
)

UNEVEN = [100, 2020, 3203, 3434302, 3023, 45459, 123, 4566]
NAMES = dict(enumerate("abcdefgh"))


def whole(groups, sizes, dim):
    return [
        Shard(table=table, rank=rank, rows=(0, sizes[table]), columns=(0, dim))
        for rank, group in enumerate(groups)
        for table in group
    ]


def test_greedy_balances_bytes_and_look_ups():
    dim, ranks, loads = 64, 4, [1.0] * 8
    random = imbalance(whole([[3, 0], [1, 2], [5, 6], [7, 4]], UNEVEN, dim), loads, ranks)
    assert random == pytest.approx(3.9, abs=0.05)
    best = imbalance(
        plan_shards(UNEVEN, dim, ranks, sharding_types=["auto"] * 8, loads=loads), loads, ranks
    )
    assert best <= 1.25
    assert best < random


def test_greedy_balances_measured_load():
    groups = greedy([(10.0, 1.0), (10.0, 9.0), (10.0, 5.0), (10.0, 5.0)], 2)
    assert sorted(sorted(group) for group in groups) == [[0, 1], [2, 3]]
    assert greedy([(0.0, 0.0)], 3) == [[0], [], []]
    hot = plan_shards([1000] * 4, 16, 2, sharding_types=["table"] * 4, loads=[9.0, 1.0, 5.0, 5.0])
    by_rank = [sum([9, 1, 5, 5][p.table] for p in hot if p.rank == rank) for rank in (0, 1)]
    assert sorted(by_rank) == [10, 10]


def test_ranks_send_equally_many_vectors_and_look_up_equally_often():
    """A bag of 100 rows is sent as one vector: the busiest table does not go with few others."""
    loads = [100.0, 27, 12, 10, 9, 8, 7, 7, 6, 5, 3, 3, 3, 2, 2, *[1.0] * 11]
    shards = plan_shards([1000] * 26, 128, 2, sharding_types=["table"] * 26, loads=loads)
    own = [[loads[shard.table] for shard in shards if shard.rank == rank] for rank in (0, 1)]
    assert [len(tables) for tables in own] == [13, 13]
    assert max(map(sum, own)) < 1.1 * sum(loads) / 2


def test_row_wise_shards_begin_at_pages():
    shards = shard_rows(0, 23, 8, 3, page=4)
    assert [shard.rows for shard in shards] == [(0, 8), (8, 16), (16, 23)]
    assert len(shard_rows(0, 5, 8, 3, page=4)) == 2
    assert [p.columns for p in shard_columns(0, 5, 10, 3)] == [(0, 3), (3, 6), (6, 10)]
    assert len(shard_columns(0, 5, 2, 3)) == 2


def test_row_wise_shards_have_equal_shares_of_the_look_ups_that_are_counted():
    counts = torch.tensor([50, 20, 10, 10, 5, 3, 1, 1])
    shards = shard_rows(0, 8, 4, 2, counts=counts, by_count=True)
    assert [(p.rows, p.share) for p in shards] == [((0, 1), 0.5), ((1, 8), 0.5)]
    shards = shard_rows(0, 8, 4, 2, page=4, counts=counts)
    assert [(p.rows, p.share) for p in shards] == [((0, 4), 0.9), ((4, 8), pytest.approx(0.1))]
    unused = shard_rows(0, 8, 4, 2, counts=0 * counts, by_count=True)
    assert sum(shard.height for shard in unused) == 8


def test_a_busy_table_whose_columns_stay_together_is_cut_where_its_look_ups_are():
    """Most of them find the first rows: equally many rows would leave one rank with all the work.
    Tables whose rows were not counted are placed whole."""
    sizes, types = [1000, 1000, 1000], ["auto"] * 3
    counts = [100_000 / torch.arange(1, 1001), torch.tensor([10]), torch.tensor([10])]
    loads = [float(count.sum()) for count in counts]
    options = {"sharding_types": types, "loads": loads, "column_wise": False}
    whole = plan_shards(sizes, 16, 4, **options)
    counted = plan_shards(sizes, 16, 4, counts=counts, **options)
    assert imbalance(whole, loads, 4) > 3.9
    assert imbalance(counted, loads, 4) < 2.4
    busiest = [shard for shard in counted if shard.table == 0]
    assert [shard.rank for shard in busiest] == [0, 1, 2, 3]
    assert all(shard.share == pytest.approx(0.25, abs=0.07) for shard in busiest)
    assert busiest[0].height < busiest[-1].height / 10


def test_replicated_tables_have_no_shard_and_more_ranks_than_tables_do():
    shards = plan_shards([50, 60], 64, 4, sharding_types=["replicate", "table"])
    assert [(p.table, p.rank) for p in shards] == [(1, 0)]
    assert {p.rank for p in plan_shards([50], 64, 4, sharding_types=["auto"])} == {0, 1, 2, 3}


def test_a_plan_as_text():
    text = describe_shards(
        plan_shards([100, 60], 64, 2, sharding_types=["row", "column"]), NAMES, [1.0, 1.0], 2
    )
    assert "rank 0: 0.0 MB, 50% of the look-ups: a rows 0-50; b columns 0-32" in text
    assert text.splitlines()[-1].startswith("imbalance 1.")
    shards = plan_shards([100, 100], 16, 4, sharding_types=["table", "table"])
    *_, last, total = describe_shards(shards, NAMES, [1.0, 1.0], 4).splitlines()
    assert last == "rank 3: 0.0 MB, 0% of the look-ups: no table"
    assert total == "imbalance 2.00", "ranks without a table count"


def test_where_there_is_room_tables_stay_whole_and_load_alone_counts():
    sizes, dim = [4000, 4000, 4000, 400, 40, 4], 64
    narrow = plan_shards(sizes, dim, 2, sharding_types=["auto"] * 6)
    assert any(shard.columns != (0, dim) for shard in narrow)
    shards = plan_shards(sizes, dim, 2, sharding_types=["auto"] * 6, room=8100 * dim)
    assert all(shard.columns == (0, dim) for shard in shards)
    looked_up = [sum(shard.rank == rank for shard in shards) for rank in (0, 1)]
    assert looked_up == [3, 3]
    assert imbalance(shards, [1.0] * 6, 2) > 1.25
    assert imbalance(shards, [1.0] * 6, 2, room=8100 * dim) == 1
