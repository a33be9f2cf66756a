"""Serve an exported model over HTTP: ``python examples/serve.py EXPORT``.

It needs serve_model.py, serve_rows.py, serve_deltas.py and apply_delta.py next to it, and PyTorch,
safetensors, numpy, pandas, pyarrow, pydantic, PyYAML, starlette, uvicorn and prometheus-client, but
not the package that trained the model.

POST /score takes raw rows and answers with their probabilities, in the same form:

  application/json: {"rows": [{"price": 9.5, "user": "u1"}, ...]}
    -> {"probability": [0.1, ...]}
  application/vnd.apache.arrow.stream: an Arrow stream with the columns
    -> an Arrow stream with the column probability

With --deltas DIR, the deltas of the export that come to DIR are applied while it serves. Each
answer is of one version of the model, whose step is in the header model-step.

GET /health says whether the server takes requests; GET /metrics is for Prometheus. A refused
request gets a status of 4xx or 503 and {"error": "..."}. There is no authentication: the server
listens on this machine only, unless --host says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import prometheus_client as prometheus
import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol  # bounds the size of headers

sys.path.insert(0, str(Path(__file__).parent))
from serve_deltas import DeltaFollower
from serve_model import Scorer
from serve_rows import ARROW, JSON, Refused, one_line, rows_of

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST_REQUESTS = 1.0  # seconds that a new connection has for its request when the server ends

SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
NO_SYN = (  # a packet filter, as in man 7 socket: (code, jump if true, jump if false, value) each
    (0x30, 0, 0, 13),  # load byte 13 of the TCP header, the flags
    (0x45, 0, 1, 0x02),  # if SYN is set
    (0x06, 0, 0, 0),  # then keep no byte of the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # else all
)


class Service:
    """The endpoints.

    Args:
        scorer: scores rows.
        options: the limits.
    """

    def __init__(self, scorer: Scorer, options: argparse.Namespace) -> None:
        self.scorer = scorer
        self._options = options
        self._pool = ThreadPoolExecutor(options.workers)
        self._waiting = 0
        self.deltas: DeltaFollower | None = None
        self.draining = False

        self._registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        counter, histogram = prometheus.Counter, prometheus.Histogram
        self._requests = counter("requests", "Answers by status", ["status"], registry=registry)
        self._rows = counter("rows", "Rows that were scored", registry=registry)
        self._seconds = histogram("seconds", "Time of a request to score", registry=registry)

    def follow(self, export: Path, deltas: Path) -> None:
        """Serve newer versions as deltas come."""

        def loaded(scorer: Scorer) -> None:
            self.scorer = scorer  # requests that have begun keep the one before
            say(f"serving step {scorer.manifest['step']}")

        options = self._options
        self.deltas = DeltaFollower(export, deltas, options.every, options.threads, loaded)

    async def score(self, request: Request) -> Response:
        """Answer POST /score."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout):
                response = await self._answer(request)
        except Refused as refused:
            headers = {"Retry-After": "1"} if refused.status == 503 else None
            response = JSONResponse({"error": str(refused)}, refused.status, headers)
        except TimeoutError:
            text = f"it took more than {self._options.timeout:g} seconds; send fewer rows at a time"
            response = JSONResponse({"error": text}, 408, {"Connection": "close"})
        except ClientDisconnect:
            response = Response(status_code=400)  # nobody reads it
        self._requests.labels(response.status_code).inc()
        self._seconds.observe(time.perf_counter() - begin)
        return response

    async def _answer(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (JSON, ARROW):
            raise Refused(415, f"the content type must be {JSON} or {ARROW}")
        if self._waiting >= self._options.queue:
            raise Refused(503, "too many requests are waiting; try again")
        self._waiting += 1
        try:
            body = await self._body(request)
            loop = asyncio.get_running_loop()
            scorer = self.scorer  # of the whole answer, whatever is loaded meanwhile
            work = partial(self._work, scorer, body, kind)
            content, count = await loop.run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
        self._rows.inc(count)
        headers = {"model-step": str(scorer.manifest["step"])}
        return Response(content, media_type=kind, headers=headers)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._options.max_bytes:
                raise Refused(413, f"the body has more than {self._options.max_bytes} bytes")
        return bytes(body)

    def _work(self, scorer: Scorer, body: bytes, kind: str) -> tuple[bytes, int]:
        """Read rows, score them and write the answer, in a thread."""
        limits = self._options.max_rows, self._options.max_bytes
        rows = rows_of(body, kind, scorer.columns, *limits)
        try:
            found = scorer.score(rows)
        except (ValueError, pa.ArrowException) as error:  # Arrow's: a type that nothing reads
            raise Refused(400, one_line(error)) from None
        if kind == JSON:
            return json.dumps({"probability": found}).encode(), len(found)
        table = pa.table({"probability": pa.array(found, pa.float32())})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes(), len(found)

    async def health(self, _: Request) -> Response:
        """Answer GET /health: 503 if the server is about to end, so no more requests are sent."""
        manifest = self.scorer.manifest
        status = {"status": "ends" if self.draining else "ok"}
        model = {name: manifest[name] for name in ("run", "step", "tables")}
        return JSONResponse(status | model, 503 if self.draining else 200)

    async def metrics(self, _: Request) -> Response:
        """Answer GET /metrics."""
        return Response(
            prometheus.generate_latest(self._registry),
            headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST},
        )

    def app(self, address: str) -> Starlette:
        """The application, which prints its address when it takes requests."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            say(f"serving on {address}")
            say(", ".join(f"{method} {path}" for path, _, method in routes))
            yield
            self._pool.shutdown()
            if self.deltas is not None:
                self.deltas.close()

        hosts = [*LOOPBACK, "[::1]"] if self._options.host in LOOPBACK else ["*"]
        routes: list[tuple[str, Callable[[Request], Awaitable[Response]], str]] = [
            ("/score", self.score, "POST"),
            ("/health", self.health, "GET"),
            ("/metrics", self.metrics, "GET"),
        ]
        return Starlette(
            routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in routes],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            lifespan=lifespan,
        )


class Connection(H11Protocol):
    """A connection that is closed if there are too many, or if its next request takes too long.

    The same holds for the rest of a body after its answer. Otherwise such connections could use up
    the open files of the process.

    Args:
        seconds: time for the next request.
        most: number of connections at a time.
    """

    def __init__(self, *arguments: Any, seconds: float, most: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seconds, self._most = seconds, most
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._most:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop waiting if a request has come; otherwise wait from the first byte on."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server that continues for a while after SIGTERM, while /health says that it ends."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float) -> None:
        super().__init__(config)
        self._service, self._drain = service, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take the signal; a second one ends at once."""
        for headers in (self.config.encoded_headers, self.server_state.default_headers):
            headers.append((b"connection", b"close"))  # in the answers from now on

        if self._service.draining or sig != signal.SIGTERM or not self._drain:
            super().handle_exit(sig, frame)
            return
        self._service.draining = True
        later = super().handle_exit
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain, later, sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and answer those that were taken before the server ends."""
        for listening in sockets or []:
            ignore_new_clients(listening)

        # The event loop takes those that were connecting, and their requests may be on the way.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAST_REQUESTS
        await asyncio.sleep(LAST_REQUESTS / 10)
        while loop.time() < deadline and any(
            connection.cycle is None for connection in self.server_state.connections
        ):
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


def ignore_new_clients(listening: socket.socket) -> None:
    """Drop packets that open connections, as the kernel resets those that are never accepted.

    A client sends such a packet again after a second, and is refused then. Only Linux has filters.
    """
    if sys.platform == "linux":
        program = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_SYN)
        buffer = ctypes.create_string_buffer(program, len(program))
        listening_filter = struct.pack("HP", len(NO_SYN), ctypes.addressof(buffer))
        with suppress(OSError):  # a sandbox without filters
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, listening_filter)


def say(text: str) -> None:
    """Print a line. If nobody takes it, as with a full disk, the server continues silently."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at the exit
        print(f"note: the output can't be written: {error}", file=sys.stderr)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument

    # The model and the address.
    add("export", type=Path, help="directory that dlrm export made")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8000, help="0 takes any free port (default: 8000)")

    # Limits.
    add("--max-rows", type=int, default=10_000, help="rows of a request (default: 10000)")
    add("--max-bytes", type=int, default=16 << 20, help="bytes of a request (default: 16 MiB)")
    add(
        "--timeout",
        type=float,
        default=10,
        help="seconds to read the headers, and then to answer (default: 10)",
    )
    add("--queue", type=int, default=64, help="requests at a time; more get a 503 (default: 64)")
    add("--connections", type=int, default=500, help="at a time; more are closed (default: 500)")
    add("--workers", type=int, default=2, help="requests that are scored at a time (default: 2)")
    add("--threads", type=int, default=1, help="threads of PyTorch (default: 1)")
    deltas = "apply the deltas that come to this directory (default: none)"
    add("--deltas", metavar="DIR", type=Path, help=deltas)
    add("--every", type=float, default=10, help="seconds between two looks there (default: 10)")
    add("--drain", type=float, default=1, help="seconds to continue after SIGTERM (default: 1)")
    return parser


def main() -> int:
    """Serve until a signal ends it; returns the exit status."""
    options = arguments().parse_args()

    try:
        scorer = Scorer(options.export, options.threads)
        service = Service(scorer, options)
        listening = socket.create_server(
            (options.host, options.port),
            family=socket.AF_INET6 if ":" in options.host else socket.AF_INET,
        )
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # saves 40 ms per answer
        if options.deltas is not None:
            service.follow(options.export, options.deltas)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if options.host not in LOOPBACK:
        say("note: other machines can reach this, and there is no authentication")
    host = f"[{options.host}]" if ":" in options.host else options.host

    connection = partial(Connection, seconds=options.timeout, most=options.connections)
    config = uvicorn.Config(
        service.app(f"http://{host}:{listening.getsockname()[1]}"),
        http=connection,  # type: ignore[arg-type]
        backlog=64,  # so many may be accepted before those above --connections are closed
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(options.timeout) + 5,
    )
    Server(config, service, options.drain).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
