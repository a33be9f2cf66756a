"""The README and the pages of docs/ promise nothing that was not run."""

import json
import re
from pathlib import Path

import pytest

from scripts.maintenance import readme_tables, table_rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = [
    (page, link)
    for page in PAGES
    for link in sorted(set(re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text())))
]
FILES = re.compile(r"\b((?:scripts|configs|tests|dlrm)/[\w/]+\.(?:py|yaml))")


def test_tables_are_those_of_the_results():
    assert readme_tables.main(["--check"]) == 0, "run python scripts/maintenance/readme_tables.py"


def test_a_table_that_is_not_up_to_date_is_found(tmp_path, monkeypatch):
    text = "<!-- table: basis_cpu -->\n\n| old |\n\n<!-- end -->\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    (tmp_path / "docs" / "speed.md").write_text(text)
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.main(["--check"]) == 1
    assert (tmp_path / "docs" / "speed.md").read_text() == text


def test_a_result_is_a_file_or_a_part_of_the_file_of_all(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    record = {"environment": {"device": "GPU"}, "results": {"step": {"results": [{"ms": 1}]}}}
    (tmp_path / "benchmarks" / "all_gpu.json").write_text(json.dumps(record))
    monkeypatch.setattr(table_rows, "ROOT", tmp_path)
    step = {"environment": {"device": "GPU"}, "results": [{"ms": 1}]}
    assert table_rows.read("all_gpu:step") == step
    assert readme_tables.sources(["all_gpu:step"]) == "GPU; `benchmarks/all_gpu.json`."


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: str(value)[-30:])
def test_links_lead_somewhere(page, link):
    assert (page.parent / link).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page):
    for path in sorted(set(FILES.findall(page.read_text()))):
        assert (ROOT / path).exists(), path


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().split()) <= 1300


@pytest.mark.parametrize("name", ["README.md", "docs/in_your_model.md"])
def test_python_in_the_pages_runs(name, run, tmp_path):
    import pandas as pd
    import torch

    table = pd.DataFrame({"clicked": [0, 1] * 50, "user": [f"user {i % 7}" for i in range(100)]})
    table.to_csv(tmp_path / "rows.csv", index=False)
    data = ("--output", tmp_path / "data", "--label", "clicked")
    run("prepare_table", tmp_path / "rows.csv", *data)
    trained = ("--output", tmp_path, "--name", "run", "--max_steps", "1", "--batch_size", "8")
    run("train", "--data", tmp_path / "data", *trained, "--device", "cpu")

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    names = {"trained": torch.nn.Embedding(5000, 64), "layer": torch.nn.Linear(64, 3000)}
    names["table"] = table
    for block in blocks:
        own = block.replace("runs/NAME", str(tmp_path / "run")).replace("10_000_000", "10_000")
        exec(own.replace("clusters=384", "clusters=16").replace("models/", f"{tmp_path}/"), names)
    assert names["small"](torch.tensor([[1, 2]])).shape == (1, 64)
    assert "scores" not in names or names["scores"].shape == (100,)
