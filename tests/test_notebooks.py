"""The notebooks run from top to bottom, and are committed with their outputs."""

import json
import re
from pathlib import Path

import pytest

from dlrm.data import synthetic

nbformat = pytest.importorskip("nbformat")  # of the dev extra, which a GPU machine may lack
NotebookClient = pytest.importorskip("nbclient").NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def run(path, monkeypatch, data=None):
    """The outputs of a notebook on small data."""
    monkeypatch.setenv("DLRM_SMALL", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DLRM_DATA", raising=False)
    if data:
        monkeypatch.setenv("DLRM_DATA", str(data))
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.outputs = []
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    return [output for cell in cells for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom_on_small_data(path, monkeypatch):
    outputs = run(path, monkeypatch)
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bags"), [("data", None), ("data", [1, 3] * 13), ("tt_rec", None)]
)
def test_runs_on_own_data_without_a_planted_truth_and_smaller_than_its_caches(
    name, bags, monkeypatch, tmp_path
):
    data = tmp_path / "data"
    sizes = {"cardinalities": [99] * 26, "bag_sizes": bags}
    synthetic.write(data, rows=700, **sizes, fractions=(0.8, 0.1, 0.1))
    meta = json.loads((data / "meta.json").read_text())
    del meta["planted"]
    (data / "meta.json").write_text(json.dumps(meta))
    outputs = run(ROOT / "notebooks" / f"{name}.ipynb", monkeypatch, data)
    told = "".join(output.get("text", "") for output in outputs)
    assert "in a batch of 512" in told or "best possible test AUC unknown" in told


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path):
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(re.search(r"\bcpu\b|NVIDIA", output.get("text", "")) for output in outputs)
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_says_nothing_of_the_machine_it_ran_on(path):
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert not re.findall(r"/(?:work|tmp|home|root|opt|usr)/\S*", text)
    assert path.stat().st_size < 1_000_000
