"""Texts to ids, by a table that is made for the look-up and by hashes that are kept."""

import numpy as np
import pyarrow as pa
import pytest

from dlrm.data.prepare import vocabulary
from dlrm.data.prepare.vocabulary import make_vocabulary, merge_counts


@pytest.mark.parametrize("collide", [False, True])
def test_both_ways_to_look_up_agree(monkeypatch, collide):
    rng = np.random.default_rng(0)
    texts = pa.array(["", *(f"v{i}" for i in range(999))])
    made, ids = make_vocabulary(texts, rng.integers(0, 50, 1000), min_count=10, cap=None)
    wanted = pa.array(["", "none", "v3", *(f"v{i}" for i in rng.integers(0, 1500, 100))])
    assert ids.tolist() == made.ids(texts).tolist()
    expected = made.ids(wanted)
    listed = {value: i for i, value in enumerate(made.values.to_pylist())}
    assert expected.tolist() == [listed.get(v, made.oov_id) for v in wanted.to_pylist()]
    monkeypatch.setattr(vocabulary, "FEW_IDS", 10)
    if collide:  # all texts have one of three hashes
        whole = vocabulary.hash_texts
        monkeypatch.setattr(vocabulary, "hash_texts", lambda texts: whole(texts) % np.uint64(3))
    assert "_hashed" not in vars(made)
    assert made.ids(wanted).tolist() == expected.tolist()
    assert "_hashed" in vars(made)


def test_counts_are_merged():
    parts = [pa.array(["b", "a"]), pa.array(["a", "c", "a"], pa.large_string())]
    values, counts, positions = merge_counts(parts, [np.array([1, 2]), np.array([3, 0, 4])])
    assert dict(zip(values.to_pylist(), counts.tolist(), strict=True)) == {"a": 9, "b": 1, "c": 0}
    assert values.take(pa.array(positions)).to_pylist() == ["b", "a", "a", "c", "a"]
