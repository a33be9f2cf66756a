"""The page on joins: its code makes a served model of three tables."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "joins.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def write_tables(directory):
    """Ratings, users and movies as MovieLens-100k has them in RecBole: ids, gaps, equal seconds."""
    random = np.random.default_rng(0)
    users, movies, count = 60, 90, 4000
    taste, kinds = random.normal(size=(users, 3)), random.normal(size=(movies, 3))
    user, movie = random.integers(0, users, count), random.zipf(1.3, count) % movies
    liked = (taste[user] * kinds[movie]).sum(1) + random.normal(size=count) > 0
    tables = {
        "inter": {
            "user_id:token": user + 1,
            "item_id:token": movie + 1,
            "rating:float": np.where(liked, random.integers(4, 6, count), 2),
            "timestamp:float": 881250949 + random.integers(0, 3000, count),
        },
        "user": {
            "user_id:token": np.arange(users) + 1,
            "age:token": random.integers(18, 70, users),
            "gender:token": random.choice(["M", "F"], users),
            "occupation:token": random.choice(["writer", "other", "student"], users),
            "zip_code:token": random.integers(10000, 99999, users),
        },
        "item": {
            "item_id:token": np.arange(movies - 1) + 1,  # one is unknown
            "movie_title:token_seq": [f"Movie {i}" for i in range(movies - 1)],
            "release_year:token": random.choice(["1995", "1996", "unkonwn"], movies - 1),
            "class:token_seq": random.choice(["Drama", "Action Drama", "Comedy"], movies - 1),
        },
    }
    (directory / "ml-100k").mkdir()
    for name, columns in tables.items():
        path = directory / "ml-100k" / f"ml-100k.{name}"
        pd.DataFrame(columns).to_csv(path, sep="\t", index=False)


def test_the_page_makes_a_served_model_of_three_tables(run, tmp_path, monkeypatch):
    write_tables(tmp_path)
    join, score = blocks("python")
    (columns,), (commands,) = blocks("yaml"), blocks("bash")
    (tmp_path / "ratings.yaml").write_text(columns)
    names = {}
    monkeypatch.chdir(tmp_path)
    exec(compile(join, "joins.md", "exec"), names)

    # No row is lost or repeated, and no history knows the row itself or later ones.
    rows = names["rows"]
    assert len(rows) == 4000
    assert rows["movie_title"].isna().any()
    for user, own in rows.groupby("user_id"):
        last = own.iloc[-1]
        before = own[(own["timestamp"] < last["timestamp"]) & (own["rating"] >= 4)]
        assert last["history"] == before["item_id"].tolist()[-20:], user

    places = {name: str(tmp_path / name) for name in ("ratings.parquet", "ratings.yaml", "served")}
    places |= {name: str(tmp_path / name) for name in ("data/movies", "runs/movies")}
    printed = {}
    for line in commands.splitlines():
        words = [places.get(word, word) for word in shlex.split(line)]
        words = words[1:] if words[0] == "dlrm" else [Path(words[1]).stem, *words[2:]]
        own = {"train": ["--output", tmp_path / "runs", "--device", "cpu", "--batch_size", "128"]}
        own["export"] = ["--compile"]  # for no machine
        if words[0] != "serve":
            printed[words[0]] = run(*words, *own.get(words[0], []))
    result = json.loads((tmp_path / "runs" / "movies" / "result.json").read_text())
    assert result["tables"]["history"] == {"rows": 91, "kind": "shared", "with": "item_id"}
    assert result["tables"]["item_id"]["mode"] == "mean"
    assert result["metrics"]["test/auc"] > 0.6
    assert result["metrics"]["test/groups"] > 40
    assert json.loads(printed["evaluate"].stdout)["importance"].keys() >= {"item_id", "history"}

    monkeypatch.chdir(tmp_path)
    exec(compile(score, "joins.md", "exec"), names)
    assert names["scores"].shape == (100,)

    # The server, which sums and averages lists in its own way, gives the same probabilities.
    served = pytest.importorskip("tests.scripts.test_serve").Served(tmp_path / "served")
    asked = rows.drop(columns=["rating", "split"]).tail(100)
    status, answer = served.ask("POST", "/score", f'{{"rows": {asked.to_json(orient="records")}}}')
    served.stop()
    assert status == 200, answer
    found = json.loads(answer)["probability"]
    assert found == pytest.approx(names["scores"].tolist(), abs=1e-5)
