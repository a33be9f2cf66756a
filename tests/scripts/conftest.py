"""Trained runs that the tests of programs share: of Criteo's rows and of a table."""

import importlib
import json
import random
from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from tests.kit import criteo_rows, write_criteo

ROOT = Path(__file__).parents[2]
SMALL = ["--batch_size", "128", "--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]"]
SMALL += ["--max_steps", "6", "--optim.lr", "0.05", "--device", "cpu", "--name", "run"]
ROWS = 2000


@pytest.fixture(scope="session")
def programs():
    """Runs a program for a fixture."""

    def run(name, *arguments):
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(str(ROOT))
            assert importlib.import_module(name).main([str(a) for a in arguments]) == 0

    return run


@pytest.fixture(scope="session")
def criteo(tmp_path_factory, programs):
    """A directory with ``raw``, prepared as ``data``, and a run; and the lines."""
    directory = tmp_path_factory.mktemp("criteo")
    raw = write_criteo(directory / "raw", criteo_rows(ROWS))
    split = ("--split", "0.7", "0.05", "0.25", "--min-count", "2")
    programs("scripts.prepare_criteo", raw, "--output", directory / "data", *split)
    programs("train", "--data", directory / "data", "--output", directory, *SMALL)
    return directory, raw.read_text().splitlines(keepends=True)


@pytest.fixture(scope="session")
def table(tmp_path_factory, programs):
    """A directory with ``raw.csv``, prepared as ``data``, and a run; and the rows."""
    directory, rng = tmp_path_factory.mktemp("table"), random.Random(0)
    start = datetime(2024, 1, 1)
    rows = [
        {
            "row_id": f"row-{i}",
            "price": "" if rng.random() < 0.1 else f"{rng.lognormvariate(3, 2):.2f}",
            "user": f"user {rng.randrange(50)}",
            "when": str(start + timedelta(minutes=7 * i)),
            "tags": "|".join(f"t{rng.randrange(9)}" for _ in range(rng.randrange(4))),
            "clicked": int(rng.random() < 0.3),
        }
        for i in range(ROWS)
    ]
    pd.DataFrame(rows).to_csv(directory / "raw.csv", index=False)
    columns = {"row_id": "pass", "tags": {"kind": "list", "separator": "|"}}
    (directory / "options").write_text(json.dumps({"label": "clicked", "columns": columns}))
    given = ("--config", directory / "options", "--split", "0.7", "0.05", "0.25")
    programs("scripts.prepare_table", directory / "raw.csv", "--output", directory / "data", *given)
    programs("train", "--data", directory / "data", "--output", directory, *SMALL)
    return directory, rows
