"""Apps of all kinds behind krun's own port, and clients and front ends before it; none of them is ours."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import websockets.sync.client
import websockets.sync.server
from websockets.exceptions import ConnectionClosedError
from websockets.typing import Subprotocol

from hbone.demo.processes import Process
from shared.address import Address
from tests.path import krun_peers
from tests.path.programs import random_file, run, start
from tests.support.world import PATIENCE_S, find_program, free_port

CURL = ("--silent", "--show-error", "--http2-prior-knowledge")

_HYPERCORN = """
async def app(scope, receive, send):
    if scope["type"] == "websocket":
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept", "subprotocol": scope["subprotocols"][0]})
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "bye":
                await send({"type": "websocket.close", "code": 4001, "reason": "done"})
                return
            await send({"type": "websocket.send", "text": message.get("text"), "bytes": message.get("bytes")})
    elif scope["type"] == "http":
        size = 0
        while True:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        answer = f"{scope['method']} in HTTP/{scope['http_version']} with {size} bytes"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer.encode()})
"""


@contextmanager
def krun(folder: Path, app: Address, **environ: str) -> Iterator[Address]:
    """A krun beside `app`, until the block ends; yields its tunnel port."""
    with krun_peers.krun(folder, HBONE_APP=str(app), **environ) as (_, address):
        yield address


@contextmanager
def serving(server: Any) -> Iterator[Address]:
    """A server of the standard library, or one like them, until the block ends."""
    thread = threading.Thread(target=server.serve_forever, name="server")
    thread.start()
    try:
        host, port = server.socket.getsockname()[:2]
        yield Address(host, port)
    finally:
        server.shutdown()
        getattr(server, "server_close", lambda: None)()
        thread.join()


def wait_for_port(process: Process, address: Address) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process._process.poll() is None:
        with socket.socket() as sock:
            if not sock.connect_ex((address.host, address.port)):
                return
        time.sleep(0.01)
    raise AssertionError(f"nobody listens on {address}")


@contextmanager
def program(name: str, command: list[str | Path], folder: Path, port: int) -> Iterator[Address]:
    """A program that listens on a loopback port, until the block ends."""
    process = start(name, command, folder)
    address = Address("127.0.0.1", port)
    try:
        wait_for_port(process, address)
        yield address
    finally:
        process.stop()


# gRPC.


class Methods(grpc.GenericRpcHandler):
    """A service of all kinds of methods, whose messages are plain bytes."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        kinds: dict[str, Callable[..., grpc.RpcMethodHandler]] = {
            "unary": grpc.unary_unary_rpc_method_handler,
            "refuse": grpc.unary_unary_rpc_method_handler,
            "sleep": grpc.unary_unary_rpc_method_handler,
            "count": grpc.unary_stream_rpc_method_handler,
            "measure": grpc.stream_unary_rpc_method_handler,
            "shout": grpc.stream_stream_rpc_method_handler,
        }
        name = details.method.rpartition("/")[2]
        return kinds[name](getattr(self, name)) if name in kinds else None

    def unary(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        context.send_initial_metadata((("x-initial", "1"),))
        context.set_trailing_metadata((("x-trailing", "2"),))
        return message[::-1]

    def refuse(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")
        raise AssertionError

    def sleep(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        if not context.add_callback(self.cancelled.set):  # it is over before we have begun
            self.cancelled.set()
        self.cancelled.wait(PATIENCE_S)
        return message

    def count(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from (str(number).encode() for number in range(int(message)))

    def measure(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return str(sum(map(len, messages))).encode()

    def shout(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            yield message.upper()


LARGE_BYTES = 8 << 20
_LARGE = [("grpc.max_receive_message_length", 2 * LARGE_BYTES)]


@pytest.fixture(scope="module")
def methods() -> Methods:
    return Methods()


@pytest.fixture(scope="module", params=["auto", "h2c"])
def channel(
    request: pytest.FixtureRequest, methods: Methods, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(8), handlers=[methods], options=_LARGE)
    app = Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    server.start()
    with (
        krun(tmp_path_factory.mktemp("grpc"), app, HBONE_APP_PROTOCOL=request.param) as address,
        grpc.insecure_channel(str(address), options=_LARGE) as channel,
    ):
        yield channel
    server.stop(0).wait()


def test_grpc_unary_with_metadata_both_ways(channel: grpc.Channel) -> None:
    answer, call = channel.unary_unary("/test.Test/unary").with_call(b"abc", timeout=PATIENCE_S)
    assert answer == b"cba"
    assert call.initial_metadata() == (("x-initial", "1"),)
    assert call.trailing_metadata() == (("x-trailing", "2"),)


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        ("refuse", grpc.StatusCode.NOT_FOUND, "nothing here"),
        ("nobody", grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    ],
)
def test_grpc_errors(channel: grpc.Channel, method: str, code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/test.Test/{method}")(b"", timeout=PATIENCE_S)
    error: Any = caught.value
    assert (error.code(), error.details()) == (code, text)


def test_grpc_streams(channel: grpc.Channel) -> None:
    numbers = list(channel.unary_stream("/test.Test/count")(b"2000", timeout=PATIENCE_S))
    assert numbers == [str(number).encode() for number in range(2000)]
    pieces = [bytes(50_000)] * 100
    assert channel.stream_unary("/test.Test/measure")(iter(pieces), timeout=PATIENCE_S) == b"5000000"


def test_grpc_both_ways_at_once(channel: grpc.Channel) -> None:
    """Each message is answered before the next is sent."""
    answered = threading.Semaphore(1)

    def words() -> Iterator[bytes]:
        for word in (b"one", b"two", b"three"):
            assert answered.acquire(timeout=PATIENCE_S)
            yield word

    answers = []
    for answer in channel.stream_stream("/test.Test/shout")(words(), timeout=PATIENCE_S):
        answers.append(answer)
        answered.release()
    assert answers == [b"ONE", b"TWO", b"THREE"]


def test_grpc_large_messages(channel: grpc.Channel) -> None:
    message = os.urandom(LARGE_BYTES)
    assert channel.unary_unary("/test.Test/unary")(message, timeout=PATIENCE_S) == message[::-1]


def test_grpc_deadlines_and_cancellation_reach_the_app(channel: grpc.Channel, methods: Methods) -> None:
    methods.cancelled.clear()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test.Test/sleep")(b"", timeout=0.5)
    error: Any = caught.value
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert methods.cancelled.wait(PATIENCE_S)
    methods.cancelled.clear()
    call = channel.unary_unary("/test.Test/sleep").future(b"")
    assert channel.unary_unary("/test.Test/unary")(b"ab", timeout=PATIENCE_S) == b"ba", "it has gone out"
    call.cancel()
    assert methods.cancelled.wait(PATIENCE_S)


# WebSockets: a client speaks HTTP/1.1 to a front end, and that HTTP/2 to krun.


FRONT_ENDS: dict[str, Callable[[Path, Address], AbstractContextManager[Address]]] = {
    "nghttpx": lambda folder, behind: krun_peers.nghttpx(folder, behind, front=";no-tls"),
    "haproxy": krun_peers.haproxy,
}


@contextmanager
def websocket_app(folder: Path) -> Iterator[Address]:
    """A server of WebSockets in HTTP/1.1."""

    def echo(connection: websockets.sync.server.ServerConnection) -> None:
        for message in connection:
            if message == "bye":
                connection.close(4001, "done")
                return
            connection.send(message)

    server = websockets.sync.server.serve(
        echo, "127.0.0.1", 0, subprotocols=[Subprotocol("chat")], max_size=None
    )
    with serving(server) as address:
        yield address


@contextmanager
def hypercorn(folder: Path) -> Iterator[Address]:
    """A server that speaks HTTP/2, extended CONNECT included, and HTTP/1.1."""
    (folder / "app_of_hypercorn.py").write_text(_HYPERCORN)
    port = free_port()
    module = folder / "app_of_hypercorn"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "hypercorn",
        f"--bind=127.0.0.1:{port}",
        f"{module}:app",
    ]
    with program("hypercorn", command, folder, port) as address:
        yield address


@pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)
@pytest.mark.parametrize("app", [websocket_app, hypercorn])
def test_websockets(
    tmp_path: Path,
    front_end: Callable[[Path, Address], Any],
    app: Callable[[Path], Any],
) -> None:
    with ExitStack() as block:
        behind = block.enter_context(app(tmp_path))
        container = block.enter_context(krun(tmp_path, behind))
        front = block.enter_context(front_end(tmp_path, container))
        client = block.enter_context(
            websockets.sync.client.connect(
                f"ws://{front}/chat",
                subprotocols=[Subprotocol("chat")],
                open_timeout=PATIENCE_S,
                max_size=None,
                compression=None,
            )
        )
        assert client.subprotocol == "chat"
        client.send("hello")
        assert client.recv(PATIENCE_S) == "hello"
        large = os.urandom(LARGE_BYTES)
        client.send(large)
        assert client.recv(PATIENCE_S) == large
        client.send("bye")
        with pytest.raises(ConnectionClosedError) as caught:
            client.recv(PATIENCE_S)
        assert caught.value.rcvd is not None
        assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4001, "done")


# HTTP/2 apps.


def test_hypercorn_is_asked_in_http_2(tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", 1 << 20)
    with hypercorn(tmp_path) as app, krun(tmp_path, app) as address:
        done = run(find_program("curl"), *CURL, "--data-binary", f"@{body}", f"http://{address}/")
    assert done.stdout == b"POST in HTTP/2 with 1048576 bytes"


def test_hypercorn_can_be_asked_in_http_1(tmp_path: Path) -> None:
    with hypercorn(tmp_path) as app, krun(tmp_path, app, HBONE_APP_PROTOCOL="http1") as address:
        done = run(find_program("curl"), *CURL, "--upload-file", "-", f"http://{address}/", stdin=b"12345")
    assert done.stdout == b"PUT in HTTP/1.1 with 5 bytes"


def test_nghttpd_with_trailers(tmp_path: Path) -> None:
    port = free_port()
    body = random_file(tmp_path / "file", 1 << 20)
    flags = ["--no-tls", "--address=127.0.0.1", f"--htdocs={tmp_path}", "--trailer=x-sum: 1", str(port)]
    with (
        program("nghttpd", [find_program("nghttpd"), *flags], tmp_path, port) as app,
        krun(tmp_path, app) as address,
    ):
        done = run(find_program("nghttp"), f"http://{address}/file")
        assert (done.returncode, done.stderr, done.stdout) == (0, b"", body.read_bytes())
        verbose = run(find_program("nghttp"), "--verbose", "--null-out", f"http://{address}/file")
        assert b"x-sum: 1\n" in verbose.stdout


# Interim answers, and what an app may believe.


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 100 where it is expected (Python's own doing), and gives early hints."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["content-length"])))
        self._answer(f"{size} bytes".encode())

    def do_GET(self) -> None:
        self.send_response_only(103)
        self.send_header("link", "</style.css>; rel=preload")
        self.end_headers()
        self._answer(b"after the hints")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_expect_100(self) -> bool:
        if self.path == "/refused":
            self.send_error(417)
            return False
        return super().handle_expect_100()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def python_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with (
        serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as app,
        krun(tmp_path_factory.mktemp("python"), app) as address,
    ):
        yield address


def test_curl_expects_100(python_app: Address, tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", 2 << 20)
    curl = (find_program("curl"), *CURL, "--verbose", "--expect100-timeout", str(PATIENCE_S))
    sent = ("--header", "expect: 100-continue", "--data-binary", f"@{body}")
    done = run(*curl, *sent, f"http://{python_app}/")
    assert done.stdout == b"2097152 bytes"
    assert b"< HTTP/2 100" in done.stderr


def test_curl_is_refused_instead(python_app: Address, tmp_path: Path) -> None:
    body = random_file(tmp_path / "body", 2 << 20)
    curl = (find_program("curl"), *CURL, "--expect100-timeout", str(PATIENCE_S))
    sent = ("--header", "expect: 100-continue", "--data-binary", f"@{body}")
    told = ("--output", "/dev/null", "--write-out", "%{http_code} after %{size_upload}")
    done = run(*curl, *sent, *told, f"http://{python_app}/refused")
    assert done.stdout == b"417 after 0"


def test_curl_gets_early_hints(python_app: Address) -> None:
    done = run(find_program("curl"), *CURL, "--verbose", f"http://{python_app}/")
    assert done.stdout == b"after the hints"
    assert b"< HTTP/2 103" in done.stderr
    assert b"< link: </style.css>; rel=preload" in done.stderr


def told(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """A WSGI app that says whom it believes to talk to."""
    names = ("HTTP_X_FORWARDED_CLIENT_CERT", "HTTP_X_SERVERLESS_AUTHORIZATION", "HTTP_X_PLAIN_NAME")
    start_response("200 OK", [("content-type", "text/plain")])
    return [f"{name}={environ.get(name, '')}\n".encode() for name in names]


class Silent(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


FORGED = (
    *("--header", "x_forwarded_client_cert: By=spiffe://forged"),
    *("--header", "x-serverless_authorization: Bearer forged"),
    *("--header", "x_plain_name: passes"),
)


def test_what_wsgi_takes_for_a_certificate_cannot_be_forged(tmp_path: Path) -> None:
    server = wsgiref.simple_server.make_server("127.0.0.1", 0, told, handler_class=Silent)
    with serving(server) as app, krun(tmp_path, app) as address:
        direct = run(find_program("curl"), "--silent", *FORGED, f"http://{app}/")
        assert b"HTTP_X_FORWARDED_CLIENT_CERT=By=spiffe://forged\n" in direct.stdout, "else nothing is shown"
        done = run(find_program("curl"), *CURL, *FORGED, f"http://{address}/")
    assert done.stdout == (
        b"HTTP_X_FORWARDED_CLIENT_CERT=\nHTTP_X_SERVERLESS_AUTHORIZATION=\nHTTP_X_PLAIN_NAME=passes\n"
    )
