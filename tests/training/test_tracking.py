import io
import json
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dlrm.training.profiling import Clock, Profiler, peak_memory, read_trace
from dlrm.training.tracking import OVERVIEW, Tracker, log_figures


def events(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_the_same_numbers_in_tensorboard_and_json_lines(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(1, {"train/loss": 0.5, "speed/samples_per_second": 10.0})
    tracker.log(2, {"train/loss": 0.25})
    tracker.text("config", "emb: tt\n")
    options = {"emb": "tt", "name": "a", "model": {"top_mlp": [4, 2]}}
    tracker.finish(options, {"test/auc": 0.75}, hidden={"name"})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [0.5, 0.25]
    read = events(tmp_path)
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    assert "config/text_summary" in read.Tags()["tensors"]
    start = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"model.top_mlp" in start
    assert b"name" not in start.replace(b"model_name", b"")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"] == {"test/auc": 0.75}
    assert result["options"] == options
    assert not list(tmp_path.glob("*.tmp"))


def test_only_numbers_are_numbers_on_the_page_of_hparams(tmp_path):
    options = {"emb": "tt", "tt": {"rank": 32}, "lr": 0.5, "profile": True, "budget": None}
    Tracker(tmp_path).finish(options, {"test/auc": 0.75})
    data = events(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(data).session_start_info.hparams
    assert (shown["tt.rank"].number_value, shown["lr"].number_value) == (32, 0.5)
    texts = [shown[name].string_value for name in ("emb", "profile", "budget")]
    assert texts == ["tt", "True", "None"]


def test_the_overview_has_its_charts_in_order(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"train/loss": 0.5, "val/auc": 0.7})
    read = events(tmp_path)
    layout = read.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert [layout.index(category.encode()) for category in OVERVIEW] == sorted(
        layout.index(category.encode()) for category in OVERVIEW
    )
    assert b"^val/auc" in layout
    with Tracker(tmp_path, step=1):
        pass
    assert len(events(tmp_path).Tensors("custom_scalars__config__")) == 1


def test_figures_become_images_of_a_run(tmp_path):
    figure, axes = plt.subplots(figsize=(2, 1), dpi=50)
    axes.plot([0, 1])
    log_figures(tmp_path / "comparison", {"comparison/auc": figure})
    (image,) = events(tmp_path / "comparison").Images("comparison/auc")
    assert (image.width, image.height) == (100, 50)
    pixels = plt.imread(io.BytesIO(image.encoded_image_string))
    assert len(np.unique(pixels)) > 2  # something is drawn
    assert plt.fignum_exists(figure.number)  # the caller may go on to save it
    plt.close(figure)


def test_what_is_not_a_number_is_null_in_json(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"test/auc": float("nan")})
        tracker.finish({"emb": "tt"}, {"test/auc": float("nan")})
    for name in ("metrics.jsonl", "result.json"):
        text = (tmp_path / name).read_text()
        assert "null" in text
        assert "NaN" not in text


def test_of_two_new_runs_in_one_place_the_second_is_refused(tmp_path):
    with Tracker(tmp_path) as first:
        first.log(1, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="belongs to another run: choose another --name"):
            Tracker(tmp_path)
    assert len(list(tmp_path.glob("events*"))) == 1
    assert [e.value for e in events(tmp_path).Scalars("train/loss")] == [1.0]


def test_a_resumed_run_drops_what_was_logged_after_its_checkpoint(tmp_path):
    with Tracker(tmp_path) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"train/loss": float(step)})
    with Tracker(tmp_path, step=3) as tracker:
        tracker.log(4, {"train/loss": 40.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [1, 2, 3, 40]
    assert [e.value for e in events(tmp_path).Scalars("train/loss")] == [1, 2, 3, 40]


def test_a_line_that_was_cut_off_does_not_stop_a_resumed_run(tmp_path):
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + '{"step": 2, "tr')
    with Tracker(tmp_path, step=1):
        pass
    assert path.read_text() == before
    path.write_text('{"step": 2, "tr\n' + before)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is not JSON: .*remove the line"):
        Tracker(tmp_path, step=1)
    assert path.read_text().endswith(before)
    for line in (b"5", b'{"a": 1}', b"\xff"):
        path.write_bytes(line + b"\n" + before.encode())
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 .*remove the line"):
            Tracker(tmp_path, step=1)


def test_clock_leaves_out_pauses_and_counts_waiting(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dlrm.training.tracking.time.perf_counter", lambda: now[0])
    data = SimpleNamespace(wait_seconds=5.0)
    clock = Clock(data)
    now[0], data.wait_seconds, clock.samples = 102.0, 6.0, 200
    assert clock.lap() == {"speed/samples_per_second": 100.0, "speed/data_wait_share": 0.5}
    with clock.paused():
        now[0] += 50
    now[0] += 2
    clock.samples += 600
    assert clock.lap() == {"speed/samples_per_second": 300.0, "speed/data_wait_share": 0.0}
    assert clock.total()["speed/samples_per_second"] == 200.0
    assert clock.total()["speed/train_seconds"] == 4.0


@pytest.mark.parametrize("steps", [3, 16])
def test_profiler_writes_a_trace_and_a_table(tmp_path, device, steps):
    profiler = Profiler(tmp_path, device)
    for _ in range(steps):
        torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
        profiler.step()
    table = profiler.close()
    if steps < 13:
        assert "too short" in table
    else:
        assert "aten::mm" in table
        assert str(tmp_path / "profile" / "trace.json") in table
        trace = read_trace(tmp_path / "profile" / "trace.json")
        products = trace[trace["name"] == "aten::mm"]
        assert len(products) == 5  # the steps that are recorded
        assert (products["ms"] > 0).all()
        assert trace["start"].is_monotonic_increasing
        assert trace["start"].iloc[0] == 0
        resumed = Profiler(tmp_path, device)  # and soon over
        resumed.step()
        assert "trace.json" not in resumed.close()
        assert set(trace["kind"]) >= {"cpu_op"} | ({"kernel"} if device.type == "cuda" else set())


def test_memory_is_in_bytes(device):
    assert peak_memory(device)["memory/process_peak"] > 50e6
