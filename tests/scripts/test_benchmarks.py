"""Every benchmark runs on small inputs, and reports no times of a wrong result."""

import json
import shlex
import subprocess
import sys
from math import inf, log, nan
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import all as suite
from scripts.benchmarks import batches, harness, run

ELSEWHERE = ["distributed", "offload"]  # have tests of their own
SLOW = {"basis", "export", "mlperf", "predict", "prepare", "tt", "whole_run"}
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] if name.split()[0] in SLOW else [])
    for name in [*run.CASES, "lookup --one-table", "prepare --csv"]
    if name not in ELSEWHERE
]


@pytest.mark.parametrize("case", CASES)
def test_every_benchmark_runs(case, tmp_path, capsys):
    output = tmp_path / "made" / "result.json"
    assert run.main([*case.split(), "--small", "--output", str(output)]) == 0, capsys.readouterr()
    record = json.loads(output.read_text())
    assert record.pop("environment")["cores"] >= 1
    rows = next(record[key] for key in ("results", "runs", "loader", "idle") if key in record)
    assert rows


@pytest.mark.parametrize("case", ["lookup", "tt"])
def test_some_need_a_gpu(case, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        run.main([case])
    assert stop.value.code == 2
    assert "error: this benchmark needs a CUDA GPU; --small" in capsys.readouterr().err


@pytest.mark.slow
def test_losses_of_several_processes_are_those_of_one(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", run.__file__]
    given = ["distributed", "--small", "--device", "cpu", "--output", output]
    done = subprocess.run([*command, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert all(check["losses_differ_by"] < 1e-6 for check in record["checks"])
    _, two, *auto = record["results"]
    assert [row["kind"] for row in auto] == ["auto", "auto"]
    assert two["scaling"] > 0
    # On four, a process sends 1.5 times what it sends on two.
    added = two["ms"] - two["scaling"] * two["ms"]
    assert two["predicted"]["4"]["ms"] == pytest.approx(two["ms"] + added / 2, rel=0.01)


@pytest.mark.parametrize("size", [6912, 65536])
def test_two_gpus_predict_what_four_took(size):
    """On DLRM-DCNv2, of which four cut the table with most look-ups by columns."""
    case, folder = run.load("distributed"), Path(__file__).parents[2] / "benchmarks"
    two, four = (
        next(
            row
            for row in json.loads((folder / f"distributed_{name}.json").read_text())["results"]
            if (row["model"], row["batch_per_gpu"], row["gpus"]) == ("mlperf", size, gpus)
        )
        for name, gpus in [("two_h200", 2), ("mlperf_4xh200", 4)]
    )
    mlperf = case.Case(model="mlperf")
    ids = [mlperf.ids_received(gpus, 40_000_000, 150 << 30) for gpus in (2, 4)]
    given = two["ms"] * two["scaling"], two["ms"], 2, 4
    plain, model = (case.predicted_ms(*given, size * n) for n in (0, ids[1] - ids[0]))
    assert plain < 0.95 * four["ms"]
    assert model == pytest.approx(four["ms"], rel=0.03)
    assert two["predicted"]["4"]["ms"] == pytest.approx(model, rel=0.001)


def test_one_process_is_not_several(capsys):
    assert run.main(["distributed", "--device", "cpu"]) == 2
    assert "start it with torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_a_wrong_result_is_not_reported(monkeypatch, tmp_path, capsys):
    case, output = run.load("lookup"), tmp_path / "result.json"
    right = case.update_rows
    monkeypatch.setattr(case, "update_rows", lambda *x, lr: right(*x, lr=1.01 * lr))
    assert run.main(["lookup", "--small", "--output", str(output)]) == 2
    assert "differs from PyTorch by" in (error := capsys.readouterr().err)
    assert "nothing is reported" in error
    assert "results" not in json.loads(output.read_text())


def test_offloaded_tables_whose_losses_differ_are_an_error(capsys, monkeypatch):
    losses = iter([[0.5], [0.6]])
    monkeypatch.setattr(run.load("offload"), "measure_one", lambda *_: ({"ms": 1.0}, next(losses)))
    assert run.main(["offload", "--small", "--device", "cpu"]) == 2
    assert "error: offload adagrad 16: losses differ by 0.09" in capsys.readouterr().err


def test_offloaded_tables_learn_what_dense_ones_do(tmp_path):
    output = tmp_path / "offload.json"
    given = ["offload", "--small", "--device", "cpu", "--output", str(output)]
    assert run.main(given) == 0
    results = json.loads(output.read_text())["results"]
    assert [result["variant"] for result in results] == run.load("offload").USUAL
    assert not any("losses_differ_by" in result for result in results)
    assert results[1]["MB_in"] > 0

    variants = ["dynamic", "dynamic, host"]  # which start from other rows than dense ones
    assert run.main([*given, "--variants", *variants]) == 0
    results = json.loads(output.read_text())["results"]
    assert [result["variant"] for result in results] == variants
    assert not any("losses_differ_by" in result for result in results)
    assert results[1]["MB_in"] > 0


def test_tables_of_any_ids_are_timed_in_host_memory(tmp_path):
    output = tmp_path / "result.json"
    given = ["dynamic", "--small", "--parts", "host", "--device", "cpu", "--output", str(output)]
    assert run.main(given) == 0
    (row,) = json.loads(output.read_text())["host"]
    assert 0 < row["new_hit_rate"] < row["known_hit_rate"] < 1
    assert row["new_MB_in"] > 0


def test_lists_are_timed_beside_flat_columns(tmp_path):
    output = tmp_path / "result.json"
    assert run.main(["loader", "--multi-hot", "--small", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["ids_per_row"] == 214
    assert [row["order"] for row in record["loader"]] == list(run.load("loader").ORDERS)
    for row in record["loader"]:
        flat, lists = (row["ids_per_second"][kind]["median"] for kind in ("flat", "lists"))
        assert row["lists_to_flat"] == pytest.approx(lists / flat, abs=0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["loader", "--repeats", "0"], "--repeats: is '0', it must be a whole number"),
        (["prepare", "--raw", __file__], "rows, fewer than --rows: lower that"),
        (["prepare", "--raw", __file__, "--csv"], "--raw has rows of Criteo: leave it out"),
        (["distributed", "--models", "kagle"], "invalid choice: 'kagle'"),
        (["setp"], "invalid choice: 'setp'"),
    ],
)
def test_options_that_cannot_be_are_refused(given, message, capsys):
    try:
        status = run.main(given)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_written_or_used_is_named(tmp_path, capsys, monkeypatch):
    small = ["loader", "--rows", "9", "--batch-sizes", "8", "--repeats", "1"]
    assert run.main([*small, "--device", "gpu"]) == 2
    error = capsys.readouterr().err
    assert error == "error: --device is 'gpu', it must be auto, cpu, cuda or cuda:1\n"

    (tmp_path / "file").touch()
    monkeypatch.setattr(run.load("step"), "measure_one", lambda *_: {})
    output = str(tmp_path / "file" / "out.json")
    assert run.main(["step", "--device", "cpu", "--output", output]) == 2
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


class TestAll:
    """One file with the figures of all benchmarks."""

    @pytest.fixture
    def measure(self, tmp_path, monkeypatch):
        """Runs all.py with benchmarks that take no time; returns the names measured, the record."""

        def run(*arguments, status=0):
            measured = []

            def fake(entry, options, limit):
                measured.append(entry.command.split()[0])
                error = "failed with status 2" if "predict" in entry.command else None
                return {"results": [{"ms": 1.0}], "seconds": 1.0}, error

            monkeypatch.setattr(suite, "run", fake)
            given = ["--device", "cpu", "--output", str(output), *arguments]
            assert suite.main(given) == status
            return measured, json.loads(output.read_text())

        output = tmp_path / "all.json"
        return run

    def test_a_second_call_measures_what_is_missing(self, measure, capsys):
        assert measure("--only", "step", "basis")[0] == ["step", "basis"]
        names, record = measure(status=2)
        assert "basis" not in names
        assert "export" in names
        assert record["results"]["step"]["results"] == [{"ms": 1.0}]
        assert "these benchmarks failed: predict" in capsys.readouterr().err

    def test_nothing_starts_after_the_budget(self, measure, capsys):
        assert measure("--budget-seconds", "1e-9", "--only", "step", status=0)[0] == []

    def test_a_benchmark_that_takes_too_long_is_stopped(self, tmp_path):
        options = type("Options", (), {"device": "cpu", "small": True})
        result, error = suite.run(suite.Entry("loader"), options, limit=0.01)
        assert error == result["error"] == "stopped"


def test_every_suite_names_benchmarks():
    for entry in [*suite.ON_GPU.values(), *suite.ON_CPU.values()]:
        name, *options = shlex.split(entry.command)
        run.parser_of(name).parse_args(options)


def test_cpu_milliseconds_is_the_median_of_a_call(monkeypatch):
    seen, now = [], [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def call(index):
        seen.append(index)
        now[0] += 0.2 if index == 3 else 0.01  # one that is disturbed does not count

    assert harness.cpu_milliseconds(call, warm_up=2, steps=5) == pytest.approx(10)
    assert seen == list(range(7))


def test_batches_have_ids_of_every_table_skewed_or_not():
    rows, size = [1, 1000, 50_000_000], 20_000
    for skewed, first in ((True, log(2) / log(1001)), (False, 1 / 1000)):
        generator = torch.Generator().manual_seed(0)
        batch = batches.draw_batch(rows, size, "cpu", skewed=skewed, generator=generator)
        ids, most = batch.ids, torch.tensor(rows)[:, None]
        assert ids.shape == (3, size)
        assert ids.dtype == torch.int32
        assert ((ids >= 0) & (ids < most)).all()
        assert not ids[0].any()
        assert float((ids[1] == 0).float().mean()) == pytest.approx(first, abs=0.005)
        assert batch.dense.shape == (13, size)
        assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_record_says_where_it_was_measured_without_git_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DLRM_COMMIT", raising=False)
    record = harness.Record(tmp_path / "made" / "result.json")
    record.add({"auc": nan, "ratio": [inf, 0.123456789]})
    written = json.loads(record.output.read_text(), parse_constant=pytest.fail)
    assert written["results"] == [{"auc": None, "ratio": [None, 0.12346]}]
    assert written["environment"]["versions"]["torch"] == torch.__version__
    assert written["environment"]["commit"] is None


@pytest.mark.gpu
def test_captured_work_waits_for_its_inputs():
    """It is timed on a stream of its own; a sort that began before it must not lose its memory."""
    source, seen = torch.zeros(1000, device="cuda"), []
    harness.captured_milliseconds([lambda: source.fill_(0).clone()])  # all kernels are loaded
    torch.cuda._sleep(10**9)  # cycles, some 0.5 s
    source.fill_(1)
    harness.captured_milliseconds([lambda: seen.append(source.clone())])
    assert seen[0].min() == 1
