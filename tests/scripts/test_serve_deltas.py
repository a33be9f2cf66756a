"""A run that follows days exports a delta after each, and a server applies them while it serves."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

import dlrm
from dlrm.export.days import in_own_process
from dlrm.kernels.dynamic.slot_index import EMPTY
from dlrm.utils.shipped import shipped_program

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tests.kit import wait_for
from tests.scripts.test_serve import JSON, ROOT, Served, as_json

SMALL = ["--batch_size", "64", "--model.bottom_mlp", "[16]", "--model.top_mlp", "[16]"]
SMALL += ["--emb", "dynamic", "--dynamic.rows", "90", "--device", "cpu", "--follow_wait", "0"]
ROWS = [{"user": f"u{own}", "item": f"i{own % 7}", "age": own / 7} for own in range(0, 200, 9)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory, programs):
    """A run that followed three days, its exports with that of the first day, and its days."""
    directory = tmp_path_factory.mktemp("followed")
    for day in range(3):
        random = np.random.default_rng(day)
        users, items = random.integers(80, size=400) + 30 * day, random.integers(20, size=400)
        pairs = zip(users, items, strict=True)
        lines = [f"{int(u % 3 == 0)},u{u},i{i},{u / 7:.2f}" for u, i in pairs]
        raw = directory / "raw.csv"
        raw.write_text("\n".join(["label,user,item,age", *lines]) + "\n")
        first = ["--ids-of", directory / "all" / "day_0"] if day else ["--ids", "hash"]
        output = ["--output", directory / "all" / f"day_{day}", "--split", "1", "0", "0"]
        programs("dlrm.commands.prepare_table", raw, *output, *first)

    days, run, exports = (directory / name for name in ("days", "run", "exports"))
    shutil.copytree(directory / "all" / "day_0", days / "day_0")
    given = ["--follow", days, "--output", directory, "--name", "run", "--follow_export", exports]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", "none")
        programs("dlrm.commands.train", *given, *SMALL)
        shutil.copytree(exports / "day_0", directory / "base")
        shutil.copytree(directory / "all", days, dirs_exist_ok=True)
        programs("dlrm.commands.train", "--resume", run)
    return SimpleNamespace(days=days, run=run, exports=exports, base=directory / "base")


def test_each_day_is_exported_as_a_delta_with_the_ids_that_left(followed, run, tmp_path):
    names = sorted(path.name for path in followed.exports.iterdir())
    assert names == ["day_1", "day_1.delta", "day_2", "day_2.delta"], "of full ones the last two"
    run("export", followed.run, tmp_path / "full", "--compile")
    weights = [
        own / "weights.safetensors" for own in (tmp_path / "full", followed.exports / "day_2")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    held = []
    for export in (followed.base, followed.exports / "day_1", followed.exports / "day_2"):
        content = load_file(export / "weights.safetensors")
        slots = (32 * content["tables.0.group._buckets"]).tolist()
        parts = content["tables.0.group._ids"].split(slots)
        columns = ("user", "item")
        held.append({c: set(p.tolist()) - {EMPTY} for c, p in zip(columns, parts, strict=True)})
    for day in (1, 2):
        delta = followed.exports / f"day_{day}.delta"
        changes = load_file(delta / "rows.safetensors")
        counts = json.loads((delta / "delta.json").read_text())["ids"]
        for column in ("user", "item"):
            before, after = (held[own][column] for own in (day - 1, day))
            assert set(changes[f"came:{column}"].tolist()) == after - before
            assert set(changes[f"evicted:{column}"].tolist()) == before - after
            assert counts[f"evicted:{column}"] == len(before - after)
    assert counts["evicted:user"] > 0

    # Training is as without exports.
    given = ["--follow", followed.days, "--output", tmp_path, "--name", "without", *SMALL]
    run("train", *given)
    other, own = (dlrm.load(path).predict(ROWS) for path in (tmp_path / "without", followed.run))
    assert list(other) == list(own)


def test_an_export_that_was_cut_off_is_made_again_and_strangers_are_refused(
    followed, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("CXX", "none")
    made, exports = tmp_path / "run", tmp_path / "exports"
    shutil.copytree(followed.run, made)
    shutil.copytree(followed.exports, exports)
    (exports / "day_2").rename(exports / "day_2.tmp")  # killed before it had its name
    resumed = ["--resume", made, "--follow_export", exports]
    run("train", *resumed)
    manifests = [own / "day_2" / "manifest.json" for own in (exports, followed.exports)]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    assert not (exports / "day_2.tmp").exists()

    given = ["--follow", followed.days, "--output", tmp_path, "--name", "other", *SMALL]
    refused = run("train", *given, "--follow_export", exports, status=2)
    assert f"follow_export is {exports}, where day_1 is of another run" in refused.stderr


def test_the_process_that_exports_ends_with_its_parent(tmp_path):
    made, children = tmp_path / "run.py", tmp_path / "children"
    made.write_text(
        "import os\nfrom dlrm.export.days import in_own_process\nif __name__ == '__main__':\n"
        f"    in_own_process(os.system, 'echo $PPID > {children}; sleep 30')\n"
    )
    parent = subprocess.Popen([sys.executable, made], cwd=ROOT)
    wait_for(children, "\n", parent)
    parent.kill()
    parent.wait()

    state = Path(f"/proc/{children.read_text().strip()}/stat")
    deadline = time.time() + 20
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.time() < deadline
        time.sleep(0.05)


def test_a_process_that_exports_and_is_killed_is_an_error():
    """Other errors are raised as they are: see the run whose exports are of another run."""
    with pytest.raises(OSError, match="the process that exports was killed: is there enough"):
        in_own_process(signal.raise_signal, signal.SIGKILL)


def test_deltas_in_another_order_twice_or_after_a_gap_are_refused(followed, tmp_path):
    apply_delta = shipped_program("apply_delta").apply_delta
    first, second = (followed.exports / f"day_{day}.delta" for day in (1, 2))
    one, two, made = (tmp_path / name for name in ("one", "two", "made"))

    def refused(base, delta, why):
        with pytest.raises(ValueError, match=why):
            apply_delta(base, delta, made)
        assert not made.exists()

    refused(followed.base, second, "is at step 7, so deltas between them are missing")
    apply_delta(followed.base, first, one)
    refused(one, first, f"than {one}, which has it already")
    apply_delta(one, second, two)
    refused(two, first, "from step 7 of the run, and that is at step 21: name that one")
    manifests = [path / "manifest.json" for path in (two, followed.exports / "day_2")]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()


def test_a_server_takes_deltas_while_it_answers(followed, tmp_path):
    """Whatever comes in whatever order, an answer is of one version."""
    export, deltas = tmp_path / "export", tmp_path / "deltas"
    shutil.copytree(followed.base, export)
    deltas.mkdir()
    server = Served(export, "--deltas", deltas, "--every", "0.05", "--drain", "0")
    shutil.rmtree(export / "preparation")  # the server has its own copy
    answers, done = {7: set(), 14: set(), 21: set()}, threading.Event()

    def ask():
        connection = server.connect()
        while not done.is_set():
            connection.request("POST", "/score", as_json(ROWS), {"Content-Type": JSON})
            answer = connection.getresponse()
            answers[int(answer.headers["model-step"])].add(answer.read())

    def until(step):
        deadline = time.time() + 60
        while time.time() < deadline:
            if json.loads(server.ask("GET", "/health")[1])["step"] == step and answers[step]:
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} is not served")

    def put(source, name):
        """Copy a file or directory, which is there as a whole at once."""
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / "whole").rename(deltas / name)

    printed = []

    def wait_for_error():
        while not printed or not printed[-1].startswith("error: "):
            printed.append(server.process.stdout.readline())
            assert printed[-1], printed
        printed.append("")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(7)
        put(followed.exports / "day_2.delta", "a")  # after a gap
        wait_for_error()
        (deltas / "0").mkdir()
        (tmp_path / "none").write_text("{}")
        put(tmp_path / "none", "0/delta.json")  # none, which holds back no other
        wait_for_error()
        (deltas / "b").mkdir()
        source = followed.exports / "day_1.delta"
        put(source / "delta.json", "b/delta.json")  # half copied
        wait_for_error()
        until(7)
        put(source / "rows.safetensors", "b/rows.safetensors")
        until(21)
        wait_for_error()
        put(source, "c")  # again
        time.sleep(0.5)
        until(21)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        printed.append(server.stop())
    printed = "".join(printed)
    assert "serving step 14\nserving step 21\n" in printed
    assert "a is from step 14, and step 7 is served: the deltas between them are missing" in printed
    assert "0/delta.json is not a delta that this program can read; " in printed
    assert printed.count("error: ") == 4
    assert all(len(own) <= 1 for own in answers.values())
    found = json.loads(answers[21].pop())["probability"]
    assert np.allclose(found, list(dlrm.load(followed.run).predict(ROWS)), atol=1e-6)
    assert answers[7].pop() != found

    command = [sys.executable, "examples/serve.py", followed.base, "--deltas", tmp_path / "nowhere"]
    refused = subprocess.run(
        map(str, command), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "nowhere is no directory: make it first" in refused.stderr
