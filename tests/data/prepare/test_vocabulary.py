"""Values to ids: texts and keys of hex digits, merged from blocks, counted and looked up."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from dlrm.data.prepare import vocabulary
from dlrm.data.prepare.keys import MISSING, count_values
from dlrm.data.prepare.vocabulary import make_vocabulary


@pytest.mark.parametrize("kind", [pa.int64(), pa.large_string()], ids=["keys", "texts"])
def test_against_counting_in_python(kind):
    rng = np.random.default_rng(0)
    values = rng.integers(MISSING, 300, 5000) * 7_000_000 // 2  # beyond 2**31
    values[values < 0] = MISSING
    texts = ["" if value < 0 else f"{value:08x}" for value in values.tolist()]
    occurrences = rng.integers(0, 3, 5000)
    total: Counter[str] = Counter()
    for text, count in zip(texts, occurrences.tolist(), strict=True):
        total[text] += count
    kept = sorted((k for k in total if total[k] >= 12), key=lambda k: (-total[k], k))
    rare = sum(total.values()) - sum(total[k] for k in kept)
    oov_id = sum(total[k] >= rare for k in kept)

    entries = pa.array(values) if kind == pa.int64() else pa.array(texts)
    parts = [([entries[i : i + 1000]], [occurrences[i : i + 1000]]) for i in range(0, 5000, 1000)]
    made = make_vocabulary(*count_values(parts, kind), min_count=12)
    listed = [*kept[:oov_id], None, *kept[oov_id:]]
    assert made.values.to_pylist() == listed
    assert made.counts[oov_id] == rare
    place = {text: i for i, text in enumerate(listed)}
    assert made.ids(entries, "x").tolist() == [place.get(text, oov_id) for text in texts]


@pytest.mark.parametrize("collide", [False, True])
def test_both_ways_to_look_up_agree(monkeypatch, collide):
    rng = np.random.default_rng(0)
    texts = pa.array(["", *sorted(f"v{i}" for i in range(999))])
    made = make_vocabulary(texts, rng.integers(0, 50, 1000), min_count=10)
    wanted = pa.array(["", "none", "v3", *(f"v{i}" for i in rng.integers(0, 1500, 100))])
    expected = made.ids(wanted, "x")
    listed = {value: i for i, value in enumerate(made.values.to_pylist())}
    assert expected.tolist() == [listed.get(v, made.oov_id) for v in wanted.to_pylist()]
    monkeypatch.setattr(vocabulary, "FEW_IDS", 10)
    hashed = []
    if collide:  # all texts have one of three hashes
        whole = vocabulary.hash_texts
        monkeypatch.setattr(
            vocabulary,
            "hash_texts",
            lambda texts: hashed.append(texts) or whole(texts) % np.uint64(3),
        )
    assert made.ids(wanted, "x", often=False).tolist() == expected.tolist()
    assert not hashed
    assert made.ids(wanted, "x").tolist() == expected.tolist()
    assert bool(hashed) is collide
