import math

import pytest
import torch

from dlrm.embeddings import available
from dlrm.model import DLRM, MLP, CrossInteraction, DotInteraction

SIZES = [7, 300, 5]
DENSE_PLAN = [("dense", {})] * 3


def small(**options):
    options = {"bottom_mlp": [6], "top_mlp": [9], **options}
    return DLRM(4, SIZES, 8, DENSE_PLAN, **options)


def test_kaggle_shape_has_the_published_number_of_weights():
    model = DLRM(13, [10] * 26, 16, [("dense", {})] * 26)
    assert sum(p.numel() for p in model.dense_parameters()) == 475_985


def test_dot_interaction_is_the_products_of_all_pairs():
    interaction = DotInteraction(3, 5)
    bottom, embedded = torch.randn(2, 5), torch.randn(2, 3, 5)
    vectors = [bottom, *embedded.unbind(1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    expected = torch.cat([bottom, torch.stack(pairs, 1)], 1)
    out = interaction(bottom, [embedded], torch.arange(3))
    assert out.shape[1] == interaction.out_features
    torch.testing.assert_close(out, expected)


def test_cross_interaction_follows_the_formula():
    interaction = CrossInteraction(2, 3, layers=2, rank=4)
    bottom, embedded = torch.randn(5, 3), torch.randn(5, 2, 3)
    first = x = torch.cat([bottom, embedded.flatten(1)], 1)
    for layer in interaction.layers:
        x = first * (x @ layer.down.weight.T @ layer.up.weight.T + layer.up.bias) + x
    torch.testing.assert_close(interaction(bottom, [embedded], torch.arange(2)), x)


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_every_parameter_gets_a_gradient(interaction):
    model = small(interaction=interaction, cross_rank=2)
    ids = torch.stack([torch.randint(0, rows, (6,)) for rows in SIZES])
    logits = model(torch.randn(4, 6), ids)
    assert logits.shape == (6,)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert len(model.dense_parameters()) + 1 == len(list(model.parameters()))


def test_multi_hot_with_bags_of_one_equals_one_hot():
    model = small()
    ids = torch.stack([torch.randint(0, rows, (6,)) for rows in SIZES])
    dense = torch.randn(4, 6)
    bags = model(dense, ids.flatten(), torch.arange(ids.numel() + 1))
    torch.testing.assert_close(bags, model(dense, ids))


def test_reference_initialisation():
    mlp = MLP([400, 600])
    assert mlp[0].weight.std().item() == pytest.approx(math.sqrt(2 / 1000), rel=0.02)
    assert mlp[0].bias.std().item() == pytest.approx(math.sqrt(1 / 600), rel=0.1)


def test_hidden_units_are_dropped_in_training_alone():
    plain, mlp = (MLP([4, 64, 64, 8], final_relu=False, dropout=p) for p in (0.0, 0.5))
    mlp.load_state_dict(plain.state_dict())
    x = torch.randn(4000, 4)
    dropped = mlp(x)
    assert not torch.equal(dropped, mlp(x)), "anew in each call"
    assert (dropped != 0).all(), "no output is dropped"
    assert torch.equal(mlp.eval()(x), plain(x))
    one = MLP([4, 3], dropout=0.5)
    assert torch.equal(one(x), one.eval()(x)), "there is no hidden layer"


def test_an_mlp_is_not_cut_to_a_narrow_input():
    mlp = MLP([4, 2])
    wide = torch.cat([torch.randn(3, 4), torch.zeros(3, 2)], dim=1)
    torch.testing.assert_close(mlp(wide), mlp(wide[:, :4]))


@pytest.mark.parametrize("kind", sorted(available()))
def test_a_trained_model_is_taken_over_by_every_kind(kind):
    trained, model = small(), DLRM(4, SIZES, 8, [(kind, {})] * 3, bottom_mlp=[6], top_mlp=[9])
    model.load_trained(trained)
    for own, other in zip(model.dense_parameters(), trained.dense_parameters(), strict=True):
        assert torch.equal(own, other)
    own, other = (torch.cat(m.sparse_arch.to_dense()).flatten() for m in (model, trained))
    assert torch.cosine_similarity(own, other, dim=0) > 0.3, "no fit at all"


def test_a_trained_model_that_is_kept_whole_scores_the_same():
    trained = small()
    model = DLRM(4, SIZES, 8, [("hash", {"rows": 300}), ("block", {"dim": 8}), ("dense", {})],
                 bottom_mlp=[6], top_mlp=[9])  # fmt: skip
    model.load_trained(trained)
    ids = torch.stack([torch.randint(rows, (20,)) for rows in SIZES])
    dense = torch.randn(4, 20)
    torch.testing.assert_close(model(dense, ids), trained(dense, ids))


def other(num_dense=4, sizes=SIZES):
    return DLRM(num_dense, sizes, 8, DENSE_PLAN, bottom_mlp=[6], top_mlp=[9])


IDS = torch.zeros(3, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: small(interaction="dots"), "did you mean 'dot'"),
        (lambda: small(tables_dtype="bf6"), "unknown tables_dtype 'bf6', did you mean 'bf16'"),
        (lambda: DLRM(4, SIZES, 8, DENSE_PLAN[:2]), "the plan has 2 entries for 3 tables"),
        (lambda: small()(torch.zeros(3, 2), IDS), r"dense has shape \(3, 2\), it must be \[4, B"),
        (lambda: small()(torch.zeros(5, 2), IDS), r"dense has shape \(5, 2\), it must be \[4, B"),
        (lambda: small()(torch.zeros(4), IDS), r"dense has shape \(4,\), it must be \[4, B"),
        (
            lambda: small()(torch.zeros(4, 2), IDS.float()),
            "ids must be integers, got torch.float32",
        ),
        (lambda: MLP([4, 2])(torch.randn(3, 2)), "x has 2 columns, it must have 4 or more"),
        (lambda: small().load_trained(other(3)), "has 3 dense features, this one 4: it was"),
        (
            lambda: small().load_trained(small(top_mlp=[7])),
            "the trained model has a different top_mlp: use the --model",
        ),
        (lambda: small().load_trained(other(sizes=[8, 300, 5])), "dense tables have shapes"),
    ],
)
def test_what_does_not_fit_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()
