import pytest
import torch

from dlrm.embeddings.block import Block, project
from dlrm.embeddings.dense import Dense


def test_rows_are_widened_by_the_matrix_of_their_table():
    group = Block([4, 25], 6, dim=2)
    assert [p.shape for p in group.parameters()] == [(29, 2), (2, 2, 6)]
    expected = group.weight[4:] @ group.projection[1]
    torch.testing.assert_close(group.rows(1, torch.arange(25)), expected)


def test_one_product_for_all_tables_agrees_with_one_for_each(device):
    rows = torch.randn(7, 3, 2, device=device, dtype=torch.float64).requires_grad_()
    matrices = torch.randn(3, 2, 5, device=device, dtype=torch.float64).requires_grad_()
    outs = [project(rows, matrices, together=way) for way in (False, True)]
    torch.testing.assert_close(*outs)
    up = torch.randn_like(outs[0])
    torch.testing.assert_close(*(torch.autograd.grad(out, (rows, matrices), up) for out in outs))


def test_tables_in_any_order_agree_with_table_by_table():
    group = Block([4, 25], 6, dim=2).double()
    tables, ids = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([24, 3, 0, 7, 0])
    expected = torch.stack([group.rows(t, i) for t, i in zip(tables, ids, strict=True)])
    torch.testing.assert_close(group.vectors(tables, ids), expected)


def test_no_matrix_where_the_block_dim_is_the_embedding_dim():
    group = Block([4, 25], 6, dim=6)
    assert [name for name, _ in group.named_parameters()] == ["weight"]
    assert torch.equal(group.rows(1, torch.tensor([7])), group.weight[[11]])


def test_rows_have_sparse_and_matrices_dense_gradients():
    group = Block([4, 25], 6, dim=2)
    group(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    assert group.weight.grad.is_sparse
    assert not group.projection.grad.is_sparse


@pytest.mark.parametrize("rows", [40, 3])
def test_the_best_fit_is_the_truncated_svd(rows):
    weight = torch.randn(rows, 6, dtype=torch.float64)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    group = Block([rows], 6, dim=2).double()
    group.load_dense([weight])
    torch.testing.assert_close(group.rows(0, torch.arange(rows)), u[:, :2] * s[:2] @ v[:2])


def test_ids_that_share_a_row_are_fitted_together():
    weight = torch.randn(40, 6, dtype=torch.float64)
    kept = torch.cat([weight[:30], weight[30:].mean(0).expand(10, 6)])
    group = Block.from_dense([weight], dim=2, keep=30)
    u, s, v = torch.linalg.svd(kept, full_matrices=False)
    torch.testing.assert_close(group.rows(0, torch.arange(40)), u[:, :2] * s[:2] @ v[:2])


@pytest.mark.parametrize("dim", [1, 3, 8, 15, 16])
def test_rows_start_as_wide_as_dense_ones_and_train_as_fast(dim):
    group = Block([50_000], 16, dim=dim)
    wide = Dense([50_000], 16).to_dense().std()
    assert group.to_dense().std() == pytest.approx(float(wide), rel=0.03)
    out = group(torch.arange(50_000)[None])
    up = torch.randn_like(out)
    out.backward(up)
    assert group.weight.grad.to_dense().std() == pytest.approx(1, rel=0.05)
