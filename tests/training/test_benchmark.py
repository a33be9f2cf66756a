"""Timers, random batches, and how results are written."""

import json
import time
from math import inf, log, nan

import pytest
import torch

from dlrm.training import benchmark


def test_cpu_milliseconds_is_the_median_of_a_call():
    seen = []

    def run(index):
        seen.append(index)
        time.sleep(0.2 if index == 3 else 0.01)  # one that is disturbed does not count

    assert 10 <= benchmark.cpu_milliseconds(run, warm_up=2, steps=5) < 50
    assert seen == list(range(7))


def test_batches_have_ids_of_every_table_skewed_or_not():
    rows, size = [1, 1000, 50_000_000], 20_000
    for skewed, first in ((True, log(2) / log(1001)), (False, 1 / 1000)):
        generator = torch.Generator().manual_seed(0)
        batch = benchmark.draw_batch(rows, size, "cpu", skewed=skewed, generator=generator)
        ids, most = batch.ids, torch.tensor(rows)[:, None]
        assert ids.shape == (3, size)
        assert ids.dtype == torch.int32
        assert ((ids >= 0) & (ids < most)).all()
        assert not ids[0].any()
        assert float((ids[1] == 0).float().mean()) == pytest.approx(first, abs=0.005)
        assert batch.dense.shape == (13, size)
        assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_a_result_is_written_with_where_it_was_measured(tmp_path):
    benchmark.write(tmp_path / "made" / "result.json", {"results": [1]})
    record = json.loads((tmp_path / "made" / "result.json").read_text())
    assert record["results"] == [1]
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["environment"]["cores"] >= 1


def test_a_result_is_written_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DLRM_COMMIT", raising=False)
    benchmark.write(tmp_path / "result.json", {})
    assert json.loads((tmp_path / "result.json").read_text())["environment"]["commit"] is None


def test_what_is_not_a_number_is_null(tmp_path):
    benchmark.write(tmp_path / "r.json", {"auc": nan, "rows": [{"ratio": inf, "ms": 0.1}]})
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert written["auc"] is None
    assert written["rows"] == [{"ratio": None, "ms": 0.1}]


@pytest.mark.gpu
def test_captured_work_waits_for_its_inputs():
    """It is timed on a stream of its own; a sort that began before it must not lose its memory."""
    source, seen = torch.zeros(1000, device="cuda"), []
    benchmark.captured_milliseconds([lambda: source.fill_(0).clone()])  # all kernels are loaded
    torch.cuda._sleep(10**9)  # cycles, some 0.5 s
    source.fill_(1)
    benchmark.captured_milliseconds([lambda: seen.append(source.clone())])
    assert seen[0].min() == 1
