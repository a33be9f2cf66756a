import pytest
import torch

from dlrm.distributed.planner import (
    Shard,
    describe_shards,
    fair_cut,
    greedy,
    group_offsets,
    imbalance,
    joint_ids,
    plan_shards,
    shard_columns,
    shard_rows,
)

UNEVEN = [100, 2020, 3203, 3434302, 3023, 45459, 123, 4566]
NAMES = dict(enumerate("abcdefgh"))


def test_a_fair_cut():
    sizes = [100, 2020, 3203, 3434, 3023, 4545, 123, 4566]
    cut = fair_cut(sizes, 4)
    assert cut.share == 5253
    assert cut.cuts == {2: [3133], 4: [1749], 5: [3979]}
    assert cut.groups == [[0, 1, 2], [2, 3, 4], [4, 5], [5, 6, 7]]
    assert cut.starts == [[0, 100, 2120], [0, 70, 3504], [0, 1274], [0, 566, 689]]
    pieces = cut.pieces(sizes, 8)
    held = [sum(p.height for p in pieces if p.rank == rank) for rank in range(4)]
    assert held == [5253, 5253, 5253, 5255]  # the remainder is the last rank's
    for table, rows in enumerate(sizes):
        own = [piece.rows for piece in pieces if piece.table == table]
        assert own[0][0] == 0
        assert own[-1][1] == rows
        assert [a for _, a in own[:-1]] == [b for b, _ in own[1:]]


def test_a_boundary_between_tables_is_no_cut():
    cut = fair_cut([10, 10, 20], 2)
    assert cut.cuts == {}
    assert cut.groups == [[0, 1], [2]]
    assert fair_cut([3], 8).groups == [[]] * 7 + [[0]]
    assert fair_cut([9], 3).cuts == {0: [3, 6]}


def test_whole_tables_behind_one_another():
    groups = [[3, 0], [1, 2], [5, 6], [7, 4]]
    offsets = [group_offsets(UNEVEN, group) for group in groups]
    assert offsets == [[0, 3434302], [0, 2020], [0, 45459], [0, 4566]]
    ids = torch.stack([torch.randint(0, rows, (5,)) for rows in UNEVEN])  # [F, B]
    found = joint_ids(ids, groups[0], offsets[0])
    assert torch.equal(found, torch.stack([ids[3], ids[0] + 3434302]))
    assert joint_ids(ids, [], []).shape == (0, 5)


def whole(groups, sizes, dim):
    return [
        Shard(table=table, rank=rank, rows=(0, sizes[table]), columns=(0, dim))
        for rank, group in enumerate(groups)
        for table in group
    ]


def test_greedy_is_better_than_fair_and_whole():
    """Bytes and look-ups together: a table cut by rows is looked up by all of its holders."""
    dim, ranks, loads = 64, 4, [1.0] * 8
    random = imbalance(whole([[3, 0], [1, 2], [5, 6], [7, 4]], UNEVEN, dim), loads, ranks)
    assert random == pytest.approx(3.9, abs=0.05)
    fair = imbalance(fair_cut(UNEVEN, ranks).pieces(UNEVEN, dim), loads, ranks)
    best = imbalance(plan_shards(UNEVEN, dim, ranks, ways=["auto"] * 8, loads=loads), loads, ranks)
    assert best <= 1.25
    assert best < fair < random


def test_greedy_balances_measured_load():
    groups = greedy([(10.0, 1.0), (10.0, 9.0), (10.0, 5.0), (10.0, 5.0)], 2)
    assert sorted(sorted(group) for group in groups) == [[0, 1], [2, 3]]
    assert greedy([(0.0, 0.0)], 3) == [[0], [], []]
    hot = plan_shards([1000] * 4, 16, 2, ways=["table"] * 4, loads=[9.0, 1.0, 5.0, 5.0])
    by_rank = [sum([9, 1, 5, 5][p.table] for p in hot if p.rank == rank) for rank in (0, 1)]
    assert sorted(by_rank) == [10, 10]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("way", ["auto", "table", "row", "column"])
def test_pieces_cover_every_weight_once(way, ranks):
    sizes, dim = [7, 1, 40, 13], 10
    pieces = plan_shards(sizes, dim, ranks, ways=[way] * 4, page=4)
    held = [torch.zeros(rows, dim) for rows in sizes]
    for piece in pieces:
        assert piece.height > 0
        assert piece.width > 0
        assert 0 <= piece.rank < ranks
        held[piece.table][slice(*piece.rows), slice(*piece.columns)] += 1
    assert all((table == 1).all() for table in held)


def test_row_cuts_fall_between_pages():
    pieces = shard_rows(0, 23, 8, 3, page=4)
    assert [piece.rows for piece in pieces] == [(0, 8), (8, 16), (16, 23)]
    assert len(shard_rows(0, 5, 8, 3, page=4)) == 2
    assert [p.columns for p in shard_columns(0, 5, 10, 3)] == [(0, 3), (3, 6), (6, 10)]
    assert len(shard_columns(0, 5, 2, 3)) == 2


def test_replicated_tables_have_no_piece_and_more_ranks_than_tables_do():
    pieces = plan_shards([50, 60], 64, 4, ways=["replicate", "table"])
    assert [(p.table, p.rank) for p in pieces] == [(1, 0)]
    assert {p.rank for p in plan_shards([50], 64, 4, ways=["auto"])} == {0, 1, 2, 3}


def test_a_plan_is_told_by_rank():
    text = describe_shards(plan_shards([100, 60], 64, 2, ways=["row", "column"]), NAMES, [1.0, 1.0])
    assert "rank 0: 0.0 MB, 50% of the look-ups: a rows 0-50; b columns 0-32" in text
    assert text.splitlines()[-1].startswith("imbalance 1.")


def test_unknown_ways_name_the_nearest():
    with pytest.raises(ValueError, match="unknown sharding 'colum', did you mean 'column'"):
        plan_shards([10], 8, 2, ways=["colum"])


def test_where_there_is_room_tables_stay_whole_and_load_alone_counts():
    sizes, dim = [4000, 4000, 4000, 400, 40, 4], 64
    narrow = plan_shards(sizes, dim, 2, ways=["auto"] * 6)
    assert any(piece.columns != (0, dim) for piece in narrow)
    pieces = plan_shards(sizes, dim, 2, ways=["auto"] * 6, room=8100 * dim)
    assert all(piece.columns == (0, dim) for piece in pieces)
    looked_up = [sum(piece.rank == rank for piece in pieces) for rank in (0, 1)]
    assert looked_up == [3, 3]
    assert imbalance(pieces, [1.0] * 6, 2) > 1.25
    assert imbalance(pieces, [1.0] * 6, 2, room=8100 * dim) == 1
