"""Runs that a signal ends can be resumed, and end with the same bits."""

import os
import signal
import time
from functools import partial

import pytest

from tests.kit import best_name, latest_step, log_lines, losses, metrics_of, wait_for

EVERY = ["--patience", "0", "--log_every", "1", "--eval_every", "10", "--epochs", "3"]
LINE = "interrupted; resume with --resume {}"


def comparable(values):
    """The metrics that do not depend on time."""
    return {k: v for k, v in values.items() if k.startswith(("test/", "val/", "embeddings/"))}


def validated(lines):
    """The metrics of each validation."""
    of_one = [{k: v for k, v in x.items() if k.startswith(("val/", "step"))} for x in lines]
    return [values for values in of_one if len(values) > 1]


@pytest.fixture
def interrupt(start, command):
    """Starts a run, and sends it a signal when a file contains a text; returns the process."""

    def interrupt(number, name, path, text, *given):
        process = start("train", *command(name, *EVERY, *given))
        wait_for(path, text, process)
        began = time.monotonic()
        os.kill(process.pid, number)
        process.wait()
        assert time.monotonic() - began < 30
        assert process.returncode == 128 + number, process.stderr
        assert "Traceback" not in process.stderr
        return process

    return interrupt


@pytest.fixture
def resumes_to_the_same_bits(run, train, tmp_path):
    """Resumes an interrupted run, and compares it with an uninterrupted one."""

    def check(name, *given):
        run("train", "--resume", tmp_path / name)
        train("whole", *EVERY, *given)
        ended, whole = tmp_path / name, tmp_path / "whole"
        assert losses(ended) == losses(whole)
        assert validated(log_lines(ended)) == validated(log_lines(whole))
        assert comparable(metrics_of(ended)) == comparable(metrics_of(whole))
        assert best_name(ended) == best_name(whole)

    return check


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGINT, "dense"),
        pytest.param(signal.SIGTERM, "tt", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "offload", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_resumed_to_the_same_bits(
    number, kind, interrupt, resumes_to_the_same_bits, options, tmp_path
):
    log = tmp_path / "run" / "metrics.jsonl"
    process = interrupt(number, "run", log, '"step": 33,', *options(kind))
    assert process.stderr.splitlines()[-1] == LINE.format(tmp_path / "run")
    last = max(losses(tmp_path / "run"))
    assert latest_step(tmp_path / "run") == last
    resumes_to_the_same_bits("run", *options(kind))


@pytest.mark.parametrize(
    ("split", "step"),
    [
        ("val", 20),
        pytest.param("val", 114, marks=pytest.mark.slow),
        pytest.param("test", 114, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_that_is_interrupted_is_repeated(
    split, step, script, train, resumes_to_the_same_bits, monkeypatch, tmp_path
):
    """It ends with its batch, and the state is saved without its metrics."""
    program, scored = script("train"), []
    evaluate, predict = program.Run._evaluate, program.metrics.predict

    def watched(self, own):
        due = (own, self.steps) == (split, step)
        predicted = partial(predict_and_signal, due)
        monkeypatch.setattr(program.metrics, "predict", predicted)
        return evaluate(self, own)

    def predict_and_signal(due, model, batches, **given):
        return predict(model, signalling(batches) if due else batches, **given)

    def signalling(batches):
        for batch in batches:
            scored.append(batch.size)
            if len(scored) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(program.Run, "_evaluate", watched)
    done = train("run", *EVERY, "--eval_batch_size", "100", status=143)
    monkeypatch.undo()
    assert scored == [100, 100]
    assert done.stderr.splitlines()[-1] == LINE.format(tmp_path / "run")
    assert latest_step(tmp_path / "run") == step
    resumes_to_the_same_bits("run", "--eval_batch_size", "100")


def test_without_checkpoints_nothing_is_saved(interrupt, tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    process = interrupt(signal.SIGTERM, "run", log, '"step": 3,', "--checkpoint", "false")
    line = "interrupted; nothing was saved, as --checkpoint is false"
    assert process.stderr.splitlines()[-1] == line
    assert not (tmp_path / "run" / "checkpoints").exists()
