"""What changed since an export, applied to it, is the full export of the newer model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dlrm.export.delta import changes_between
from dlrm.utils.shipped import shipped_program
from tests.kit import corrupt, write_criteo
from tests.scripts.alone import PROGRAM, export_scores

ROOT = Path(__file__).parents[2]
SMALL = ["--batch_size", "128", "--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]"]
SMALL += ["--max_steps", "4", "--optim.lr", "0.05", "--device", "cpu", "--log_every", "4"]
SPLIT = ["--split", "0.8", "0.1", "0.1"]
LATER = ["--max_steps", "1", "--batch_size", "16"]  # so that few rows change


@pytest.fixture(scope="module")
def two_days(tmp_path_factory, programs):
    """A run on the rows of a day, and one that was trained on with those of the next."""
    directory, before = tmp_path_factory.mktemp("days"), []
    for day in range(2):
        raw, data = write_day(directory, day), directory / f"data_{day}"
        programs("scripts.prepare_criteo", raw, "--output", data, *SPLIT, *before)
        given = [*LATER, "--init_from", directory / "run_0"] if day else []
        named = ["--data", data, "--output", directory, "--name", f"run_{day}"]
        programs("train", *named, *SMALL, *given)
        before = ("--ids-of", data, "--append-new")
    same = ["--data", directory / "data_1", "--output", directory, "--name", "run_2"]
    programs("train", *same, *SMALL, *LATER, "--init_from", directory / "run_1")
    return directory


def write_day(directory, day):
    rng, rows = np.random.default_rng(day), []
    for _ in range(1200):
        values = [f"{v:x}" for v in rng.integers(60 * day, 60 * day + 1500, 26) // 3]
        dense = [str(v) for v in rng.integers(0, 99, 13)]
        rows.append([str(int(rng.random() < 0.3)), *dense, *values])
    return write_criteo(directory / f"{day}.tsv", rows)


@pytest.fixture
def export(run, tmp_path):
    def export(trained, name, *options, status=0):
        done = run("export", trained, tmp_path / name, "--last", *options, status=status)
        return tmp_path / name if not status else done.stderr

    return export


def applied(base, delta, output):
    """Run the example alone; returns its status and errors."""
    command = [sys.executable, "-c", PROGRAM, ROOT / "examples" / "apply_delta.py"]
    return subprocess.run([*command, base, delta, output], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("tables", "step"),
    [
        ("fp32", 1),
        pytest.param("fp32", 2, marks=pytest.mark.slow),
        *(pytest.param(t, n, marks=pytest.mark.slow) for t in ("int8", "int4") for n in (1, 2)),
    ],
)
def test_a_delta_gives_the_full_export(tables, step, two_days, export, tmp_path):
    """To a day with new values, and with the same ones."""
    old, new = (two_days / f"run_{own}" for own in (step - 1, step))
    base = export(old, "base", "--compile", "--tables", tables)
    full = export(new, "full", "--compile", "--tables", tables)
    delta = export(new, "delta", "--delta-from", base)
    done = applied(base, delta, tmp_path / "applied")
    assert done.returncode == 0, done.stderr
    made = tmp_path / "applied"
    names = {
        "weights.safetensors",
        "preparation/meta.json",
        *(f"preparation/vocabulary/C{column}.parquet" for column in range(1, 27)),
    }
    for name in names:
        assert (made / name).read_bytes() == (full / name).read_bytes(), name
        assert (made / name).stat().st_mode == (made / "manifest.json").stat().st_mode, name
    manifest, other = (json.loads((own / "manifest.json").read_text()) for own in (made, full))
    assert list(manifest["files"]) == list(other["files"])
    assert {**manifest, "files": 0} == {**other, "files": 0}
    rows = two_days / "1.tsv"
    of_made, of_full, of_base = export_scores(rows, made, full, base)
    assert of_made == of_full != of_base
    programs = [(own / "model.pt2").read_bytes() for own in (made, base)]
    assert (programs[0] == programs[1]) == (step == 2)
    described = json.loads((delta / "delta.json").read_text())
    assert described["result"] == manifest
    held = load_file(delta / "rows.safetensors")
    total = sum(len(v) for k, v in load_file(made / "weights.safetensors").items() if "rows." in k)
    count = sum(len(v) for name, v in held.items() if name.startswith("row_numbers:"))
    assert 0 < described["changed_rows"] == count < total


@pytest.mark.slow
def test_a_delta_follows_ids_that_were_given_away(two_days, run, export, tmp_path):
    """With ``--forget``, tables of the same size hold rows of other values."""
    data, raw = tmp_path / "data_2", write_day(tmp_path, 2)
    forget = ("--ids-of", two_days / "data_1", "--append-new", "--forget", 1)
    run("prepare_criteo", raw, "--output", data, *SPLIT, *forget)
    given = ["--data", data, "--output", tmp_path, "--name", "run", *SMALL, *LATER]
    run("train", *given, "--init_from", two_days / "run_2")
    base = export(two_days / "run_2", "base", "--compile")
    full = export(tmp_path / "run", "full", "--compile")
    delta = export(tmp_path / "run", "delta", "--delta-from", base)
    made = tmp_path / "applied"
    assert applied(base, delta, made).returncode == 0
    for name in ("weights.safetensors", "preparation/vocabulary/C1.parquet"):
        assert (
            (made / name).read_bytes() == (full / name).read_bytes() != (base / name).read_bytes()
        )
    assert (made / "model.pt2").read_bytes() == (base / "model.pt2").read_bytes()  # nothing grew
    of_made, of_full, of_base = export_scores(raw, made, full, base)
    assert of_made == of_full != of_base


@pytest.fixture
def pair(two_days, export):
    base = export(two_days / "run_1", "base", "--compile")
    return base, export(two_days / "run_2", "delta", "--delta-from", base)


@pytest.mark.slow
def test_another_export_and_damaged_files_are_refused(
    pair, two_days, export, tmp_path, monkeypatch, capsys
):
    base, delta = pair
    other = export(two_days / "run_0", "other", "--compile")

    def refused(text, base=base, delta=delta):
        done = applied(base, delta, tmp_path / "applied")
        assert done.returncode == 2
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "applied").exists()
        assert not (tmp_path / "applied.tmp").exists()

    refused("was made from another export than", base=other)
    for directory, name in ((delta, "rows.safetensors"), (base, "weights.safetensors")):
        shutil.copytree(directory, tmp_path / "copy")
        corrupt(tmp_path / "copy" / name)
        refused(f"{name} is damaged", **{directory.name: tmp_path / "copy"})
        shutil.rmtree(tmp_path / "copy")
    shutil.copytree(delta, tmp_path / "copy")
    text = (delta / "delta.json").read_text()
    (tmp_path / "copy" / "delta.json").write_text(text[:-9])
    refused("delta.json is damaged", delta=tmp_path / "copy")
    (tmp_path / "copy" / "delta.json").write_text(text.replace('"version": 1', '"version": 2', 1))
    refused("is not a delta that this program can read", delta=tmp_path / "copy")
    for damaged in ("[" * 100_000, "[]"):
        (tmp_path / "copy" / "delta.json").write_text(damaged)
        refused("delta.json is damaged: it ", delta=tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "delta.json", 3 << 30)
    refused("has 3,221,225,472 bytes, more than 67,108,864", delta=tmp_path / "copy")
    arguments = ["apply_delta.py", base, tmp_path / "copy", tmp_path / "applied"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    for change in (
        lambda found: found["result"]["files"].update({"../outside": {}}),
        lambda found: found["result"].pop("files"),
        lambda found: found["tensors"].update({"another": {"shape": [2], "copy": [[0, 0, 2]]}}),
        lambda found: next(iter(found["tensors"].values())).update(shape=[1], copy=[[0, 0, 1]]),
        lambda found: found["result"].update(step=found["result"]["step"] + 1),
    ):
        changed = json.loads(text)
        change(changed)
        (tmp_path / "copy" / "delta.json").write_text(json.dumps(changed, indent=2) + "\n")
        outside = "../outside" in changed["result"].get("files", ())
        assert shipped_program("apply_delta").main() == 2
        error = capsys.readouterr().err
        assert ("is in another directory" if outside else "is damaged") in error, error
        assert error.count("\n") == 1
        assert not (tmp_path / "applied").exists()
    assert not (tmp_path / "outside").exists()
    refused("nowhere is no delta: make one with dlrm export RUN", delta=tmp_path / "nowhere")
    (tmp_path / "applied").mkdir()
    assert "exists: name another" in applied(base, delta, tmp_path / "applied").stderr


def test_what_has_no_delta(pair, two_days, export, tmp_path):
    base, _ = pair

    def refused(*options, base=base, trained=two_days / "run_2"):
        return export(trained, "refused", "--delta-from", base, *options, status=2)

    assert "leave out --tables and --emb" in refused("--tables", "int8")
    assert "--compile: with --delta-from" in refused("--compile", "cpu")
    assert "export without --onnx" in refused("--onnx")
    assert "nowhere has no manifest.json: name an export" in refused(base=tmp_path / "nowhere")
    small = export(two_days / "run_0", "small", "--compile", "--emb", "auto", "--budget", "2x")
    assert "which changes every row" in refused(base=small)
    other = export(two_days / "run_1", "other", "--compile", "--tables", "int8")
    manifest = json.loads((other / "manifest.json").read_text()) | {"tables": "fp32"}
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert "it has other kinds of tables or layers (" in refused(base=other)
    for damaged in ("[]", json.dumps(manifest | {"files": {}}), "[" * 100_000):
        (other / "manifest.json").write_text(damaged)
        assert f"{other / 'manifest.json'} " in refused(base=other)
    (base / "weights.safetensors").write_bytes(b"")
    assert "weights.safetensors is not that of manifest.json" in refused()


def test_rows_that_differ_in_their_bits():
    """Rows of grown tables, NaN and -0; what is smaller when it is given whole is given so."""
    torch.manual_seed(0)
    old = {
        "tables.0.rows.weight": torch.rand(60, 4),
        "tables.0.starts": torch.tensor([0, 20, 30]),
        "tables.1.group.cores": torch.rand(40, 2, 3).to(torch.bfloat16),
        "tables.2.rows.scales": torch.zeros(8),
        "tables.2.starts": torch.tensor([0]),
        "mlp.weight": torch.rand(5, 5),
        "mlp.bias": torch.tensor([torch.nan, 1]),
    }
    new = {name: value.clone() for name, value in old.items()}
    weight = old["tables.0.rows.weight"]
    parts = weight[:20], torch.rand(3, 4), weight[20:30], weight[30:], torch.rand(1, 4)
    new["tables.0.rows.weight"] = torch.cat(parts)
    new["tables.0.rows.weight"][40, 2] += 1
    new["tables.0.starts"] = torch.tensor([0, 23, 33])
    new["tables.1.group.cores"][7, 1, 0] = -1
    new["tables.2.rows.scales"][3] = -0.0
    new["mlp.weight"] += 1
    tensors, described = changes_between(old, new)
    found = {
        name.partition(":")[2]: value.tolist()
        for name, value in tensors.items()
        if name.startswith("row_numbers:")
    }
    assert found == {
        "tables.0.rows.weight": [20, 21, 22, 40, 63],
        "tables.1.group.cores": [7],
        "tables.2.rows.scales": [3],
    }
    whole = {name for name in tensors if name.startswith("whole:")}
    assert whole == {"whole:tables.0.starts", "whole:mlp.weight"}
    assert "mlp.bias" not in described
    made = shipped_program("apply_delta").new_weights(old, tensors, described)
    assert made.keys() == new.keys()
    for name, value in new.items():
        assert (
            made[name].numpy().tobytes() == value.numpy().tobytes()
            if (value.dtype != torch.bfloat16)
            else made[name].equal(value)
        ), name
