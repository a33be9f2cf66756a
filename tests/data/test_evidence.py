from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from dlrm.commands import prepare_table
from dlrm.data.evidence import RANGES, Effects, range_of, read_effects, with_effects
from dlrm.data.frequencies import count_ids
from dlrm.data.schema import Meta
from scripts import describe_parquet

ROWS, IDS = 40_000, 10_000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Rare ids that say much, others that say nothing, and their own copy."""
    rng = np.random.default_rng(0)
    says, silent = rng.integers(0, IDS, (2, ROWS))
    probability = np.where(rng.random(IDS) < 0.5, 0.2, 0.8)[says]
    table = pa.table(
        {
            "clicked": (rng.random(ROWS) < probability).astype(int),
            "silent": [f"s{own}" for own in silent],
            "says": [f"v{own}" for own in says],
            "twin": [f"t{own}" for own in says],
            "few": rng.integers(0, 3, ROWS),
            "tags": [f"a{own}|b" for own in silent % 7],
        }
    )
    directory = tmp_path_factory.mktemp("evidence")
    csv.write_csv(table, directory / "rows.csv")
    for name, rates in (("data", False), ("rates", True)):
        (directory / "options.yaml").write_text(f"label: clicked\nrates: {rates}\n")
        options = ["--config", str(directory / "options.yaml"), "--output", str(directory / name)]
        assert prepare_table.main([str(directory / "rows.csv"), *options]) == 0
    return directory / "data", Meta.read(directory / "data")


def test_what_ids_say_is_kept_with_the_data(prepared):
    """Its planted variance is 0.09 of 0.25; what two columns say is counted nearly once."""
    _, meta = prepared
    effects = {name: own[1:3] for name, own in meta.effects.items()}
    either = np.add(effects["says"], effects["twin"])
    assert either == pytest.approx([0.43, 0.43], abs=0.1)
    assert min(effects["says"][0], effects["twin"][0]) < 0.06
    assert max(effects["silent"]) < 0.03
    assert max(meta.effects["few"]) < 0.01


def test_what_numbers_say_is_left_to_them(prepared):
    """Rates of the same ids, of which rows are used to find how much ids say beyond them."""
    directory, meta = prepared
    with_rates = Meta.read(directory.parent / "rates")
    assert len(with_rates.dense) > len(meta.dense)
    for at in (2, 3):
        less, more = (
            sum(own.effects[n][at] for n in ("says", "twin")) for own in (with_rates, meta)
        )
        assert less < 0.9 * more


def test_older_data_without_it_is_read(prepared):
    directory, meta = prepared
    older, expected = replace(meta, effects={}), list(meta.effects.values())
    assert read_effects(directory, meta, list) == [Effects(own) for own in expected]
    found = read_effects(directory, older, lambda: count_ids(directory, older))
    by_range = [own.by_range for own in found]
    np.testing.assert_allclose(by_range, expected, atol=0.01)  # unseen ids have another count
    with_rates = Meta.read(directory.parent / "rates")
    rated = [own.rated for own in read_effects(directory.parent / "rates", with_rates, list)]
    assert rated == [f"rate({name})" in with_rates.dense for name in meta.tables]
    assert {*rated} == {True, False}  # lists have none
    for rows in (1, ROWS // 2):
        some = with_effects(directory, older, count_ids(directory, older), most_rows=rows)
        assert {len(own) for own in some.effects.values()} == {RANGES}


def test_labels_that_are_all_equal_say_nothing(tmp_path):
    table = pa.table(
        {"clicked": [1] * 9, "a": [0, 0, 1, 1, 2, 2, 3, 3, 4], "b": [[1], [], [2, 3]] * 3}
    )
    parquet.write_table(table, tmp_path / "train.parquet")
    assert (
        describe_parquet.main([str(tmp_path), "--label", "clicked", "--train", "train.parquet"])
        == 0
    )
    meta = Meta.read(tmp_path)
    effects = read_effects(tmp_path, meta, lambda: count_ids(tmp_path, meta))
    assert effects == [Effects((0.0,) * RANGES)] * 2


def test_ranges_double():
    assert range_of([0, 1, 2, 3, 4, 7, 8, 2**40]).tolist() == [0, 0, 1, 1, 2, 2, 3, RANGES - 1]
