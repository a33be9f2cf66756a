import pytest
import torch

from dlrm.embeddings.robe import Robe


def test_all_tables_share_one_array():
    group = Robe([300, 200, 40], 4, rows=50, block=4)
    assert group.weight.shape == (50 + 50 + 40, 4)
    assert sum(part["weights"] for part in group.footprint()) == 140 * 4 * 4
    places = [
        group._pieces_of(torch.tensor(t), torch.arange(v)) for t, v in enumerate([300, 200, 40])
    ]
    used = [set(place.view(-1).tolist()) for place in places]
    assert used[0] & used[1]
    assert used[0] & used[2]
    assert len(used[0] | used[1] | used[2]) > 130, "hardly a weight is idle"


def test_a_row_is_made_of_pieces():
    group = Robe([100, 60], 12, rows=10, block=3)
    assert group.weight.shape == (80, 3)
    places = group._pieces_of(torch.tensor(1), torch.tensor(17))
    assert places.shape == (4,)
    torch.testing.assert_close(
        group.rows(1, torch.tensor(17)), group.weight[places].view(12), rtol=0, atol=0
    )


def test_by_default_a_row_has_four_pieces_if_that_is_possible():
    assert [Robe([9], dim).pieces for dim in (16, 10, 7, 4)] == [4, 2, 1, 4]


def test_ids_of_a_block_are_neighbours_on_a_circle():
    group = Robe([100, 60], 4, rows=10, block=12)
    for table in (0, 1):
        places = group._pieces_of(torch.tensor(table), torch.arange(60)).view(20, 3)
        assert torch.equal(places[:, 1], (places[:, 0] + 1) % 20)
        assert torch.equal(places[:, 2], (places[:, 0] + 2) % 20)
        assert len(places[:, 0].unique()) > 8


def test_places_are_spread_evenly():
    group = Robe([200_000, 100_000], 4, rows=1000, block=4)
    for table, rows in enumerate([200_000, 100_000]):
        places = group._pieces_of(torch.tensor(table), torch.arange(rows))
        counts = places.view(-1).bincount(minlength=2000).double()
        expected = rows / 2000
        assert counts.mean() == expected
        assert counts.std() == pytest.approx(expected**0.5, rel=0.15), "as if thrown at random"


def test_tables_meet_in_few_of_the_same_ids():
    group = Robe([100_000, 100_000], 4, rows=1000, block=4)
    ids = torch.arange(100_000)
    first, second = (group._pieces_of(torch.tensor(table), ids).view(-1) for table in (0, 1))
    assert (first == second).sum() == 0
    assert 20 < (first == second.roll(1)).sum() < 90  # 50 by chance


def test_the_fit_is_the_mean_of_those_that_share_by_squared_length():
    weights = [torch.randn(30, 4), torch.randn(50, 4)]
    group = Robe.from_dense(weights, rows=10, block=2)
    rows = [group._pieces_of(torch.tensor(t), torch.arange(len(w))) for t, w in enumerate(weights)]
    places = torch.cat([own.view(-1) for own in rows])
    pieces = torch.cat([weight.view(-1, 2) for weight in weights])
    mass = torch.cat(weights).square().sum(1).repeat_interleave(2)[:, None]
    for place in places.unique():
        shared = places == place
        expected = (pieces[shared] * mass[shared]).sum(0) / mass[shared].sum()
        torch.testing.assert_close(group.weight[place].detach(), expected)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_pieces_of():
    group = Robe([3_000_000_000 // 4096, 500], 8, rows=100, block=4)
    ids = torch.stack([torch.randint(rows, (64,)) for rows in group.num_embeddings])
    expected = group(ids)
    torch.testing.assert_close(group.cuda()(ids.int().cuda()).cpu(), expected)
