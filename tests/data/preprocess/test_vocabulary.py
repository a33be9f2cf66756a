from collections import Counter

import numpy as np
import pytest

from dlrm.data.prepare.criteo_rows import MISSING
from dlrm.data.preprocess.vocabulary import assign_ids, look_up, sum_counts


def test_falling_count_then_missing_then_value():
    wanted = np.array([7, MISSING, 3, 2**32 - 1, 7, 9, 3])
    keys, counts = sum_counts(wanted, np.array([1, 2, 1, 5, 1, 0, 1]))
    assert keys.tolist() == [MISSING, 3, 7, 9, 2**32 - 1]
    assert counts.tolist() == [2, 2, 2, 0, 5]
    vocabulary, ids = assign_ids(keys, counts)
    assert vocabulary.oov_id == 4
    assert look_up(keys, ids, wanted).tolist() == [3, 1, 2, 0, 3, 4, 2]
    assert vocabulary.table().to_pydict() == {
        "value": ["ffffffff", "", "00000003", "00000007", None],
        "id": [0, 1, 2, 3, 4],
        "count": [5, 2, 2, 2, 0],
    }


def test_without_out_of_vocabulary():
    vocabulary, ids = assign_ids(np.array([1, 5]), np.array([1, 2]), oov=False)
    assert vocabulary.oov_id is None
    assert vocabulary.table()["value"].to_pylist() == ["00000005", "00000001"]
    assert ids.tolist() == [1, 0]


@pytest.mark.parametrize(("rare", "place"), [(2, 2), (3, 2), (4, 1), (9, 0)])
def test_rare_values_share_an_id_placed_by_their_joint_count(rare, place):
    counts = np.array([5, 3] + [1] * rare)
    vocabulary, ids = assign_ids(np.arange(2 + rare), counts, min_count=2)
    assert vocabulary.oov_id == place
    assert vocabulary.counts.tolist() == sorted([5, 3, rare], reverse=True)
    assert set(ids[2:]) == {place}
    assert vocabulary.counts[ids[:2]].tolist() == [5, 3]


def test_against_counting_in_python():
    rng = np.random.default_rng(0)
    wanted = rng.integers(MISSING, 300, 5000) * 7_000_000 // 2  # beyond 2**31
    wanted[wanted < 0] = MISSING
    occurrences = rng.integers(0, 3, 5000)
    total: Counter[int] = Counter()
    for key, count in zip(wanted.tolist(), occurrences.tolist(), strict=True):
        total[key] += count
    kept = sorted((k for k in total if total[k] >= 12), key=lambda k: (-total[k], k))
    rare = sum(total.values()) - sum(total[k] for k in kept)
    oov_id = sum(total[k] >= rare for k in kept)

    keys, counts = sum_counts(wanted, occurrences)
    vocabulary, ids = assign_ids(keys, counts, min_count=12)
    assert vocabulary.oov_id == oov_id
    assert vocabulary.counts[oov_id] == rare
    assert np.delete(vocabulary.keys, oov_id).tolist() == kept
    place = {key: i for i, key in enumerate([*kept[:oov_id], -2, *kept[oov_id:]])}
    assert look_up(keys, ids, wanted).tolist() == [place.get(k, oov_id) for k in wanted.tolist()]
