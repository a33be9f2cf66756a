import importlib
import os
import sys
import time

import numpy as np
import pytest
from harness import GOOD, Case, Limits, Outcome, fuzz, mutate, refusal, run_case


def raising(error):
    def run():
        raise error

    return run


def program(status, message):
    def main(argv):
        print(message, file=sys.stderr)
        return status

    def run():
        return Outcome.EQUAL if refusal(main) is None else Outcome.REFUSED

    return run


def take(megabytes):
    def run():
        assert np.ones(megabytes << 20, np.uint8).all()
        return Outcome.EQUAL

    return run


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (lambda: Outcome.SKIPPED, Outcome.SKIPPED),
        (lambda: Outcome.SILENT, Outcome.SILENT),
        (raising(ValueError("row 3 is bad")), Outcome.REFUSED),
        (raising(ValueError("row 3\nis bad")), Outcome.MESSAGE),
        (raising(OSError("row \033[31m is bad")), Outcome.MESSAGE),
        (raising(KeyError("row")), Outcome.TRACEBACK),
        (raising(MemoryError()), Outcome.MEMORY),
        (program(0, ""), Outcome.EQUAL),
        (program(2, "note: this\nerror: row 3 is bad"), Outcome.REFUSED),
        (program(2, "error: row 3\nis bad"), Outcome.MESSAGE),
        (program(1, "error: row 3 is bad"), Outcome.MESSAGE),
        (program(0, "note: column \033[31m"), Outcome.MESSAGE),
        (program(2, "Traceback (most recent call last):"), Outcome.TRACEBACK),
        (lambda: time.sleep(60), Outcome.HANG),
        (lambda: os._exit(3), Outcome.DIED),
        (take(20), Outcome.EQUAL),
        (take(150), Outcome.MEMORY),
        (take(100_000), Outcome.MEMORY),
    ],
)
def test_outcomes(run, outcome):
    limits = Limits(seconds=1 if outcome == Outcome.HANG else 20, memory=20 << 20)
    result = run_case(run, limits, size=10 << 20)
    assert result.outcome == outcome, result.detail


def test_cases_depend_on_seed_and_number_alone(capsys):
    seen = []

    def make(rng, directory):
        assert not [*directory.iterdir()]
        what, data = mutate(rng, bytes(100))
        seen.append(data)
        (directory / "file").write_bytes(data)
        return Case(what=what, run=lambda: Outcome[rng.choice(("EQUAL", "SILENT"))])

    counts = fuzz("zeros", make, 7, range(20))
    assert {*counts} == {Outcome.EQUAL, Outcome.SILENT}
    assert "repeat it: --kind zeros --seed 7 --first " in capsys.readouterr().out
    fuzz("zeros", make, 7, range(12, 15))
    assert seen[20:] == seen[12:15]
    assert len({*seen}) > 10


def test_what_a_fork_imports_the_next_ones_have(monkeypatch, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    known = []

    def make(rng, directory):
        known.append("slow_to_import" in sys.modules)
        return Case(what="a", run=lambda: importlib.import_module("slow_to_import") and GOOD[0])

    fuzz("a", make, 0, range(2))
    assert known == [False, True]
