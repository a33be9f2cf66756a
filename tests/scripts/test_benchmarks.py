"""The benchmarks of the dense kernels and of an epoch run, and say so where they can't."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from dlrm.data import synthetic

SCRIPTS = Path(__file__).parents[2] / "scripts" / "benchmarks"
SMALL = {
    "benchmark_lookup": ["--dims", "16", "--batches", "300", "--max-rows", "1000"],
    "benchmark_interaction": ["--dims", "16", "--batches", "300"],
}


def main_of(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"]


@pytest.mark.parametrize("name", [*SMALL, "benchmark_pages"])
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
def test_pages_are_timed_beside_copies(tmp_path):
    output = tmp_path / "result.json"
    small = ["--table-rows", "131072", "--batch", "300", "--max-rows", "1000"]
    main_of("benchmark_pages")([*small, "--output", str(output)])
    record = json.loads(output.read_text())
    assert all(way["gather"] > 0 for way in record["host"])
    assert record["steps"]["host"]["captured"] > 0


@pytest.mark.gpu
def test_a_benchmark_of_pages_needs_enough_rows(capsys):
    with pytest.raises(SystemExit) as stop:
        main_of("benchmark_pages")(["--table-rows", "100"])
    assert stop.value.code == 2
    assert "--table-rows must be at least 131072" in capsys.readouterr().err


def test_lists_are_timed_beside_flat_columns(tmp_path, capsys):
    output = tmp_path / "result.json"
    small = ["--multi-hot", "--rows", "3000", "--repeats", "1", "--batch-sizes", "500"]
    assert main_of("benchmark_loader")([*small, "--output", str(output)]) == 0, capsys.readouterr()
    record = json.loads(output.read_text())
    assert record["ids_per_row"] == 214
    assert [row["order"] for row in record["loader"]] == [
        "shuffled",
        "shuffled in windows",
        "in order",
    ]
    for row in record["loader"]:
        flat, lists = (row["ids_per_second"][kind]["median"] for kind in ("flat", "lists"))
        assert row["lists_to_flat"] == pytest.approx(lists / flat, abs=0.01)


def test_an_epoch_needs_a_gpu_too(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main_of("benchmark_epoch")(["--data", "nowhere"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: this benchmark needs a CUDA GPU\n"


@pytest.mark.gpu
def test_an_epoch_is_timed_by_its_parts(tmp_path):
    synthetic.write(tmp_path / "data", rows=30_000, cardinalities=[100] * 26)
    output = tmp_path / "result.json"
    arguments = ["--data", str(tmp_path / "data"), "--kinds", "dense", "--batches", "1024"]
    main_of("benchmark_epoch")([*arguments, "--checkpoint", "--output", str(output)])
    (result,) = json.loads(output.read_text())["results"]
    assert result["rows"] == 25_715
    assert 0 < result["training"] + result["test_metrics"] == pytest.approx(result["epoch"])
    assert result["checkpoint"] > 0 < result["compiling_and_capturing"]


@pytest.mark.gpu
def test_a_wrong_result_is_not_reported(monkeypatch):
    from dlrm.kernels import interaction

    right = interaction.dot_interaction
    monkeypatch.setattr(interaction, "dot_interaction", lambda *x: right(*x) * 1.01)
    with pytest.raises(SystemExit, match=r"differs from PyTorch by .*: nothing is reported"):
        main_of("benchmark_interaction")(SMALL["benchmark_interaction"])


def test_offloaded_tables_whose_losses_differ_are_an_error(capsys, monkeypatch, tmp_path):
    main = main_of("benchmark_offload")
    losses = iter([[0.5], [0.6]])
    result = {"ms": 1.0}
    monkeypatch.setitem(main.__globals__, "measure_one", lambda *_: (dict(result), next(losses)))
    given = ["--device", "cpu", "--cap", "500", "--batches", "32", "--rules", "sgd"]
    assert main([*given, "--output", str(tmp_path / "offload.json")]) == 2
    assert "error: offload sgd 32: losses differ by 0.09" in capsys.readouterr().err


@pytest.mark.slow
def test_scores_are_timed(tmp_path):
    output = tmp_path / "result.json"
    main_of("benchmark_predict")(["--rows", "3000", "--output", str(output)])
    record = json.loads(output.read_text())
    assert [run["count"] for run in record["runs"]] == [3000] * 4
    assert all(run["rows_per_second"] > 0 for run in record["runs"])
    assert [found["rows"] for found in record["latencies"]] == [1, 1024] * 2


@pytest.mark.slow
def test_exported_models_are_timed_beside_plain_ones(script, tmp_path):
    output = tmp_path / "result.json"
    small = ["--shrink", "20000", "--rounds", "2", "--models", "tt", "--output", str(output)]
    script("benchmark_export").main(small)
    results = {entry.pop("model"): entry for entry in json.loads(output.read_text())["results"]}
    assert {"tt", "PyTorch, fp32", "PyTorch, int8"} <= set(results)
    assert results["tt"]["load_seconds"] > 0
    assert all(entry["batch_128"]["p50_ms"] > 0 for entry in results.values())
