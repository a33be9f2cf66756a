"""How far SGD moves the rows of tensor trains."""

import json

import pytest


def test_a_step_with_the_scale_in_the_last_core_is_a_dense_one(script, tmp_path, capsys):
    given = ["--tables", "1", "--ranks", "32", "--ids", "12", "--json", str(tmp_path / "out.json")]
    assert script("tt_steps").main(given) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    by_start = {each["start"]: each for each in results}
    equal, last, published = by_start.values()
    assert 0.5 < last["moved"] < 2
    # 3 r^(2/3) s^(4/3), and the scale that leaves out the ranks: see scale_last
    deviation = (3 * 10131227) ** -0.5
    assert equal["moved"] == pytest.approx(3 * 32 ** (2 / 3) * deviation ** (4 / 3), rel=0.3)
    assert equal["deviation"] == pytest.approx(last["deviation"])
    assert published["deviation"] > 300 * equal["deviation"]
    assert "scale in the last core" in capsys.readouterr().out
