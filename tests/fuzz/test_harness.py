import os
import sys
import time

import numpy as np
import pytest
from harness import Case, Limits, Outcome, fuzz, mutate, refusal, run_case


def do(what):
    """Do what a case may do."""
    match what:
        case Outcome():
            return what
        case Exception():
            raise what
        case int():  # megabytes
            assert np.ones(what << 20, np.uint8).all()
        case status, message:
            program = lambda _: print(message, file=sys.stderr) or status  # noqa: E731
            return Outcome.EQUAL if refusal(program) is None else Outcome.REFUSED
        case call:
            call()
    return Outcome.EQUAL


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (Outcome.NOTED, Outcome.NOTED),
        (Outcome.SILENT, Outcome.SILENT),
        (ValueError("row 3 is bad"), Outcome.REFUSED),
        (ValueError("row 3\nis bad"), Outcome.MESSAGE),
        (OSError("row \033[31m is bad"), Outcome.MESSAGE),
        (KeyError("row"), Outcome.TRACEBACK),
        (MemoryError(), Outcome.MEMORY),
        ((0, ""), Outcome.EQUAL),
        ((2, "note: this\nerror: row 3 is bad"), Outcome.REFUSED),
        ((2, "error: row 3\nis bad"), Outcome.MESSAGE),
        ((1, "error: row 3 is bad"), Outcome.MESSAGE),
        ((0, "note: column \033[31m"), Outcome.MESSAGE),
        ((2, "Traceback (most recent call last):"), Outcome.TRACEBACK),
        (lambda: time.sleep(60), Outcome.HANG),
        (lambda: os._exit(3), Outcome.DIED),
        (20, Outcome.EQUAL),
        (150, Outcome.MEMORY),
        (100_000, Outcome.MEMORY),
    ],
)
def test_outcomes(what, outcome):
    limits = Limits(seconds=1 if outcome == Outcome.HANG else 20, memory=20 << 20)
    result = run_case(lambda: do(what), limits, size=10 << 20)
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
