"""The bytes of compressed tables, against what can be said of them by hand."""

import pytest

ROWS = [1000, 50_000]


@pytest.fixture
def counts(script, monkeypatch):
    program = script("true_bytes")
    monkeypatch.setattr(program, "KAGGLE_CARDINALITIES", ROWS)
    return {row["method"]: row for row in program.count(100.0)}


def test_what_is_kept_of_every_id(counts):
    ids = sum(ROWS)
    assert counts["dense fp32"]["training"] == {"weights": 64 * ids, "state": 4 * ids}
    assert counts["dense int8"]["training"] == {"weights": 18 * ids, "state": 4 * ids}
    assert counts["CCE"]["serving"]["pointers"] == 64 * ids, "as much as the dense tables"
    assert counts["CCE"]["serving"]["weights"] == 2 * (5 + 250) * 64
    assert counts["ALPT"]["training"] == {"weights": 16 * ids, "scales": 4 * ids, "state": 8 * ids}
    assert counts["MPE"]["training"]["fp32 copy"] == 64 * ids
    assert counts["MPE"]["serving"] == {"weights": 64 * ids // 100, "pointers": 4 * ids}


def test_budgets_are_kept_and_int4_is_five_times_smaller(counts):
    for name in ("drop fp32", "drop int8", "robe int8"):
        assert counts[name]["serving_smaller"] >= 99.9
    assert counts["dense int8"]["training_smaller"] > 3
    assert counts["dense int4"]["training_smaller"] > 5


def test_it_prints_and_writes(script, tmp_path, capsys, monkeypatch):
    program = script("true_bytes")
    monkeypatch.setattr(program, "KAGGLE_CARDINALITIES", ROWS)
    assert program.main(["--json", str(tmp_path / "out.json"), "--ratio", "50"]) == 0
    assert "dense int4   training" in capsys.readouterr().out
    assert (tmp_path / "out.json").exists()
