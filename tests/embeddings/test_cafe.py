import copy

import pytest
import torch

from dlrm.embeddings.cafe import HOT, Cafe

SIZES = [5000, 300]


class Traffic:
    """Look-ups with log-uniform skew of ids that are numbered at random."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.names = [torch.randperm(rows, generator=self.generator) for rows in SIZES]

    def draw(self, batch=256):
        """Ids ``[2, batch]``."""
        random = torch.rand(2, batch, generator=self.generator)
        ranks = [(rows**r).long() - 1 for rows, r in zip(SIZES, random, strict=True)]
        return torch.stack([name[rank] for name, rank in zip(self.names, ranks, strict=True)])


def trained(steps=200, every=10, **options):
    group, traffic = Cafe(SIZES, 8, rows=100, hot=0.5, **options), Traffic()
    reports = []
    for step in range(1, steps + 1):
        group(traffic.draw())
        if step % every == 0:
            reports.append(group.cache_populate())
    return group, traffic, reports


def owners(group):
    keys = group._keys[:, :HOT]
    return keys[keys != group.empty].long()


def test_the_hottest_ids_get_rows_whatever_their_numbers():
    group, traffic, reports = trained()
    assert group.buckets * HOT == reports[-1].resident == 64
    hot = set(owners(group).tolist())
    for table, start in ((0, 0), (1, 5000)):
        assert hot >= {start + int(name) for name in traffic.names[table][:5]}
    by_oracle = 0.5 * (torch.tensor([32.0]).log() * (1 / torch.tensor(SIZES).log())).sum()
    assert reports[-1].hits / reports[-1].lookups > 0.85 * by_oracle


def test_what_is_hot_may_change():
    group, _, _ = trained()
    other = Traffic(seed=1)
    for step in range(1, 401):
        group(other.draw())
        if step % 10 == 0:
            group.cache_populate()
    assert set(owners(group).tolist()) >= {int(name) for name in other.names[0][:5]}


def test_rare_ids_do_not_drive_out_frequent_ones():
    group = Cafe([1_000_000], 8, rows=100, hot=0.5)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 201):
        rare = torch.randint(100, 1_000_000, (1, 1000), generator=generator)
        group(torch.cat([rare, torch.arange(20)[None]], 1))
        if step % 10 == 0:
            group.cache_populate()
    assert set(owners(group).tolist()) >= set(range(20))


def test_nothing_changes_between_renewals_and_in_evaluation():
    group, traffic, _ = trained()
    ids = traffic.draw()
    before = group(ids)
    for _ in range(20):
        group(traffic.draw())
    assert torch.equal(group(ids), before)
    group.eval()
    scores, keys = group._scores.clone(), group._keys.clone()
    group(traffic.draw())
    assert torch.equal(group._scores, scores)
    assert torch.equal(group._keys, keys)


def test_a_new_owner_starts_from_the_row_that_it_shared():
    group, traffic, _ = trained(steps=60)
    ids = torch.arange(5000)
    with torch.no_grad():
        group.weight.normal_()
    old = set(owners(group).tolist())
    for _ in range(100):
        group(traffic.draw())
    before = group.rows(0, ids).detach()
    report = group.cache_populate()
    new = set(owners(group).tolist())
    assert report.admitted == len(new - old) > 3
    assert report.evicted == len(old - new)
    after = group.rows(0, ids).detach()
    still = [i for i in range(5000) if i not in old - new]
    assert torch.equal(after[still], before[still]), "who came and who stayed"
    gone = torch.tensor([i for i in old - new if i < 5000])
    assert len(gone)
    assert torch.equal(after[gone], group.weight[group._shared(torch.tensor(0), gone)].flatten(-2))
    rows = report.reset["weight"].view(-1, 4)[:, 0] // 4  # in four pieces
    assert sorted(group._keys[:, :HOT].reshape(-1)[rows].tolist()) == sorted(new - old)
    copied = report.sources["weight"]
    assert copied.min() >= 4 * group.hot_rows
    assert torch.equal(group.weight[report.reset["weight"]], group.weight[copied])


def test_an_owner_has_its_row_for_itself():
    group, _, _ = trained()
    key = int(owners(group)[0])
    table, row = (0, key) if key < 5000 else (1, key - 5000)
    group.rows(table, torch.tensor([row])).sum().backward()
    touched = group.weight.grad.coalesce().indices()[0]
    assert len(touched) == 4
    assert touched.max() < 4 * group.hot_rows
    everything = [group.to_dense(t) for t in (0, 1)]
    with torch.no_grad():
        group.weight[touched] += 1
    changed = [(group.to_dense(t) != e).any(1).nonzero() for t, e in enumerate(everything)]
    assert changed[table].tolist() == [[row]]
    assert not len(changed[1 - table])


def test_the_score_of_an_id_in_every_row_does_not_overflow():
    group = Cafe([5], 8, rows=100)
    ids = torch.full((1, 20), 3)
    for _ in range(2):  # one look-up to get in
        group(ids)
    score = group._scores.view(-1)[group._scores.argmax()]
    score += 2**31 - 10 - int(score)  # as after so many look-ups, had it not been renewed
    group(ids)
    assert int(group._scores.min()) >= 0
    assert int(group._scores.max()) == 2**31 - 10
    assert group.cache_populate().admitted == 1
    assert int(group._scores.max()) == 2**30


def test_scores_count_and_decay():
    group = Cafe([50], 8, rows=1, decay=0.5)
    assert (group.buckets, group.shared_rows) == (1, 1)
    for _ in range(8):
        group(torch.tensor([[7, 7, 7]]))
    assert group._scores.sum() == 1 + 3 * 7, "one to get in, then every look-up"
    assert group.cache_populate().admitted == 1
    assert group._scores.sum() == 11
    assert owners(group).tolist() == [7]
    for _ in range(4):
        group(torch.tensor([[7]]))
    assert group.cache_stats() == {"hits": 4, "lookups": 4}
    group.cache_populate()
    assert group._scores.sum() == 7


def test_state_goes_on_where_it_was():
    group, traffic, _ = trained()
    twin = Cafe(SIZES, 8, rows=100, hot=0.5)
    twin.load_state_dict(copy.deepcopy(group.state_dict()))
    for _ in range(30):
        ids = traffic.draw()
        assert torch.equal(group(ids), twin(ids))
    ours, theirs = group.cache_populate(), twin.cache_populate()
    assert torch.equal(ours.reset["weight"], theirs.reset["weight"])
    for name, tensor in group.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_bags_are_counted_too():
    group = Cafe(SIZES, 8, rows=100)
    group(torch.tensor([3, 3, 4, 2]), torch.tensor([0, 2, 3, 4, 4]))
    assert group.cache_stats() == {"hits": 0, "lookups": 4}
    group.cache_populate()
    assert set(owners(group).tolist()) <= {3, 4, 5002}
    assert len(owners(group)) > 0


def test_fitting_keeps_the_longest_rows():
    weights = [torch.randn(400, 8) * 0.01, torch.randn(50, 8) * 0.01]
    weights[0][[5, 111, 399]] += 10
    group = Cafe.from_dense(weights, rows=60)
    assert {5, 111, 399} <= set(owners(group).tolist())
    torch.testing.assert_close(group.to_dense(0)[[5, 111, 399]], weights[0][[5, 111, 399]])
    alone = [i for i in range(400) if i not in set(owners(group).tolist())]
    shared = group._shared(torch.tensor(0), torch.tensor(alone))
    assert group.weight[shared].abs().max() < 1, "without those that left"
    loss = sum((group.to_dense(t) - w).square().sum() for t, w in enumerate(weights))
    assert loss < 0.9 * sum(w[w.abs().amax(1) < 1].square().sum() for w in weights)


def test_a_fit_forgets_former_owners():
    group, _, _ = trained()
    weights = [torch.randn(rows, 8) for rows in SIZES]
    group.load_dense(weights)
    hot = owners(group)
    dense = torch.cat(weights)
    found = torch.cat([group.to_dense(0), group.to_dense(1)])
    torch.testing.assert_close(found[hot], dense[hot])


@pytest.mark.gpu
def test_a_captured_graph_learns_the_same_ids():
    ours, traffic = Cafe(SIZES, 8, rows=100), Traffic()
    theirs = copy.deepcopy(ours).cuda()
    ids = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        theirs(ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = theirs(ids)
        gradient = torch.autograd.grad(out.square().sum(), theirs.weight)[0].to_dense()
    theirs.load_state_dict(ours.state_dict())
    for step in range(1, 101):
        drawn = traffic.draw()
        ids.copy_(drawn)
        graph.replay()
        expected = ours(drawn)
        torch.testing.assert_close(out.cpu(), expected)
        if step % 10 == 0:
            assert ours.cache_populate().admitted == theirs.cache_populate().admitted
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name].cpu()), name
    expected = ours(drawn)
    dense = torch.autograd.grad(expected.square().sum(), ours.weight)[0].to_dense()
    graph.replay()
    torch.testing.assert_close(gradient.cpu(), dense)
