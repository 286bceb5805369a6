"""Ordinary requests on their way to the app and back: the client speaks HTTP/2, the app is a raw socket."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from agent.config.settings import Settings
from agent.proxy import http1_connection
from agent.proxy.fields import SIGNATURE_REMOVED, checked_by_cloud_run
from shared.address import Address
from shared.http2.frames import CANCEL, INTERNAL_ERROR
from tests.shared.net.loopback import until
from tests.support.http2_peer import Fields, Http2Peer, PeerStream
from tests.support.krun_port import KrunPort
from tests.support.metadata_server import unsigned_token
from tests.support.tcp_peer import TcpPeer, TcpServer

BIG = bytes(range(256)) * 4096
"""1 MiB: a stream's whole window."""

OK_2 = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass
class Head:
    """A request as the app sees it."""

    line: str
    fields: list[tuple[str, str]]


async def head_of(app: TcpPeer) -> Head:
    line, *fields = (await app.read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    return Head(
        line, [(name.lower(), value) for name, _, value in (field.partition(": ") for field in fields)]
    )


async def asked(
    peer: Http2Peer,
    app: TcpServer,
    fields: Fields = (),
    *,
    method: bytes = b"GET",
    path: bytes = b"/",
    end: bool = True,
) -> tuple[PeerStream, TcpPeer, Head]:
    """A request that has reached the app; without a body, but for `end`."""
    stream = peer.request(method, path, fields, end=end)
    there = await app.accept()
    return stream, there, await head_of(there)


async def answered(peer: Http2Peer, app: TcpServer, response: bytes, *, method: bytes = b"GET") -> PeerStream:
    """A request to which the app has answered with `response` and the end of its connection."""
    stream, there, _ = await asked(peer, app, method=method)
    await there.send(response)
    there.end()
    return stream


# Requests.


async def test_a_request_becomes_http_1(peer: Http2Peer, app: TcpServer) -> None:
    _, _, head = await asked(peer, app, [(b"accept", b"*/*")], path=b"/a?b=c")
    assert head == Head("GET /a?b=c HTTP/1.1", [("host", "app"), ("accept", "*/*")])


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"PROPFIND"])
async def test_any_method(peer: Http2Peer, app: TcpServer, method: bytes) -> None:
    _, _, head = await asked(peer, app, method=method, path=b"/x")
    assert head.line == f"{method.decode()} /x HTTP/1.1"
    assert {name for name, _ in head.fields} == {"host"}, "and it announces no body"


async def test_options_of_the_server_itself(peer: Http2Peer, app: TcpServer) -> None:
    _, _, head = await asked(peer, app, method=b"OPTIONS", path=b"*")
    assert head.line == "OPTIONS * HTTP/1.1"


async def test_a_request_whose_client_has_left_is_not_the_apps(peer: Http2Peer, app: TcpServer) -> None:
    peer.request(b"GET", b"/gone", end=True).reset(CANCEL)
    await peer.answered()
    _, _, head = await asked(peer, app, path=b"/next")
    assert (head.line, app.count) == ("GET /next HTTP/1.1", 1)


def cloud_run_token(**claims: object) -> bytes:
    """A token as Cloud Run passes it on."""
    return (unsigned_token(**claims).rpartition(".")[0] + "." + SIGNATURE_REMOVED).encode()


RUN_APP = unsigned_token(aud="https://hello-123.europe-west1.run.app").encode()
OWN = unsigned_token(aud="https://auth.example.com", sub="user").encode()


@pytest.mark.parametrize(
    ("fields", "passed_on"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(
            [(b"x-forwarded-client-cert", b"By=spiffe://forged"), (b"x-a", b"1")], [("x-a", "1")], id="xfcc"
        ),
        pytest.param(
            [(b"cookie", b"a=1"), (b"x-a", b"1"), (b"cookie", b"b=2")],
            [("x-a", "1"), ("cookie", "a=1; b=2")],
            id="cookies",
        ),
        pytest.param(
            [(b"te", b"trailers"), (b"expect", b"100-continue"), (b"x-a", b"1")],
            [("x-a", "1")],
            id="connection-specific, and no body to expect",
        ),
        pytest.param(
            [
                (b"x_forwarded_client_cert", b"By=spiffe://forged"),
                (b"x-forwarded_client-cert", b"By=spiffe://forged"),
                (b"x.forwarded.client.cert", b"By=spiffe://forged"),
                (b"x_serverless_authorization", b"Bearer x"),
                (b"transfer_encoding", b"chunked"),
                (b"content_length", b"7"),
                (b"proxy_connection", b"x"),
                (b"keep_alive", b"x"),
                (b"x_forwarded_for", b"1.2.3.4"),
            ],
            [("x_forwarded_for", "1.2.3.4")],
            id="twins of what is krun's",
        ),
        pytest.param([(b"host", b"app"), (b"x-a", b"1")], [("x-a", "1")], id="a second host"),
        pytest.param(
            [(b"authorization", b"Bearer " + cloud_run_token(aud="custom"))], [], id="signature removed"
        ),
        pytest.param([(b"authorization", b"Bearer " + RUN_APP)], [], id="for a Cloud Run URL"),
        pytest.param([(b"authorization", b"bearer  " + RUN_APP)], [], id="spelt otherwise"),
        pytest.param(
            [(b"authorization", b"Bearer " + OWN)],
            [("authorization", f"Bearer {OWN.decode()}")],
            id="the app's own token",
        ),
        pytest.param(
            [(b"authorization", b"Bearer opaque.but.dotted")],
            [("authorization", "Bearer opaque.but.dotted")],
            id="an opaque token",
        ),
        pytest.param([(b"authorization", b"Basic dTpw")], [("authorization", "Basic dTpw")], id="a password"),
        pytest.param([(b"x-serverless-authorization", b"Bearer " + RUN_APP)], [], id="the other header"),
        pytest.param(
            [(b"x-serverless-authorization", b"Bearer " + RUN_APP), (b"authorization", b"Bearer " + RUN_APP)],
            [("authorization", f"Bearer {RUN_APP.decode()}")],
            id="both: only the other one was checked",
        ),
        pytest.param(
            [(b"authorization", b"Bearer " + RUN_APP), (b"x-serverless-authorization", b"Bearer " + RUN_APP)],
            [("authorization", f"Bearer {RUN_APP.decode()}")],
            id="both, in the other order",
        ),
    ],
)
async def test_what_is_passed_on(
    peer: Http2Peer, app: TcpServer, fields: list[tuple[bytes, bytes]], passed_on: list[tuple[str, str]]
) -> None:
    _, _, head = await asked(peer, app, fields)
    assert head.fields == [("host", "app"), *passed_on]


def nested(depth: int) -> bytes:
    """A JWT whose claims are too deep for Python's JSON reader."""
    claims = base64.urlsafe_b64encode(b"[" * depth).rstrip(b"=")
    return b"Bearer eyJ." + claims + b".x"


@pytest.mark.parametrize("depth", [10, 1000, 9000])
async def test_a_token_that_cannot_be_read_stays(peer: Http2Peer, app: TcpServer, depth: int) -> None:
    _, _, head = await asked(peer, app, [(b"authorization", nested(depth))])
    assert dict(head.fields)["authorization"] == nested(depth).decode()


@pytest.mark.parametrize(
    ("authorization", "checked"),
    [
        (b"Bearer " + unsigned_token(aud="https://a.run.app/").encode(), True),
        (b"Bearer " + unsigned_token(aud="https://a.run.app").encode(), True),
        (b"Bearer " + unsigned_token(aud="https://arun.app").encode(), False),
        (b"Bearer " + unsigned_token(aud="https://a.run.app.example").encode(), False),
        (b"Bearer " + unsigned_token(aud=["https://a.run.app"]).encode(), False),
        (b"Bearer " + unsigned_token(aud=5).encode(), False),
        (b"Bearer " + unsigned_token().encode(), False),
        (b"Bearer x.y." + SIGNATURE_REMOVED.encode(), True),
        (b"Digest " + unsigned_token(aud="https://a.run.app").encode(), False),
        (b"Bearer a.b", False),
        (b"Bearer a.W10.c", False),
        (b"Bearer a.\xff\xff.c", False),
        (b"Bearer", False),
        (b"", False),
    ],
)
def test_which_authorization_cloud_run_has_checked(authorization: bytes, checked: bool) -> None:
    assert checked_by_cloud_run(authorization) is checked


async def test_a_body_of_known_length(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, head = await asked(peer, app, [(b"content-length", b"11")], method=b"POST", end=False)
    assert head.fields == [("host", "app"), ("content-length", "11")]
    await stream.send(b"hello ")
    assert await there.read(6) == b"hello "
    await stream.send(b"world")
    stream.end()
    assert await there.read(5) == b"world"


async def test_a_body_of_unknown_length(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, head = await asked(peer, app, method=b"POST", end=False)
    assert head.fields == [("host", "app"), ("transfer-encoding", "chunked")]
    await stream.send(b"hello")
    assert await there.read(10) == b"5\r\nhello\r\n"
    stream.end()
    assert await there.read(5) == b"0\r\n\r\n"


async def test_a_body_of_no_length(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"POST", b"/", [(b"content-length", b"0")])
    stream.end()
    there = await app.accept()
    assert (await head_of(there)).fields == [
        ("host", "app"),
        ("content-length", "0"),
    ]
    await there.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert await stream.rest() == b"ok"


async def test_a_large_body_up(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(
        peer, app, [(b"content-length", str(8 * len(BIG)).encode())], method=b"PUT", end=False
    )
    async with asyncio.TaskGroup() as both:
        received = both.create_task(there.read(8 * len(BIG)))
        await stream.send(BIG * 8)
        stream.end()
    assert received.result() == BIG * 8
    await there.send(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert await stream.status() == 204


async def test_an_app_that_does_not_read_stops_the_client(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app, method=b"PUT", end=False)
    there.pause()
    sent = await stream.fill()
    other, _, _ = await asked(peer, app)
    assert other.fields == [], "another request is not stopped"
    there.resume()
    stream.end()
    await peer.answered()
    await there.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    body = await there.rest()
    assert len(body) > sent
    assert body.endswith(b"\r\n0\r\n\r\n")


# Responses.


async def test_a_response_becomes_http_2(peer: Http2Peer, app: TcpServer) -> None:
    stream = await answered(
        peer,
        app,
        b"HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n"
        b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 5\r\n\r\nhello",
    )
    assert await stream.rest() == b"hello"
    assert stream.fields == [
        (b":status", b"201"),
        (b"content-type", b"text/plain"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"5"),
    ]


async def test_a_chunked_response_with_trailers(peer: Http2Peer, app: TcpServer) -> None:
    stream = await answered(
        peer,
        app,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
        b"5\r\nhello\r\n6\r\n world\r\n0\r\nX-Sum: 11\r\n\r\n",
    )
    assert await stream.rest() == b"hello world"
    assert stream.fields == [(b":status", b"200"), (b"trailer", b"X-Sum")]
    assert stream.trailers == [(b"x-sum", b"11")]


async def test_a_response_that_ends_with_its_connection(peer: Http2Peer, app: TcpServer) -> None:
    stream = await answered(peer, app, b"HTTP/1.0 200 OK\r\n\r\nhello")
    assert await stream.rest() == b"hello"


@pytest.mark.parametrize(
    ("method", "response", "status"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", 200),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", 304),
        (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200),
    ],
)
async def test_a_response_without_a_body(
    peer: Http2Peer, app: TcpServer, method: bytes, response: bytes, status: int
) -> None:
    stream, there, _ = await asked(peer, app, method=method)
    await there.send(response)  # and no FIN: the head says enough
    assert await stream.rest() == b""
    assert await stream.status() == status


async def test_a_response_streams_while_the_request_does(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app, method=b"POST", end=False)
    await there.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    assert await stream.status() == 200
    for word in (b"one", b"two", b"six"):
        await stream.send(word)
        assert await there.read(8) == b"3\r\n" + word + b"\r\n"
        await there.send(b"3\r\n" + word + b"\r\n")
        assert await stream.read(3) == word
    stream.end()
    assert await there.read(5) == b"0\r\n\r\n"
    await there.send(b"0\r\n\r\n")
    assert await stream.rest() == b""


async def test_a_large_body_down(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    there.send_soon(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (8 * len(BIG)) + BIG * 8)
    assert await stream.rest() == BIG * 8


async def test_a_client_that_does_not_read_stops_the_app(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    stream.window_held = True
    there.send_soon(b"HTTP/1.1 200 OK\r\n\r\n" + BIG * 32)
    there.end()
    await peer.until(lambda: len(stream.data) == 65535)  # h2's window
    other, elsewhere, _ = await asked(peer, app)
    await elsewhere.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert await other.rest() == b"ok"
    assert there.unsent > 0, "what krun does not read stays with the app"
    stream.release_window()
    assert await stream.rest() == BIG * 32


async def test_an_early_response_ends_the_exchange(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app, [(b"content-length", b"1000000")], method=b"POST", end=False)
    await there.send(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\n\r\nbig")
    assert await stream.rest() == b"big"
    assert await stream.status() == 413
    assert await there.rest() == b""


# Apps that fail.


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"", b"the app closed the connection before its answer was complete\n"),
        (b"HTTP/1.1 200 O", b"the app closed the connection before its answer was complete\n"),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", b"the app does not speak HTTP/1.1: "),
        (
            b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            b"the app speaks HTTP/2, not HTTP/1.1: set HBONE_APP_PROTOCOL=h2c\n",
        ),
        (b"HTTP/1.1 200 OK\r\nx: " + bytes(70 << 10), b"the app does not speak HTTP/1.1: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"the app does not speak HTTP/1.1: "),
    ],
)
async def test_an_app_that_gives_no_answer(
    peer: Http2Peer, app: TcpServer, response: bytes, reason: bytes
) -> None:
    stream = await answered(peer, app, response)
    assert await stream.status() == 502
    assert (await stream.rest()).startswith(reason)


async def test_an_app_that_breaks_off_without_an_answer(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    there.reset()
    assert await stream.status() == 502
    assert (await stream.rest()).startswith(b"the app broke off: ")


@pytest.mark.parametrize("end", [TcpPeer.end, TcpPeer.reset])
async def test_an_app_that_breaks_off_in_its_answer(
    peer: Http2Peer, app: TcpServer, end: Callable[[TcpPeer], None]
) -> None:
    stream, there, _ = await asked(peer, app)
    await there.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")
    assert await stream.read(5) == b"hello"
    end(there)
    assert await stream.broken() == INTERNAL_ERROR
    assert not stream.ended, "half an answer must not look like a whole one"


async def test_garbage_in_the_middle_of_an_answer(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    await there.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nnonsense\r\n")
    assert await stream.broken() == INTERNAL_ERROR
    await there.was_reset()


# Clients that fail.


async def test_a_client_that_gives_up_in_its_body(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app, method=b"POST", end=False)
    await stream.send(b"half")
    assert await there.read(9) == b"4\r\nhalf\r\n"
    stream.reset(CANCEL)
    assert await there.was_reset(), "half a request must not look like a whole one"


async def test_a_client_that_is_gone(peer: Http2Peer, app: TcpServer) -> None:
    _, there, _ = await asked(peer, app)
    peer.drop()
    assert await there.was_reset()


async def test_a_request_that_http_1_cannot_say(peer: Http2Peer, app: TcpServer) -> None:
    stream = peer.request(b"GET", b"/\xc3\xa4", end=True)
    assert await stream.status() == 400
    assert await stream.rest() == b"a header of the request cannot be sent as HTTP/1.1\n"
    assert await (await app.accept()).rest() == b""
    _, _, head = await asked(peer, app)
    assert head.line == "GET / HTTP/1.1", "only that request is refused"


# A real server.


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"path": self.path, "host": self.headers["host"]}).encode() + body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 100


@pytest.fixture
def python_server() -> Iterator[int]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="http.server")
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


async def test_pythons_own_server(python_server: int) -> None:
    settings = Settings(app=Address("127.0.0.1", python_server), app_protocol="http1")
    async with KrunPort.serving(settings) as krun, Http2Peer.connected(krun.port) as peer:
        streams = [peer.request(b"POST", b"/p", [(b"content-length", b"4")]) for _ in range(20)]
        for stream in streams:
            await stream.send(b"body")
            stream.end()
        for stream in streams:
            assert await stream.rest() == b'{"path": "/p", "host": "app"}body'


# Connections to the app are kept.


async def kept(peer: Http2Peer, app: TcpServer) -> TcpPeer:
    """A connection that has carried a request, and waits for another."""
    stream, there, _ = await asked(peer, app)
    await there.send(OK_2)
    assert await stream.rest() == b"ok"
    return there


async def test_requests_go_over_one_connection(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    for number in range(2, 5):
        stream = peer.request(b"GET", b"/%d" % number, end=True)
        assert (await head_of(there)).line == f"GET /{number} HTTP/1.1"
        await there.send(OK_2)
        assert await stream.rest() == b"ok"
    assert app.count == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, Close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok and more",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ],
)
async def test_a_connection_that_is_not_used_again(peer: Http2Peer, app: TcpServer, response: bytes) -> None:
    stream, there, _ = await asked(peer, app)
    await there.send(response)
    assert await stream.rest() == b"ok"
    _, _, head = await asked(peer, app, path=b"/next")
    assert (head.line, app.count) == ("GET /next HTTP/1.1", 2)


async def test_what_an_app_says_unasked_is_nobodys_answer(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    await there.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    assert await there.was_reset()
    stream, there, _ = await asked(peer, app)
    await there.send(OK_2)
    assert await stream.status() == 200


@pytest.mark.parametrize("end", [TcpPeer.end, TcpPeer.reset])
async def test_a_kept_connection_that_dies_under_a_request(
    peer: Http2Peer, app: TcpServer, end: Callable[[TcpPeer], None]
) -> None:
    there = await kept(peer, app)
    stream = peer.request(b"GET", b"/again", end=True)
    await head_of(there)
    end(there)
    elsewhere = await app.accept()
    assert (await head_of(elsewhere)).line == "GET /again HTTP/1.1"
    await elsewhere.send(OK_2)
    assert await stream.rest() == b"ok"


async def test_it_is_sent_again_with_its_body(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    stream = peer.request(b"PUT", b"/again")
    await stream.send(b"one")
    assert await there.read_until(b"one\r\n")
    there.reset()
    elsewhere = await app.accept()
    await head_of(elsewhere)
    assert await elsewhere.read(8) == b"3\r\none\r\n"
    await stream.send(b"two")
    stream.end()
    assert await elsewhere.read(13) == b"3\r\ntwo\r\n0\r\n\r\n"
    await elsewhere.send(OK_2)
    assert await stream.rest() == b"ok"


async def test_a_client_that_leaves_while_it_is_sent_again(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    stream = peer.request(b"GET", b"/again", end=True)
    await head_of(there)
    there.end()
    elsewhere = await app.accept()
    await head_of(elsewhere)
    stream.reset(CANCEL)
    assert await elsewhere.was_reset()


@pytest.mark.parametrize("method", [b"POST", b"PATCH", b"LOCK"])
async def test_what_may_not_be_done_twice_is_not_sent_again(
    peer: Http2Peer, app: TcpServer, method: bytes
) -> None:
    there = await kept(peer, app)
    stream = peer.request(method, b"/once", end=True)
    await head_of(there)
    there.end()
    assert await stream.status() == 502
    assert app.count == 1


async def test_what_was_answered_in_part_is_not_sent_again(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    stream = peer.request(b"GET", b"/", end=True)
    await head_of(there)
    await there.send(b"HTTP/1.1 2")
    there.end()
    assert await stream.status() == 502
    assert app.count == 1


async def test_a_request_is_sent_again_once(peer: Http2Peer, app: TcpServer) -> None:
    there = await kept(peer, app)
    stream = peer.request(b"GET", b"/", end=True)
    await head_of(there)
    there.end()
    elsewhere = await app.accept()
    await head_of(elsewhere)
    elsewhere.end()
    assert await stream.status() == 502
    assert app.count == 2


# Interim answers.


async def test_expect_100_continue_goes_to_the_app_and_its_100_comes_back(
    peer: Http2Peer, app: TcpServer
) -> None:
    stream = peer.request(b"POST", b"/", [(b"content-length", b"4"), (b"expect", b"100-continue")])
    there = await app.accept()
    assert ("expect", "100-continue") in (await head_of(there)).fields
    await there.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    await peer.until(lambda: bool(stream.interim))
    assert stream.interim == [[(b":status", b"100")]]
    await stream.send(b"body")
    stream.end()
    assert await there.read(4) == b"body"
    await there.send(OK_2)
    assert await stream.rest() == b"ok"


async def test_an_app_that_refuses_what_is_expected(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(
        peer, app, [(b"content-length", b"4"), (b"expect", b"100-continue")], method=b"POST", end=False
    )
    await there.send(b"HTTP/1.1 417 Expectation Failed\r\ncontent-length: 0\r\n\r\n")
    assert await stream.status() == 417
    assert await there.rest() == b"", "and no request comes in the place of the body"


async def test_early_hints(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    await there.send(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n"
        b"Connection: x-hop\r\nX-Hop: 1\r\ncontent-length: 5\r\n\r\n"
    )
    await peer.until(lambda: bool(stream.interim))
    assert stream.interim == [[(b":status", b"103"), (b"link", b"</a>")]]
    await there.send(OK_2)
    assert await stream.rest() == b"ok"


async def test_interim_answers_without_end(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app)
    await there.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10_000 + OK_2)
    assert await stream.rest() == b"ok"
    assert len(stream.interim) == 32


async def test_a_switch_that_nobody_asked_for(peer: Http2Peer, app: TcpServer) -> None:
    stream = await answered(peer, app, b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n")
    assert await stream.status() == 502


# Trailers, framing.


async def test_trailers_of_a_request(peer: Http2Peer, app: TcpServer) -> None:
    stream, there, _ = await asked(peer, app, method=b"POST", end=False)
    await stream.send(b"body")
    stream.end(
        [
            (b"x-sum", b"1"),
            (b"x-forwarded-client-cert", b"forged"),
            (b"x_forwarded_client_cert", b"forged"),
            (b"content-length", b"7"),
            (b"transfer_encoding", b"x"),
            (b"authorization", b"x"),
        ]
    )
    assert await there.read_until(b"\r\n\r\n") == b"4\r\nbody\r\n0\r\nx-sum: 1\r\n\r\n"


# What is held.


@pytest.mark.parametrize("length", [(), [(b"content-length", b"100000000")]], ids=["chunked", "known length"])
async def test_uploads_that_an_app_does_not_read(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, length: Fields
) -> None:
    """Each holds its stream's window, and what the kernel takes for the app."""
    uploads = 5
    streams = [peer.request(b"PUT", b"/", length) for _ in range(uploads)]
    for _ in streams:
        there = await app.accept()
        await head_of(there)
        there.pause()
    sent = [await stream.fill() for stream in streams]
    proxy = krun.requests.app
    assert proxy.open_requests == uploads
    assert uploads * len(BIG) < proxy.buffered_bytes < uploads * 2 * len(BIG)
    assert sum(sent) < uploads * 3 * len(BIG), "with what the app's own socket holds"
    peer.drop()
    await until(lambda: proxy.open_requests == 0)
    assert proxy.buffered_bytes == 0


async def test_an_app_that_answers_and_never_reads(
    krun: KrunPort, peer: Http2Peer, app: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_connection, "LEAVE_S", 0.1)
    stream, there, _ = await asked(peer, app, method=b"PUT", end=False)
    there.pause()
    await stream.fill()
    stream.end()
    await peer.answered()
    await there.send(OK_2)
    assert await stream.rest() == b"ok"
    proxy = krun.requests.app
    assert proxy.open_requests == 0
    assert proxy.buffered_bytes > len(BIG) // 2, "it counts"
    await until(lambda: proxy.buffered_bytes == 0)
