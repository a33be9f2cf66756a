"""An exported model scores raw rows like predict.py, in a process that can't import dlrm."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlrm.training.checkpoint import Checkpoint
from dlrm.training.run_directory import PREPARATION
from tests.kit import first
from tests.scripts.alone import alone, export_scores

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "export.md").read_text()
BOUND = 1e-6  # on a probability, of fp32 tables


def block_of(language, containing):
    """A block of code in the document."""
    blocks = [part.partition("```")[0] for part in DOCUMENT.split(f"```{language}\n")[1:]]
    return next(block for block in blocks if containing in block)


@pytest.fixture
def expected(run, tmp_path):
    """The probabilities that predict.py gives raw rows."""

    def expected(trained, rows, *options):
        output = tmp_path / "expected.parquet"
        run("predict", trained, rows, output, "--device", "cpu", *options)
        return pd.read_parquet(output)["probability"].to_numpy()

    return expected


@pytest.fixture
def export(run, tmp_path):
    """Exports a run; returns the directory."""

    def export(trained, *options, name="exported", compiled=()):
        run("export", trained, tmp_path / name, "--compile", *compiled, *options)
        return tmp_path / name

    return export


@pytest.fixture(params=[pytest.param("criteo", marks=pytest.mark.slow), "table"])
def trained(request):
    """A run, and a file of raw rows."""
    directory, _ = request.getfixturevalue(request.param)
    return directory / "run", directory / {"criteo": "raw", "table": "raw.csv"}[request.param]


def test_an_export_scores_like_predict_without_this_package(trained, export, expected, tmp_path):
    run, rows = trained
    made = export(run)
    moved = tmp_path / "elsewhere"
    made.rename(moved)
    (found,) = export_scores(rows, moved)
    want = expected(run, rows, "--batch-size", 300)
    assert len(found) == 2000
    assert np.abs(found - want).max() <= BOUND
    assert len(set(found)) > 1000


@pytest.mark.slow
def test_the_example_of_the_document(table, export, tmp_path):
    directory, rows = table
    made = export(directory / "run", name="EXPORT")
    code = block_of("python", "torch.export.load")
    given = {name: [str(row[name]) for row in rows[:3]] for name in rows[0]}
    code = code.replace('{"price": [9.5], "user": ["u1"]}', repr(given))
    code += "\nprint(probabilities.tolist())\n" + block_of("python", "inputs.safetensors")
    printed = alone(code, cwd=tmp_path)
    import dlrm

    assert made.is_dir()
    assert set(load_file(tmp_path / "inputs.safetensors")) >= {"dense", "ids", "tags.offsets"}
    want = dlrm.load(directory / "run").predict(given)
    assert np.abs(np.array(json.loads(printed)) - want).max() <= BOUND


def test_the_manifest(table, export):
    directory, _ = table
    made = export(directory / "run", "--tables", "int8")
    manifest = json.loads((made / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("dlrm export", 1)
    assert manifest["tables"] == "int8"
    rates = ["rate(user)", "rate(when_hour)", "rate(when_weekday)"]
    assert manifest["dense"] == ["price", "when_age", *rates]
    columns = {column.pop("name"): column for column in manifest["categorical"]}
    assert list(columns) == ["user", "when_hour", "when_weekday", "tags"]
    assert columns["tags"] == {"rows": 10, "multi_hot": True, "oov_id": 9, "kind": "dense"}
    inputs = [(entry["name"], entry["shape"]) for entry in manifest["inputs"]]
    bags = [("tags.values", ["nnz"]), ("tags.offsets", ["batch + 1"])]
    assert inputs == [("dense", [5, "batch"]), ("ids", [3, "batch"]), *bags]
    there = {p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file()}
    assert there == {*manifest["files"], "manifest.json"}
    modes = {(made / name).stat().st_mode & 0o666 for name in there}
    assert modes == {made.stat().st_mode & 0o666}, "a server may run as another user"
    for name, entry in manifest["files"].items():
        content = (made / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert str(ROOT).encode() not in content
    weights = load_file(made / "weights.safetensors")
    size = sum(v.nbytes for name, v in weights.items() if name.startswith("tables."))
    assert manifest["bytes_of_tables"] == size


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["bf16", "int8", "int4"])
def test_smaller_tables_score_nearly_the_same(tables, criteo, export, expected, tmp_path):
    directory, _ = criteo
    made = export(directory / "run", "--tables", tables)
    (found,) = export_scores(directory / "raw", made)
    change = np.abs(found - expected(directory / "run", directory / "raw"))
    assert 0 < change.max() < {"bf16": 0.005, "int8": 0.005, "int4": 0.05}[tables]


def test_compressed_on_the_way(criteo, export):
    directory, _ = criteo
    made = export(directory / "run", "--emb", "auto", "--budget", "3x")
    manifest = json.loads((made / "manifest.json").read_text())
    dense = sum(4 * 16 * column["rows"] for column in manifest["categorical"])
    assert manifest["bytes_of_tables"] < dense / 2
    assert manifest["tables"] == "auto"


def test_without_a_compiler_the_default_compiles_nothing(criteo, run, tmp_path):
    directory, _ = criteo
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        done = run("export", directory / "run", tmp_path / "made")
    assert "note: nothing is compiled ahead of time" in done.stdout
    assert json.loads((tmp_path / "made" / "manifest.json").read_text())["compiled"] == {}


def diverged(checkpoint, build=Checkpoint.build_model):
    """The model of a checkpoint, with a weight that is NaN."""
    model = build(checkpoint)
    model.bottom_mlp[0].bias.data[0] = float("nan")
    return model


def test_what_can_not_be_exported(criteo, export, run, tmp_path, monkeypatch):
    directory, _ = criteo
    trained = directory / "run"

    def refused(*options, given=trained, output=tmp_path / "refused"):
        done = run("export", given, output, "--compile", *options, status=2)
        assert not (tmp_path / "refused").exists()
        assert not (tmp_path / "refused.tmp").exists()
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    assert f"{tmp_path} exists: name another directory" in refused(output=tmp_path)
    assert "--budget needs --emb" in refused("--budget", "10x")
    assert "--emb tt needs --budget" in refused("--emb", "tt")
    assert "unknown embedding kind 'tr'" in refused("--emb", "tr", "--budget", "9x")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "build_model", diverged)
        error = refused()
        assert "bottom_mlp.0.bias has a weight that is NaN or infinite, as the training" in error
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    meta = copy / PREPARATION / "meta.json"
    meta.write_text(meta.read_text().replace('"fingerprint": "', '"fingerprint": "0'))
    assert "is not of the data that the model was trained on" in refused(given=copy)
    shutil.rmtree(copy / PREPARATION)
    other = tmp_path / "other"
    other.mkdir()
    message = refused("--data", other, given=copy)
    assert f"{copy / PREPARATION} does not exist, and {other} has no meta.json either" in message
    made = export(copy, "--data", directory / "data")  # ids can be given
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["raw_rows"] is False
    assert not (made / "dlrm_reader").exists()


@first("limit", [(None, "model.pt2"), (5000, "weights.safetensors")], slow=pytest.mark.slow)
def test_nothing_is_left_of_an_export_that_has_no_room(limit, table, export, start, tmp_path):
    room, file = limit
    run = table[0] / "run"
    if file == "model.pt2":  # more than the weights take, and less than the program
        made = export(run)
        sizes = [(made / name).stat().st_size for name in ("weights.safetensors", file)]
        room = sum(sizes) // 2
        assert sizes[0] < room < sizes[1]
        shutil.rmtree(made)
    done = start("export", run, tmp_path / "made", "--compile", file_size=room).wait()
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "can't be written: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_from_cpp_and_compiled(table, export, expected, tmp_path):
    """As the document says: the program in C++ has no Python."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    directory, _ = table
    made = export(directory / "run", compiled=["cpu"])
    line = block_of("bash", "g++").replace("examples/", f"{ROOT}/examples/")
    python = f"PATH={Path(sys.executable).parent}:$PATH; "
    subprocess.run(["bash", "-c", python + line], cwd=tmp_path, check=True)
    code = "import sys\nfrom safetensors.numpy import save_file\nsys.path.insert(0, sys.argv[1])\n"
    code += "from dlrm_reader import InputReader\n"
    code += "(arrays,) = InputReader.load(sys.argv[1]).read([sys.argv[2]])\n"
    code += "save_file(dict(zip(sys.argv[3:], arrays)), 'inputs.safetensors')"
    names = [entry["name"] for entry in json.loads((made / "manifest.json").read_text())["inputs"]]
    alone(code, made, directory / "raw.csv", *names, cwd=tmp_path)
    command = [tmp_path / "score", made, "inputs.safetensors", *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    want = expected(directory / "run", directory / "raw.csv")
    found = np.array([float(text) for text in done.stdout.split()])
    assert np.abs(found - want).max() <= BOUND
    compiled = block_of("python", "aoti_load_package")
    code = "from safetensors.torch import load_file\n" + compiled
    code += "\ngiven = load_file('inputs.safetensors')\nimport json, sys\n"
    code += "print(json.dumps(model(*(given[name] for name in sys.argv[1:])).tolist()))"
    made.rename(tmp_path / "EXPORT")
    printed = alone(code, *names, cwd=tmp_path)
    assert np.abs(np.array(json.loads(printed)) - want).max() <= BOUND
    given = load_file(tmp_path / "inputs.safetensors")

    def refused(**changed):
        save_file(given | changed, tmp_path / "wrong.safetensors")
        command = [tmp_path / "score", tmp_path / "EXPORT", "wrong.safetensors", *names]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "error: input dense has another type" in refused(dense=given["dense"].double())
    assert "error: input ids has another type or size" in refused(ids=given["ids"][:, 1:].clone())
    assert "error: input ids has another type" in refused(ids=given["ids"].int())
    (lists,) = {name for name in names if name.endswith(".offsets")}
    assert f"error: input {lists} has another" in refused(**{lists: given[lists][1:].clone()})
    save_file({"ids": given["ids"]}, tmp_path / "inputs.safetensors")
    for wrong, why in {"inputs": "has no tensor dense", "none": "can't open none"}.items():
        command = [tmp_path / "score", tmp_path / "EXPORT", f"{wrong}.safetensors", *names]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.startswith("error: ")) == (2, True)
        assert why in done.stderr
