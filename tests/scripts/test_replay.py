"""A replay of days: from raw rows to the AUC by day, and on from where it was interrupted."""

import contextlib
import json
from types import SimpleNamespace

import pytest

SMALL = ["model.bottom_mlp=[16]", "model.top_mlp=[16]", "device=cpu", "max_steps=2"]


@pytest.mark.slow
def test_models_are_replayed_day_by_day(criteo, script, monkeypatch, tmp_path, capsys):
    directory, lines = criteo
    runner, here = script("runner"), contextlib.nullcontext(SimpleNamespace(map=map))
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *_, **__: here)
    program, out = script("replay"), tmp_path / "out.json"
    given = [directory / "raw", "--days", 3, "--seeds", 2, "--work", tmp_path, "--json", out]
    given = [str(one) for one in given] + ["--options", *SMALL]
    assert program.main([*given, "--ways", "still", "unseen"]) == 0
    report = json.loads(out.read_text())
    assert program.main(given) == 0  # the other ways; finished runs are kept
    whole = json.loads(out.read_text())
    every = whole["auc"]
    assert {way: every[way] for way in ("still", "unseen")} == report["auc"]
    assert list(every) == ["still", "no_new", "unseen", "random", "forget"]
    for days in every.values():
        assert days[0] == every["still"][0]  # before the second day all are the first model
        assert days[1] != every["still"][1] or days is every["still"]
    first, second = report["rows_of_tables"]["unseen"]
    assert 26 < first <= second
    assert report["rows_of_tables"]["still"] == [first, first]
    assert whole["rows_of_tables"]["forget"][1] <= second
    names = {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    ways = ("no_new", "unseen", "random", "forget_2")
    assert names == {f"{w}_seed_{s}_day_2" for w in ways for s in (0, 1)} | {
        f"first_seed_{s}" for s in (0, 1)
    }
    divided = [(tmp_path / f"day_{day}.tsv").read_text() for day in (1, 2, 3)]
    assert "".join(divided) == "".join(lines)
    assert "day 3  unseen: AUC 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("days", "message"),
    [(1, "--days is 1; a replay needs at least 2"), (9999, "has 2000 rows; give one for each")],
)
def test_days_that_cannot_be(days, message, criteo, run, tmp_path):
    given = criteo[0] / "raw", "--days", days, "--work", tmp_path
    assert message in run("replay", *given, status=2).stderr
