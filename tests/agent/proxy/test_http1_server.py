"""A client's HTTP/1.1 connection: its requests as they are handed over, and its answers as h11 reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.proxy import http1_server
from agent.proxy.http1_server import DROPPED_BYTES, EARLY_BYTES, Http1Request, Http1Server
from shared.errors import HboneError, StreamResetError
from shared.http2.frames import CANCEL
from shared.net.legs.contract import Buffer, Leg, RelayEnd
from shared.net.legs.stream import header_value

GET = b"GET / HTTP/1.1\r\nHost: hello\r\n\r\n"
LONG = 1 << 20


@dataclass
class FakeLeg:
    """Notes what is done to it."""

    sent: bytearray = field(default_factory=bytearray)
    end: str = ""
    reads: bool = True
    buffered_bytes: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, relay: RelayEnd) -> None: ...

    def write(self, data: Buffer) -> None:
        self.sent += data

    def write_eof(self) -> None:
        self.end = self.end or "eof"

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.end = "closed"
        self.over.set()

    def abort(self) -> None:
        self.end = "aborted"
        self.over.set()


@dataclass
class Body:
    """Whoever a request is joined to."""

    data: bytearray = field(default_factory=bytearray)
    end: str = ""
    is_full: bool = False

    def received(self, leg: Leg, data: Buffer) -> None:
        self.data += data

    def ended(self, leg: Leg) -> None:
        self.end = "ended"

    def failed(self, leg: Leg, error: HboneError) -> None:
        self.end = str(error)

    def full(self, leg: Leg) -> None:
        self.is_full = True

    def drained(self, leg: Leg) -> None:
        self.is_full = False


class Story:
    """A connection, the requests that it has handed over, and a client that reads its answers."""

    def __init__(self) -> None:
        self.leg = FakeLeg()
        self.requests: list[Http1Request] = []
        self.server = Http1Server(self.leg, self.requests.append)
        self.client = h11.Connection(h11.CLIENT)
        self.read = 0

    def says(self, data: bytes) -> Http1Request:
        """The client sends `data`; the request that it was handed over as, or belongs to."""
        self.server.received(self.leg, data)
        return self.requests[-1]

    def asks(self, **request: Any) -> Http1Request:
        """The client sends a request without a body."""
        request = {"method": "GET", "target": "/", "headers": [("host", "hello")]} | request
        data = self.client.send(h11.Request(**request)) + self.client.send(h11.EndOfMessage())
        return self.says(data)

    def hears(self) -> list[Any]:
        """What the client makes of all that has come since the last time."""
        self.client.receive_data(bytes(self.leg.sent[self.read :]))
        self.read = len(self.leg.sent)
        events: list[Any] = []
        while type(event := self.client.next_event()) is not type:
            events.append(event)
            if type(event) is h11.EndOfMessage:
                break
        return events


@pytest.fixture
async def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr(http1_server, "FAIR_S", 60.0)  # the machine may be busy
    return Story()


def answer(request: Http1Request, body: bytes = b"hi", *, length: bool = True) -> None:
    fields = [(b"content-length", b"%d" % len(body))] if length else []
    request.respond([(b":status", b"200"), *fields])
    request.write(body)
    request.close()


async def turn() -> None:
    """What was put off to the next turn of the event loop has been done."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


# Requests.


async def test_a_request_has_http2_s_headers(story: Story) -> None:
    request = story.says(b"PUT /a?b=c HTTP/1.1\r\nHost: hello\r\nX-Own: 1\r\nContent-Length: 3\r\n\r\n123")
    assert request.headers == [
        (b":method", b"PUT"),
        (b":scheme", b"https"),
        (b":path", b"/a?b=c"),
        (b":authority", b"hello"),
        (b"x-own", b"1"),
        (b"content-length", b"3"),
    ]
    body = Body()
    request.join(body)
    assert (bytes(body.data), body.end) == (b"123", "ended")


async def test_fields_of_one_hop_stay_here(story: Story) -> None:
    request = story.says(
        b"GET / HTTP/1.1\r\nHost: hello\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
        b"TE: gzip, trailers\r\nX-Far: 2\r\n\r\n"
    )
    assert [name for name, _ in request.headers if name[:1] != b":"] == [b"x-far", b"te"]
    assert header_value(request.headers, b"te") == b"trailers"
    assert request.bodiless


async def test_an_absolute_target_names_the_host(story: Story) -> None:
    request = story.says(b"GET http://hello/a HTTP/1.1\r\nHost: hello\r\n\r\n")
    assert header_value(request.headers, b":authority") == b"hello"
    assert header_value(request.headers, b":path") == b"/a"
    request = Story().says(b"GET https://HELLO:443?a=b HTTP/1.1\r\nHost: hello\r\n\r\n")
    assert header_value(request.headers, b":path") == b"/?a=b"


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http://other/ HTTP/1.1\r\nHost: hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 4\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: me@hello\r\n\r\n",
        b"GET admin HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET ftp://hello/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http:///a HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, Sec-WebSocket-Key\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: a2V5\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
    ],
)
async def test_what_can_be_understood_in_two_ways_is_refused(story: Story, head: bytes) -> None:
    story.server.received(story.leg, head)
    assert story.requests == []
    assert story.leg.sent.startswith(b"HTTP/1.1 400 Bad Request\r\n") or story.leg.sent.startswith(
        b"HTTP/1.1 501"
    )
    assert story.leg.end == "closed"


async def test_connect_names_no_path(story: Story) -> None:
    request = story.says(b"CONNECT db:5432 HTTP/1.1\r\nHost: db:5432\r\n\r\n")
    names = [name for name, _ in request.headers]
    assert names == [b":method", b":authority", b"host"]


async def test_a_head_has_its_time(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_server, "HEAD_TIMEOUT_S", 0.01)
    story.server.received(story.leg, GET[:10])
    await story.leg.over.wait()
    assert story.leg.sent.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


async def test_and_its_size(story: Story) -> None:
    story.server.received(story.leg, b"GET / HTTP/1.1\r\nX: " + bytes(b"a" * LONG))
    assert story.leg.sent.startswith(b"HTTP/1.1 431 ")


async def test_which_is_http2_s(story: Story) -> None:
    """As many fields as an HTTP/1.1 head has room for would end an app's HTTP/2 connection."""
    story.server.received(story.leg, b"GET / HTTP/1.1\r\nHost: a\r\n" + 5000 * b"a:b\r\n" + b"\r\n")
    assert story.leg.sent.startswith(b"HTTP/1.1 431 ")
    assert story.requests == []


# Answers.


async def test_an_answer_with_its_length(story: Story) -> None:
    answer(story.asks())
    response, data, end = story.hears()
    assert (response.status_code, response.reason) == (200, b"OK")
    assert (bytes(data.data), list(end.headers)) == (b"hi", [])
    assert not story.leg.end


async def test_one_without_is_in_chunks_and_may_have_trailers(story: Story) -> None:
    request = story.asks()
    request.respond([(b":status", b"200")])
    request.write(b"hi")
    request.end_with_trailers([(b"x-end", b"1")])
    request.close()
    response, data, end = story.hears()
    assert (b"transfer-encoding", b"chunked") in list(response.headers)
    assert (bytes(data.data), list(end.headers)) == (b"hi", [(b"x-end", b"1")])


async def test_one_to_http10_ends_with_the_connection(story: Story) -> None:
    answer(story.says(b"GET / HTTP/1.0\r\nHost: hello\r\n\r\n"), length=False)
    assert story.leg.sent.endswith(b"\r\n\r\nhi")
    assert story.leg.end == "closed"


async def test_an_answer_to_head_has_no_body(story: Story) -> None:
    request = story.asks(method="HEAD")
    request.respond([(b":status", b"200"), (b"content-length", b"5")], end_stream=True)
    request.close()
    assert [type(event) for event in story.hears()] == [h11.Response, h11.EndOfMessage]
    assert not story.leg.end


@pytest.mark.parametrize(("method", "status"), [("HEAD", b"200"), ("GET", b"204"), ("GET", b"304")])
async def test_nor_trailers(story: Story, method: str, status: bytes) -> None:
    request = story.asks(method=method)
    request.respond([(b":status", status)])
    request.end_with_trailers([(b"x-end", b"1")])
    request.close()
    assert [type(event) for event in story.hears()] == [h11.Response, h11.EndOfMessage]
    assert not story.leg.end


async def test_an_interim_answer_comes_before(story: Story) -> None:
    request = story.asks()
    request.inform([(b":status", b"103"), (b"link", b"</a>")])
    answer(request)
    assert [event.status_code for event in story.hears()[:2]] == [103, 200]


async def test_one_that_is_cut_off_does_not_look_whole(story: Story) -> None:
    request = story.asks()
    request.respond([(b":status", b"200")])
    request.write(b"hi")
    request.reset(CANCEL)
    assert not story.leg.sent.endswith(b"0\r\n\r\n")
    assert story.leg.end == "aborted"


@pytest.mark.parametrize("body", [b"12", b"1234"])
async def test_nor_does_one_of_another_length_than_it_says(story: Story, body: bytes) -> None:
    request, reader = story.asks(), Body()
    request.join(reader)
    request.respond([(b":status", b"200"), (b"content-length", b"3")])
    request.write(body)
    request.write_eof()
    await turn()
    assert story.leg.end == "aborted"
    assert "cannot be sent" in reader.end


# One after the other.


async def test_a_request_waits_for_the_answer_before(story: Story) -> None:
    first = story.says(GET + GET.replace(b"/ ", b"/2 "))
    assert story.requests == [first]
    assert not story.leg.reads, "there is one more already"
    answer(first)
    await turn()
    assert header_value(story.requests[-1].headers, b":path") == b"/2"
    assert story.leg.reads


async def test_an_answer_before_the_end_of_its_request(story: Story) -> None:
    """The rest is read and dropped, so that the connection can be used again."""
    answer(story.says(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345"))
    assert not story.leg.end
    story.says(b"67890" + GET)
    await turn()
    assert len(story.requests) == 2


async def test_a_long_rest_is_not_waited_for(story: Story) -> None:
    answer(story.says(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n12345"))
    story.says(bytes(DROPPED_BYTES + 1))
    assert story.leg.end == "closed"


async def test_nor_one_that_was_not_asked_for(story: Story) -> None:
    answer(story.says(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"))
    assert story.leg.end == "closed"


async def test_the_last_answer_of_a_drain_says_so(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    request = story.asks()
    story.server.drain()
    answer(request)
    response, *_ = story.hears()
    assert (b"connection", b"close") in list(response.headers)
    assert story.leg.end == "closed"


async def test_without_one_the_connection_is_closed_soon(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_server, "DRAIN_IDLE_S", 0.0)
    story.server.drain()
    await story.leg.over.wait()
    assert story.leg.end == "closed"


async def test_what_follows_the_last_request_is_nothing_to_us(story: Story) -> None:
    """Some clients end a body with a line end of their own."""
    post = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 5\r\n\r\n12345\r\n"
    answer(story.says(post + GET))
    assert story.leg.sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert story.leg.end == "closed"
    assert len(story.requests) == 1


# Flow.


async def test_a_body_that_nobody_wants_is_not_read(story: Story) -> None:
    request = story.says(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % LONG)
    story.says(bytes(EARLY_BYTES))
    assert not story.leg.reads
    assert request.held_bytes == EARLY_BYTES
    body = Body()
    request.join(body)
    assert story.leg.reads and len(body.data) == EARLY_BYTES
    request.pause_reading()
    assert not story.leg.reads
    request.resume_reading()
    assert story.leg.reads


async def test_a_client_that_does_not_read_stops_the_app(story: Story) -> None:
    request, body = story.asks(), Body()
    request.join(body)
    story.server.full(story.leg)
    assert body.is_full
    story.server.drained(story.leg)
    assert not body.is_full


async def test_whoever_joins_later_is_told(story: Story) -> None:
    request, body = story.says(GET), Body()
    story.server.full(story.leg)
    request.join(body)
    assert body.is_full


async def test_nor_are_more_requests_of_it_read(story: Story) -> None:
    first = story.says(GET + GET)
    story.server.full(story.leg)
    answer(first)
    await turn()
    assert story.requests == [first]
    assert not story.leg.reads
    story.server.drained(story.leg)
    assert len(story.requests) == 2
    assert story.leg.reads


async def test_nor_are_many_of_them_in_one_turn(story: Story) -> None:
    """They are answered at once here, as with 503: others would have to wait for all of them."""
    answered: list[Http1Request] = []

    def serve(request: Http1Request) -> None:
        answered.append(request)
        answer(request)

    server = Http1Server(story.leg, serve)
    server.received(story.leg, GET * 3)
    for count in (1, 2, 3):
        assert len(answered) == count
        assert not story.leg.reads
        await asyncio.sleep(0)
    assert story.leg.reads


async def test_small_chunks_go_on_as_one(story: Story) -> None:
    pieces: list[bytes] = []
    body = Body()
    body.received = lambda leg, data: pieces.append(bytes(data))  # type: ignore[method-assign]
    story.says(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n").join(body)
    story.says(b"1\r\na\r\n" * 3)
    assert pieces == [b"aaa"]


async def test_work_on_a_read_is_cut_where_it_takes_long(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, body = story.says(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"), Body()
    request.join(body)
    monkeypatch.setattr(http1_server, "FAIR_S", 0.0)
    story.says(b"1\r\na\r\n" * 3)
    assert body.data == b"a"
    assert not story.leg.reads
    monkeypatch.setattr(http1_server, "FAIR_S", 60.0)
    await turn()
    assert body.data == b"aaa"
    assert story.leg.reads


async def test_one_that_never_reads_is_reset(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_server, "LAST_BYTES_TIMEOUT_S", 0.01)
    first = story.says(GET)
    story.server.full(story.leg)
    story.leg.buffered_bytes = LONG
    answer(first)
    await story.leg.over.wait()
    assert story.leg.end == "aborted"


async def test_a_drain_does_not_wait_for_one_that_does_not_read(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_server, "DRAIN_IDLE_S", 0.0)
    first = story.says(GET)
    story.server.full(story.leg)
    answer(first)
    story.server.drain()
    await story.leg.over.wait()
    assert story.leg.end == "closed"


async def test_what_waits_is_counted_for_one_request(story: Story) -> None:
    """Else many answers in one connection would look like far too much, and others be refused for it."""
    first = story.says(GET + GET)
    story.leg.buffered_bytes = 1000
    answer(first)
    assert first.unsent_bytes == 1000
    await turn()
    assert [request.buffered_bytes for request in story.requests] == [0, 1000]


async def test_a_connection_that_waits_keeps_no_request(story: Story) -> None:
    answer(story.says(GET))
    assert story.server.newest is None


async def test_what_has_come_of_the_next_request_is_counted(story: Story) -> None:
    story.server.received(story.leg, GET[:10])
    story.server.received(story.leg, GET[10:20])
    assert story.server.kept_bytes == 20
    story.says(GET[20:] + GET)
    assert story.server.kept_bytes == len(GET)


async def test_the_end_of_an_answer_that_is_over_is_not_the_next_one_s(story: Story) -> None:
    first = story.says(GET + GET)
    answer(first)
    await turn()
    first.reset(CANCEL)
    assert not story.leg.end
    story.requests[1].reset(CANCEL)
    assert story.leg.end == "aborted"


@pytest.mark.parametrize("joined", [True, False])
async def test_a_client_that_leaves(story: Story, joined: bool) -> None:
    request, body, gone = story.says(GET), Body(), list[StreamResetError]()
    request.on_gone = gone.append
    if joined:
        request.join(body)
    story.server.ended(story.leg)
    await turn()
    text = "it closed the connection before its answer was complete"
    assert body.end == (text if joined else "")
    assert [str(error) for error in gone] == ([] if joined else [text])
    assert request.over


async def test_one_whom_we_have_ended(story: Story) -> None:
    """As for a certificate that is revoked: its request is over, and so is what the app does for it."""
    request, body = story.says(GET), Body()
    request.join(body)
    story.server.lost()
    await turn()
    assert (body.end, request.over) == ("connection lost", True)


# WebSockets.

UPGRADE = (
    b"GET /chat HTTP/1.1\r\nHost: hello\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def test_a_websocket_is_an_extended_connect(story: Story) -> None:
    request = story.says(UPGRADE + b"early")
    assert header_value(request.headers, b":method") == b"CONNECT"
    assert header_value(request.headers, b":protocol") == b"websocket"
    assert not request.bodiless
    request.respond([(b":status", b"200"), (b"x-app", b"1")])
    said = bytes(story.leg.sent)
    assert said.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in said, "RFC 6455 section 1.3"
    body = Body()
    request.join(body)
    story.says(b" and late")
    assert bytes(body.data) == b"early and late"
    request.write(b"frames")
    assert story.leg.sent.endswith(b"\r\n\r\nframes")
    story.server.ended(story.leg)
    assert body.end == "ended"
    request.close()
    assert story.leg.end == "closed"


async def test_its_length_is_no_length_of_the_tunnel(story: Story) -> None:
    request = story.says(UPGRADE.replace(b"\r\n\r\n", b"\r\nContent-Length: 0\r\n\r\n"))
    assert not header_value(request.headers, b"content-length")


async def test_what_comes_behind_one_that_is_denied_is_a_request(story: Story) -> None:
    request = story.says(UPGRADE + GET)
    request.respond([(b":status", b"403"), (b"content-length", b"0")])
    request.close()
    await turn()
    assert len(story.requests) == 2
    assert header_value(story.requests[1].headers, b":method") == b"GET"


# However it comes.


@given(st.data())
def test_the_pieces_in_which_requests_come_do_not_matter(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
    chunked = data.draw(st.lists(st.booleans(), min_size=len(bodies), max_size=len(bodies)))
    client = h11.Connection(h11.CLIENT)
    stream = b""
    for body, in_chunks in zip(bodies, chunked, strict=True):
        client = h11.Connection(h11.CLIENT)
        length = ("transfer-encoding", "chunked") if in_chunks else ("content-length", str(len(body)))
        head = h11.Request(method="POST", target="/", headers=[("host", "a"), length])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            stream += client.send(event) or b""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    async def serve() -> list[bytes]:
        got: list[Body] = []

        def take(request: Http1Request) -> None:
            body = Body()
            got.append(body)
            if request.bodiless:
                answer(request)
                return

            class Answering(Body):
                def ended(self, leg: Leg) -> None:
                    body.data += self.data
                    answer(request)

            request.join(Answering())

        server = Http1Server(FakeLeg(), take)
        for piece in pieces:
            if piece:
                server.received(FakeLeg(), piece)
            await turn()
        for _ in bodies:
            await turn()
        return [bytes(body.data) for body in got]

    assert asyncio.run(serve()) == bodies
