"""Small tables of odd shapes, as users bring them, from a CSV to scores.

On a CPU only a few of them are trained; with DLRM_TRIALS set, and on a GPU, all are.
"""

import json
import os
import random
from itertools import product

import pandas as pd
import pytest
import torch

GPU = torch.cuda.is_available()
COMPRESSED = ["--tables.threshold", "0"]
KINDS = {
    "dense": [],
    "tt": [*COMPRESSED, "--tt.rank", "4"],
    "auto": ["--budget", "2x"],
    "qr": COMPRESSED,
    "robe": [*COMPRESSED, "--robe.rows", "4"],
}
SHAPES = [  # of the numbers, the categories, and how the model and the rows differ otherwise
    (numbers, categories, [*KINDS][index % 5], interaction, precision, index)
    for index, (numbers, categories, interaction, precision) in enumerate(
        product((0, 1, 2), (1, 2, 30), ("dot", "dcn"), ("fp32", "bf16"))
    )
]
EVERY = 1 if GPU or "DLRM_TRIALS" in os.environ else 17


def write_rows(path, numbers, categories, index):
    """Rows of a table, and the options to prepare them with."""
    rng = random.Random(index)
    lists, weights, rare = index % 3 == 2, index % 4 == 3, index % 12 == 11
    columns = {"tags": {"kind": "list", "separator": "|"}} if lists else {}
    options = {"columns": columns, **({"weight": "weight"} if weights else {})}
    rows = []
    for _ in range((12, 400, 700)[index % 3]):
        row = {"label": int(rng.random() < (0.1 if rare else 0.4))}
        row |= {f"n{i}": round(rng.gauss(0, 3), 2) for i in range(numbers)}
        row |= {f"c{i}": f"v{rng.randrange(1 + 7 * i)}" for i in range(categories)}
        row |= {"weight": rng.choice([0.5, 1, 2])} if weights else {}
        tags = "|".join(f"t{rng.randrange(9)}" for _ in range(rng.randrange(4)))
        rows.append(row | ({"tags": tags} if lists else {}))
    pd.DataFrame(rows).to_csv(path, index=False)
    return options


@pytest.mark.parametrize(
    ("numbers", "categories", "kind", "interaction", "precision", "index"), SHAPES[::EVERY]
)
def test_a_small_table_is_trained_on_and_scored(
    numbers, categories, kind, interaction, precision, index, device, run, tmp_path
):
    """No step fails, and scores are those of a CPU, of other batches, and of a row alone."""
    raw, data = tmp_path / "raw.csv", tmp_path / "data"
    options = write_rows(raw, numbers, categories, index)
    (tmp_path / "options").write_text(json.dumps(options))
    run("prepare_table", raw, "--output", data, "--config", tmp_path / "options")
    given = ["--emb", kind, *KINDS[kind], "--model.interaction", interaction]
    given += ["--precision", precision, "--batch_size", "64", "--epochs", "2"]
    done = run("train", "--data", data, "--output", tmp_path, "--name", "run", *given)
    assert "captured" not in done.stdout + done.stderr

    def scores(rows, *how):
        run("predict", tmp_path / "run", rows, tmp_path / "scores.csv", *how)
        return pd.read_csv(tmp_path / "scores.csv")["probability"].to_numpy()

    found = scores(raw)
    first = tmp_path / "first.csv"
    first.write_text("".join(raw.read_text().splitlines(keepends=True)[:2]))
    noise = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    assert len(found) == len(raw.read_text().splitlines()) - 1
    assert ((found > 0) & (found < 1)).all()
    assert scores(raw, "--device", "cpu", "--batch-size", "7") == pytest.approx(found, abs=noise)
    assert scores(first) == pytest.approx(found[:1], abs=noise)
