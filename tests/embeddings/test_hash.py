import torch

from dlrm.embeddings.hash import Hash


def test_ids_share_the_row_of_their_remainder():
    group = Hash([4, 25], 3, rows=10)
    assert group.weight.shape == (14, 3)
    ids = torch.arange(25)
    torch.testing.assert_close(group.rows(1, ids), group.weight[4 + ids % 10])
    torch.testing.assert_close(group.rows(0, ids[:4]), group.weight[:4])


def test_the_best_fit_is_the_mean_of_those_that_share():
    weight = torch.randn(25, 3)
    group = Hash.from_dense([weight], rows=10)
    expected = torch.stack([weight[row::10].mean(0) for row in range(10)])
    torch.testing.assert_close(group.weight.detach(), expected)
