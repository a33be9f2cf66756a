"""The benchmarks of the dense kernels run, and say so where they can't."""

import json
import runpy
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = {
    "benchmark_lookup": ["--dims", "16", "--batches", "300", "--max-rows", "1000"],
    "benchmark_interaction": ["--dims", "16", "--batches", "300"],
}


def main_of(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main_of(name)([])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: this benchmark needs a CUDA GPU\n"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_reports_times_and_floors(name, tmp_path):
    output = tmp_path / "result.json"
    main_of(name)([*SMALL[name], "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["environment"]["device"]
    assert all(result["forward"] > 0 < result["forward_floor"] for result in record["results"])


@pytest.mark.gpu
def test_a_wrong_result_is_not_reported(monkeypatch):
    from dlrm.kernels import interaction

    right = interaction.dot_interaction
    monkeypatch.setattr(interaction, "dot_interaction", lambda *x: right(*x) * 1.01)
    with pytest.raises(SystemExit, match=r"differs from PyTorch by .*: nothing is reported"):
        main_of("benchmark_interaction")(SMALL["benchmark_interaction"])
