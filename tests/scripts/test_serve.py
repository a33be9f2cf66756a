"""The server of an exported model answers everything, refuses too much, and loses nothing."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

import dlrm
from dlrm.export.directory import ExportOptions, digest_of, export_run
from dlrm.utils.shipped import shipped_program
from tests.scripts.alone import PROGRAM

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]
JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"


class Served:
    """A server in a process of its own."""

    def __init__(self, export, *options, timeout=60):
        command = [sys.executable, "-c", PROGRAM, ROOT / "examples" / "serve.py", export]
        command += ["--port", "0", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*map(str, command)], cwd=export, **pipes)
        line = self.process.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:"), line
        self.port = int(line.rpartition(":")[2])
        assert self.process.stdout.readline() == "POST /score, GET /health, GET /metrics\n"

    def connect(self, timeout=30):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method, path, body=None, kind=JSON, connection=None, **headers):
        """Status and content of an answer."""
        connection = connection or self.connect()
        connection.request(method, path, body, {"Content-Type": kind, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def error(self, *arguments, **options):
        """Status and text of an error."""
        status, content = self.ask("POST", "/score", *arguments, **options)
        return status, json.loads(content)["error"]

    def metric(self, name):
        _, content = self.ask("GET", "/metrics")
        lines = content.decode().splitlines()
        return next((float(ln.rpartition(" ")[2]) for ln in lines if ln.startswith(name)), 0.0)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(30) == -signal.SIGTERM  # as uvicorn ends
        return self.process.stdout.read()


@pytest.fixture(scope="module")
def exported(table, tmp_path_factory):
    """An export, the model in Python, and raw rows."""
    directory, rows = table
    made = tmp_path_factory.mktemp("export") / "made"
    export_run(directory / "run", made, ExportOptions(devices=()))
    rows = [{**row, "price": float(row["price"]) if row["price"] else None} for row in rows]
    return made, dlrm.load(directory / "run"), rows


@pytest.fixture(scope="module")
def served(exported):
    """A server with small limits."""
    limits = ("--max-rows", "50", "--max-bytes", "20000", "--timeout", "2", "--drain", "0")
    server = Served(exported[0], *limits)
    yield server
    assert server.stop() == ""


def as_json(rows):
    return json.dumps({"rows": rows})


def as_arrow(table, compression=None):
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def test_rows_are_scored_as_json_and_as_arrow(served, exported):
    _, model, rows = exported
    some = rows[:40]
    expected = model.predict(pa.Table.from_pylist(some))
    status, content = served.ask("POST", "/score", as_json(some))
    assert status == 200
    assert np.abs(np.array(json.loads(content)["probability"]) - expected).max() < 1e-6
    body = as_arrow(pa.Table.from_pylist(some))
    status, content = served.ask("POST", "/score", body, ARROW)
    assert status == 200
    found = pa.ipc.open_stream(content).read_all()["probability"].to_numpy()
    assert np.abs(found - expected).max() < 1e-6
    assert json.loads(served.ask("POST", "/score", as_json([]))[1]) == {"probability": []}


def test_ids_have_up_to_64_bits(served, exported):
    _, _, rows = exported
    some = [{**row, "user": id} for row, id in zip(rows, (2**64 - 1, 2**63, 5, None), strict=False)]
    texts = [{**row, "user": row["user"] and str(row["user"])} for row in some]
    answers = [served.ask("POST", "/score", as_json(each)) for each in (some, texts)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 200


def test_health_and_metrics(served, exported):
    _, _, rows = exported
    manifest = json.loads((exported[0] / "manifest.json").read_text())
    status, content = served.ask("GET", "/health")
    assert (status, json.loads(content)["status"]) == (200, "ok")
    assert json.loads(content)["run"] == manifest["run"]
    before = served.metric("rows_total"), served.metric('requests_total{status="200"}')
    served.ask("POST", "/score", as_json(rows[:7]))
    after = served.metric("rows_total"), served.metric('requests_total{status="200"}')
    assert after == (before[0] + 7, before[1] + 1)
    assert served.metric("seconds_count") > 0


def test_bad_requests_are_answered(served, exported):
    _, _, rows = exported
    row = rows[0]
    for body, problem in {
        "": "the body does not fit",
        "[1]": "the body does not fit",
        "{}": "the body does not fit: 'rows'",
        '{"rows": 3}': "rows must be a list of objects",
        '{"rows": [[]]}': "rows must be a list of objects",
        '{"rows": [{"price": NaN}]}': "NaN is no number",
        "[" * 5000: "the body does not fit",
        "\udcff".encode("utf-8", "surrogateescape"): "the body does not fit",
        '{"rows": [{"price": 1}]}': "the rows have no column 'user'",
        as_json([{**row, "price": "cheap"}]): "'cheap' is not a number; correct it",
        as_json([row, {**row, "price": [1]}]): "the body does not fit",
        as_json([{**row, "price": [1]}]): "column 'price': it holds list",
        as_json([{**row, "price": 10**400}]): "the body does not fit",
        as_json([{**row, "user": 2**64}]): "the body does not fit",
        as_json([{**row, "user": -1}, {**row, "user": 2**64 - 1}]): "the body does not fit",
        as_json([{}, {}]): "the rows have none of the columns price, user",
        as_json([{**row, "user": {}}]): "column 'user': it holds struct",
    }.items():
        status, error = served.error(body)
        assert (status, problem in error) == (400, True), (body[:50], error)
    good = as_arrow(pa.Table.from_pylist(rows[:5]))
    other = as_arrow(pa.table({"other": [1, 2]}))
    assert "the rows have none of the columns price" in served.error(other, kind=ARROW)[1]
    for body in (b"", b"x", good[:-50], good[:300], bytes(1000)):
        status, error = served.error(body, kind=ARROW)
        assert status == 400, error
    table = pa.Table.from_pylist(rows[:5])
    coded = table.set_column(2, "user", table["user"].dictionary_encode())
    assert served.ask("POST", "/score", as_arrow(coded), ARROW)[0] == 200
    for given, compression in ((table, "lz4"), (table, "zstd"), (coded, "zstd")):
        status, error = served.error(as_arrow(given, compression), kind=ARROW)
        assert (status, "it is compressed" in error) == (400, True)
    assert served.error(as_json([row]), kind="text/plain")[0] == 415
    assert served.ask("GET", "/score")[0] == 405
    assert served.ask("GET", "/elsewhere")[0] == 404
    assert served.ask("GET", "/health", Host="evil.example")[0] == 400
    assert served.ask("POST", "/score", as_json(rows[:3]))[0] == 200


def test_limits(served, exported):
    _, _, rows = exported
    assert served.error(as_json([{}] * 51)) == (
        413,
        "more than 50 rows; send them in several requests",
    )
    body = as_arrow(pa.Table.from_pylist(rows[:51]))
    assert served.error(body, kind=ARROW)[0] == 413
    assert served.error(b" " * 20001) == (413, "the body has more than 20000 bytes")
    parts = (b" " * 1000 for _ in range(100))  # in chunks, without a length
    assert served.error(parts)[0] == 413
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as slow:
        head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
        slow.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        answer = slow.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert 2 <= time.monotonic() - begin < 20
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as gone:
        gone.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
    assert served.ask("POST", "/score", as_json(rows[:3]))[0] == 200


@pytest.mark.slow
def test_too_many_requests_at_a_time(exported):
    made, _, rows = exported
    server = Served(made, "--queue", "1", "--timeout", "30", "--drain", "0")
    body = as_json(rows[:20])
    waiting = server.connect()
    waiting.putrequest("POST", "/score")
    waiting.putheader("Content-Type", JSON)
    waiting.putheader("Content-Length", str(len(body)))
    waiting.endheaders(body[:10].encode())  # it waits for the rest
    deadline = time.monotonic() + 20
    while (status := server.error(body)[0]) == 200 and time.monotonic() < deadline:
        time.sleep(0.05)  # it has not been read yet
    assert status == 503
    waiting.send(body[10:].encode())
    assert waiting.getresponse().status == 200
    assert server.ask("POST", "/score", body)[0] == 200
    server.stop()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_files_may_change_while_they_are_served(exported, table, compiled, tmp_path):
    """The weights are in the memory of the server."""
    _, _, rows = exported
    made = tmp_path / "made"
    if compiled:
        export_run(table[0] / "run", made, ExportOptions(devices=("cpu",)))
    else:
        shutil.copytree(exported[0], made)
    server = Served(made, "--drain", "0")
    expected = server.ask("POST", "/score", as_json(rows[:5]))
    assert expected[0] == 200

    weights = made / "weights.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert server.ask("POST", "/score", as_json(rows[5:10]))[0] == 200
    assert server.ask("POST", "/score", as_json(rows[:5])) == expected
    for path in made.iterdir():
        if path.is_file():
            os.truncate(path, 0)
    assert server.ask("POST", "/score", as_json(rows[:5])) == expected
    assert server.stop() == ""


@pytest.mark.slow
def test_a_server_continues_if_nobody_takes_its_output(exported):
    command = [sys.executable, ROOT / "examples" / "serve.py", exported[0], "--port", "0"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    assert line.startswith("note: the output can't be written: "), line
    server = Served.__new__(Served)
    (socket_of_server,) = psutil.Process(process.pid).net_connections()
    server.port, status = socket_of_server.laddr.port, 0
    while status != 200:
        with suppress(ConnectionRefusedError):  # it may not listen yet
            status, _ = server.ask("GET", "/health")
    process.terminate()
    assert process.communicate(timeout=30)[1] == ""


def test_no_answer_is_lost_when_it_ends(exported):
    """Requests come until connections are refused; an answer says if its connection is closed."""
    made, model, rows = exported
    server = Served(made, "--drain", "0.5")
    some = rows[:30]
    expected, body = model.predict(pa.Table.from_pylist(some)), as_json(some)
    answers, failures = [], []

    def ask(keep_alive):
        connection = None
        while True:
            try:
                connection = connection or server.connect()
                connection.request("POST", "/score", body, {"Content-Type": JSON})
                answer = connection.getresponse()
                found = np.array(json.loads(answer.read())["probability"])
                answers.append((answer.status, np.abs(found - expected).max() < 1e-6))
                if not keep_alive or answer.headers["Connection"] == "close":
                    connection.close()
                    connection = None
            except ConnectionRefusedError:
                return
            except Exception as error:
                failures.append(repr(error))
                return

    threads = [threading.Thread(target=ask, args=[i < 2]) for i in range(4)]
    for thread in threads:
        thread.start()
    while len(answers) < 20 and not failures:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    while server.ask("GET", "/health")[0] != 503:  # as a load balancer does
        time.sleep(0.01)
    before = len(answers)
    for thread in threads:
        thread.join()
    assert not failures
    assert {*answers} == {(200, True)}
    assert len(answers) > before
    assert server.process.wait(30) == -signal.SIGTERM


def test_small_bodies_do_not_become_large_tables(served, exported):
    """Columns that nothing reads, texts that all rows share, and lists without bytes."""
    _, _, rows = exported
    process = psutil.Process(served.process.pid)
    table = pa.Table.from_pylist(rows[:40])
    place = table.column_names.index("user")

    def status(column):
        return served.error(as_arrow(table.set_column(place, "user", column)), kind=ARROW)

    served.ask("POST", "/score", as_arrow(table), ARROW)
    before = process.memory_info().rss
    many = [{**row, **{f"{i}_{j}": 1 for j in range(40)}} for i, row in enumerate(rows[:30])]
    assert served.ask("POST", "/score", as_json(many))[0] == 200
    text = pa.array(["x" * 9000] * 40).dictionary_encode()
    code, error = status(text)
    assert (code, "'user' takes more than 20000 bytes when it is read" in error) == (400, True)
    for column in (pa.array(["u"] * 40, pa.string_view()), pa.array([{"a": 1}] * 40)):
        code, error = status(column)
        assert (code, "column 'user' has the type" in error) == (400, True)
    nulls = pa.FixedSizeListArray.from_arrays(pa.nulls(40 << 20), 1 << 20)
    code, error = status(nulls)
    assert (code, "takes more than" in error) == (400, True)
    assert process.memory_info().rss - before < 64 << 20
    assert served.ask("POST", "/score", as_arrow(table), ARROW)[0] == 200


def test_connections_that_send_no_request_are_closed(served, exported):
    _, _, rows = exported
    connections = [socket.create_connection(("127.0.0.1", served.port), 30) for _ in range(60)]
    for connection in connections[20:40]:
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: loc")
    for connection in connections[40:]:  # a request, and the beginning of another
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        connection.sendall(b"GET /hea")
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", served.port), 30) as drop:  # a byte now and then
        with suppress(OSError):
            for byte in b"GET /health HTTP/1.1 " + b"x" * 60:
                drop.sendall(bytes([byte]))
                time.sleep(0.1)
        assert 1 < time.monotonic() - begin < 20
    for connection in connections:
        with connection:
            assert connection.recv(1) == b""
    assert time.monotonic() - begin < 20
    assert served.ask("POST", "/score", as_json(rows[:3]))[0] == 200


@pytest.mark.slow
def test_too_many_connections_are_closed(exported):
    """Those that are there go on."""
    made, _, rows = exported
    server = Served(made, "--connections", "10", "--drain", "0")
    body, early = as_json(rows[:3]), server.connect()
    assert server.ask("POST", "/score", body, connection=early)[0] == 200
    many = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(40)]
    closed = 0
    for connection in many[9:]:
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        closed += 1
    assert closed == 31
    assert server.ask("POST", "/score", body, connection=early)[0] == 200
    for connection in many:
        connection.close()
    deadline = time.monotonic() + 20
    status = 0
    while status != 200 and time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            status = server.ask("POST", "/score", body)[0]
    assert status == 200
    assert server.stop() == ""


@pytest.mark.slow
def test_memory_does_not_grow(exported):
    """A hundred thousand requests: DLRM_REQUESTS=100000 pytest -k memory_does_not_grow."""
    made, _, rows = exported
    count = int(os.environ.get("DLRM_REQUESTS", "2000"))
    server = Served(made, "--drain", "0")
    bodies = [(as_json(rows[i : i + 8]), JSON) for i in range(20)]
    bodies += [(as_arrow(pa.Table.from_pylist(rows[i : i + 8])), ARROW) for i in range(20)]
    bodies += [("{}", JSON), (b"x", ARROW)]
    process, connection = psutil.Process(server.process.pid), server.connect()

    def ask(requests):
        for i in range(requests):
            body, kind = bodies[i % len(bodies)]
            status, _ = server.ask("POST", "/score", body, kind, connection)
            assert status == (200 if len(body) > 9 else 400)
        return process.memory_info().rss

    before = ask(1000)
    after = ask(count)
    print(f"{count:,} requests: {before:,} bytes, then {after:,}")
    assert after - before < 16 << 20
    assert process.num_threads() < 40
    server.stop()


@pytest.fixture
def serve(monkeypatch):
    """The server as a module, which leaves this process as it is."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return shipped_program("serve")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters of packets")
def test_clients_that_come_as_the_server_ends_are_not_reset(serve):
    """They wait until the port is closed; those that are connected can still be accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        early = socket.create_connection(listening.getsockname())
        serve.ignore_new_clients(listening)
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname(), timeout=0.3)
        with early, listening.accept()[0] as accepted:
            early.sendall(b"a request")
            assert accepted.recv(9) == b"a request"


def test_what_can_not_be_served(exported, serve, tmp_path, monkeypatch, capsys):
    made, _, _ = exported
    copy = tmp_path / "copy"
    monkeypatch.setattr(sys, "argv", ["serve.py", str(copy)])
    assert serve.main() == 2
    assert "copy is no export: make one with dlrm export RUN" in capsys.readouterr().err
    shutil.copytree(made, copy)
    text = (made / "manifest.json").read_text()

    def refused(name, content):
        original = (copy / name).read_bytes()
        (copy / name).write_bytes(content)
        assert serve.main() == 2
        (copy / name).write_bytes(original)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    def manifest(**changed):
        return refused("manifest.json", json.dumps(json.loads(text) | changed).encode())

    assert "manifest.json can't be read: its format or version is" in manifest(version=2)
    assert "can't read raw rows" in manifest(raw_rows=False)
    assert "'files' is [], it must be of type dict" in manifest(files=[])
    assert "'/dev/zero', which is in another directory" in manifest(files={"/dev/zero": {}})
    assert "it has no digest of 'gone'" in manifest(compiled={"cpu": "gone"})
    for name in ("run", "step", "tables", "weights", "program", "compiled", "raw_rows"):
        assert f"{name!r} is None, it must be of type" in manifest(**{name: None})
    for damaged in (text[:-9], "[]", "[" * 100_000, " " * 65 * 2**20):
        error = refused("manifest.json", damaged.encode())
        assert "manifest.json can't be read: " in error
    for name in ("weights.safetensors", "model.pt2", "preparation/vocabulary/user.parquet"):
        damaged = bytearray((made / name).read_bytes())
        damaged[-3] ^= 1
        assert f"{name} is damaged, or not that of" in refused(name, damaged), name
    assert "weights.safetensors is damaged" in refused("weights.safetensors", b"")


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (float("nan"), r"bottom_mlp\.0\.bias has a weight that is no finite number"),
        (3e38, "row 1: its probability is no number, as a value is too large"),
    ],
)
def test_a_score_that_is_no_number_is_an_error(weight, problem, exported, serve, tmp_path):
    made, _, rows = exported
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    weights = load_file(made / "weights.safetensors")
    weights["bottom_mlp.0.bias"].fill_(weight)
    save_file(weights, copy / "weights.safetensors")
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["files"]["weights.safetensors"] = digest_of(copy / "weights.safetensors")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=problem):
        serve.Scorer(copy, 1).score(pa.Table.from_pylist(rows[:2]))
