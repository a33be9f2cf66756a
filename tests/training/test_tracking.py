import io
import json
import time
from contextlib import closing
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from dlrm.training import dashboards
from dlrm.training.profiling import PARTS, Clock, Profiler, peak_memory, read_trace
from dlrm.training.tracking import Tracker, finished, log_figures


def events(directory):
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_the_same_numbers_in_tensorboard_and_json_lines(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(1, {"lr/dense": 0.5, "speed/samples_per_second": 10.0})
    tracker.log(2, {"lr/dense": 0.25})
    tracker.log(2, {})
    tracker.texts(config="emb: tt\n", sharding="")
    options = {"emb": "tt", "name": "a", "model": {"top_mlp": [4, 2]}}
    tracker.finish(options, {"test/auc": 0.75}, steps=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr/dense"] for line in lines] == [0.5, 0.25], "and no empty line"
    read = events(tmp_path)
    assert [(e.step, e.value) for e in read.Scalars("lr/dense")] == [(1, 0.5), (2, 0.25)]
    assert "config/text_summary" in read.Tags()["tensors"]
    assert "sharding/text_summary" not in read.Tags()["tensors"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["metrics"], result["steps"]) == ({"test/auc": 0.75}, 2)
    assert result["options"] == options
    assert not list(tmp_path.glob("*.tmp"))


def test_tensorboard_opens_on_auc_and_log_loss(tmp_path):
    """It sorts charts by name, and opens the first two groups."""
    values = dict.fromkeys(
        [
            *("cache/hit_rate", "embeddings/bytes", "fitted/auc", "lr/dense", "train/loss"),
            *("train/gradient_norm/dense", "memory/gpu_peak", "test/best_possible_auc"),
            *(f"{split}/{name}" for split in ("val", "test") for name in ("auc", "log_loss")),
            *("val/calibration", "speed/samples_per_second", "test/best_possible_log_loss"),
        ],
        0.5,
    )
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, values)
    tags = sorted(events(tmp_path).Tags()["scalars"])
    assert len(tags) == len(values)
    assert tags[:8] == [
        *("AUC/val", "Log_loss/train", "Log_loss/val"),
        *("Result/AUC_fitted", "Result/AUC_test", "Result/AUC_test_best_possible"),
        *("Result/Log_loss_test", "Result/Log_loss_test_best_possible"),
    ]
    assert all(tag.islower() for tag in tags[8:])


def test_hparams_has_the_options_that_differ_and_five_results(tmp_path):
    """The columns of the page are those of any one run, so they are the same for all."""
    options = {"emb": "tt", "seed": 1, "data": "d", "budget": None, "optim": {"lr": 0.5}}
    final = dict.fromkeys([*dashboards.RESULTS, "test/accuracy"], 0.5)
    Tracker(tmp_path / "a").finish(options, final, {"emb": "tt", "seed": 1, "optim.lr": 0.5})
    Tracker(tmp_path / "b").finish({"emb": "dense", "seed": 0, "data": "d"}, {"test/auc": 0.5}, {})
    shown = {}
    for run in "ab":
        summaries = events(tmp_path / run).summary_metadata
        read = {
            tag: HParamsPluginData.FromString(summaries[f"_hparams_/{tag}"].plugin_data.content)
            for tag in ("experiment", "session_start_info")
        }
        shown[run] = read["session_start_info"].session_start_info.hparams
        columns = [column.name for column in read["experiment"].experiment.hparam_infos]
        assert columns == ["emb", "budget", "data", "seed", "options"]
        results = [column.name.tag for column in read["experiment"].experiment.metric_infos]
        wanted = ["Result/AUC_test", "Result/Log_loss_test", *dashboards.RESULTS[2:]]
        assert results == wanted[: None if run == "a" else 1]
    assert shown["a"]["options"].string_value == "optim.lr=0.5"
    assert shown["a"]["seed"].number_value == 1
    assert shown["a"]["budget"].string_value == shown["b"]["options"].string_value == ""


def test_the_overview_has_its_charts_in_order(tmp_path):
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, {"train/loss": 0.5, "val/auc": 0.7})
    read = events(tmp_path)
    layout = read.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    categories = [layout.index(category.encode()) for category in dashboards.OVERVIEW]
    assert categories == sorted(categories)
    assert b"^AUC/val" in layout
    with closing(Tracker(tmp_path, step=1)):
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
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, {"test/auc": float("nan")})
        tracker.finish({"emb": "tt"}, {"test/auc": float("nan")})
    for name in ("metrics.jsonl", "result.json"):
        text = (tmp_path / name).read_text()
        assert "null" in text
        assert "NaN" not in text


def test_of_two_new_runs_in_one_place_the_second_is_refused(tmp_path):
    with closing(Tracker(tmp_path)) as first:
        first.log(1, {"train/loss": 1.0})
        with pytest.raises(ValueError, match="belongs to another run: choose another --name"):
            Tracker(tmp_path)
    assert len(list(tmp_path.glob("events*"))) == 1
    assert [e.value for e in events(tmp_path).Scalars("Log_loss/train")] == [1.0]


def test_a_resumed_run_drops_what_was_logged_after_its_checkpoint(tmp_path, monkeypatch):
    with closing(Tracker(tmp_path)) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"train/loss": float(step)})
    later = time.time() + 10  # TensorBoard orders files by the second in their names
    monkeypatch.setattr(time, "time", lambda: later)
    with closing(Tracker(tmp_path, step=3)) as tracker:
        tracker.log(4, {"train/loss": 40.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == [1, 2, 3, 40]
    assert [e.value for e in events(tmp_path).Scalars("Log_loss/train")] == [1, 2, 3, 40]


def test_a_line_that_was_cut_off_does_not_stop_a_resumed_run(tmp_path):
    with closing(Tracker(tmp_path)) as tracker:
        tracker.log(1, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + '{"step": 2, "tr')
    with closing(Tracker(tmp_path, step=1)):
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


def test_a_run_has_finished_at_a_step_with_its_options(tmp_path):
    assert finished(tmp_path, 3, {"emb": "tt"}) == {}
    Tracker(tmp_path).finish({"emb": "tt"}, {"test/auc": 0.5, "val/auc": float("nan")}, steps=3)
    found = finished(tmp_path, 3, {"emb": "tt"})
    assert found["test/auc"] == 0.5
    assert np.isnan(found["val/auc"])
    for step, options in ((2, {"emb": "tt"}), (3, {"emb": "qr"}), (None, {"emb": "tt"})):
        assert finished(tmp_path, step, options) == {}


def test_clock_gives_each_second_to_one_part(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dlrm.training.profiling.time.perf_counter", lambda: now[0])
    data, graphs = SimpleNamespace(wait_seconds=5.0), SimpleNamespace(preparing_seconds=0.0)
    clock = Clock(data, graphs, began=90.0)
    assert clock.total().keys() == {f"seconds/{name}" for name in ("total", *PARTS)}
    clock.begin("train")
    now[0], data.wait_seconds, clock.samples = 102.0, 6.0, 200
    assert clock.lap() == {"speed/samples_per_second": 100.0, "speed/data_wait_share": 0.5}
    with clock.part("validate"):
        now[0] += 50
        with clock.part("checkpoint"):
            now[0] += 3
        assert clock.state() == {"samples": 200, "seconds": 2.0, "wait": 1.0}
    now[0] += 2
    clock.samples += 600
    assert clock.lap() == {"speed/samples_per_second": 300.0, "speed/data_wait_share": 0.0}
    clock.begin("end")
    now[0] += 7
    graphs.preparing_seconds = 0.5
    total = clock.total()
    assert total["speed/samples_per_second"] == 200.0
    assert total["speed/train_seconds"] == 4.0
    parts = {"total": 74, "start": 10, "compile": 0.5, "train": 2.5, "data_wait": 1}
    parts |= {"validate": 50, "checkpoint": 3, "test": 0, "end": 7}
    assert {name: total[f"seconds/{name}"] for name in parts} == parts

    resumed = Clock(data, graphs, now[0], clock.state())
    speed = resumed.total()
    assert {name: total[name] for name in speed if name.startswith("speed/")} == {
        name: speed[name] for name in speed if name.startswith("speed/")
    }
    resumed.begin("train")
    now[0], resumed.samples = now[0] + 4, 800
    assert resumed.total()["speed/train_seconds"] == 8.0
    assert resumed.total()["speed/data_wait_share"] == 1 / 8


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
