"""What tests of training share."""

import pytest
import torch


@pytest.fixture
def _determinism_ends():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
