import torch

from dlrm.utils.offsets import offsets_of


def test_bags_begin_where_those_before_them_end(device):
    lengths = torch.tensor([[2, 0, 1], [0, 3, 1]], dtype=torch.int32, device=device)
    found = offsets_of(lengths[:, 1:])  # of a view that is not contiguous
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 0, 1, 4, 5]
    assert offsets_of(lengths[:, :0]).tolist() == [0]
