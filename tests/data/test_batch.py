import torch

from dlrm.data.batch import fixed_bags


def test_offsets_of_fixed_bags_are_table_by_table(device):
    offsets, bounds = fixed_bags((3, 0, 1), 2, device)
    assert offsets.tolist() == [0, 3, 6, 6, 6, 7, 8]
    assert offsets.dtype == torch.int64
    assert offsets.device.type == torch.device(device).type
    assert bounds == (0, 6, 6, 8)
