"""HTTP/1.1 as bytes, held against h11: what one takes and the other does not is listed here."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.proxy.fields import Field, RequestHead
from agent.proxy.http1_messages import (
    LENGTH_CHUNKED,
    LENGTH_UNTIL_END,
    MAX_HEAD_BYTES,
    Chunks,
    Http1Error,
    chunk,
    end_of_head,
    last_chunk,
    read_head,
    request_bytes,
)

# Requests.


def test_a_head() -> None:
    head = RequestHead(b"GET", b"https", b"app", b"/a?b", b"", [(b"accept", b"*/*")])
    assert request_bytes(head, chunked=False) == b"GET /a?b HTTP/1.1\r\nhost: app\r\naccept: */*\r\n\r\n"
    assert b"\r\ntransfer-encoding: chunked\r\n\r\n" in request_bytes(head, chunked=True)


@pytest.mark.parametrize(
    "head",
    [
        RequestHead(b"", b"", b"app", b"/"),
        RequestHead(b"GE T", b"", b"app", b"/"),
        RequestHead(b"GET\r\n", b"", b"app", b"/"),
        RequestHead(b"GET", b"", b"app", b""),
        RequestHead(b"GET", b"", b"app", b"/ HTTP/1.1\r\nx: y"),
        RequestHead(b"GET", b"", b"app", b"/a b"),
        RequestHead(b"GET", b"", b"app", b"/\xc3\xa4"),
        RequestHead(b"GET", b"", b"app\r\nx: y", b"/"),
        RequestHead(b"GET", b"", b"app", b"/", b"", [(b"a(b", b"1")]),
        RequestHead(b"GET", b"", b"app", b"/", b"", [(b"a b", b"1")]),
        RequestHead(b"GET", b"", b"app", b"/", b"", [(b"a", b"1\x00")]),
        RequestHead(b"GET", b"", b"app", b"/", b"", [(b"a", b"1\nx: y")]),
        RequestHead(b"GET", b"", b"app", b"/", b"", [(b"a", b"1\x0b")]),
    ],
)
def test_what_http_1_cannot_say(head: RequestHead) -> None:
    with pytest.raises(Http1Error):
        request_bytes(head, chunked=False)


TOKEN = st.text("abcXYZ019!#$%&'*+-.^_`|~", min_size=1, max_size=12).map(str.encode)
VALUE = st.binary(max_size=20)


@given(TOKEN, st.binary(max_size=12), st.lists(st.tuples(TOKEN, VALUE), max_size=4), st.booleans())
def test_an_http_1_server_reads_what_was_meant(
    method: bytes, path: bytes, fields: list[Field], chunked: bool
) -> None:
    """Or nothing was sent: no bytes of a request make two of it."""
    fields = [
        (name.lower(), value.strip(b" \t"))
        for name, value in fields
        if name.lower() not in (b"host", b"transfer-encoding", b"content-length", b"connection", b"expect")
    ]
    head = RequestHead(method, b"", b"app", path, b"", fields)
    try:
        sent = request_bytes(head, chunked=chunked)
    except Http1Error:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    event = server.next_event()
    assert isinstance(event, h11.Request)
    assert (event.method, event.target) == (method, path)
    framing = [(b"transfer-encoding", b"chunked")] if chunked else []
    assert list(event.headers) == [(b"host", b"app"), *fields, *framing]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5))
def test_chunks_that_we_send(pieces: list[bytes]) -> None:
    server = h11.Connection(h11.SERVER)
    server.receive_data(request_bytes(RequestHead(b"PUT", b"", b"app", b"/"), chunked=True))
    server.receive_data(b"".join(map(chunk, pieces)) + last_chunk([(b"x-sum", b"1"), (b"a b", b"no token")]))
    server.next_event()
    body = b""
    while isinstance(event := server.next_event(), h11.Data):
        body += event.data
    assert body == b"".join(pieces)
    assert isinstance(event, h11.EndOfMessage)
    assert list(event.headers) == [(b"x-sum", b"1")]


# Heads of answers.


def head_of(
    fields: bytes, *, method: bytes = b"GET", first: bytes = b"HTTP/1.1 200 OK"
) -> tuple[object, ...]:
    head = read_head(first + b"\r\n" + fields + b"\r\n", method=method)
    return head.length, head.keeps, head.fields


CHUNKED = b"transfer-encoding: chunked\r\n"


OK = b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("first", "method", "fields", "length", "keeps", "told"),
    [
        (OK, b"GET", b"content-length: 5\r\n", 5, True, [b"5"]),
        (OK, b"GET", b"Content-Length:5\r\n", 5, True, [b"5"]),
        (OK, b"GET", b"content-length: 0\r\n", 0, True, [b"0"]),
        (OK, b"GET", b"content-length: 5\r\ncontent-length: 5\r\n", 5, True, [b"5"]),
        (OK, b"GET", b"content-length: 5, 5\r\n", 5, True, [b"5"]),
        (OK, b"GET", b"content-length: 005\r\n", 5, True, [b"5"]),
        (OK, b"GET", CHUNKED, LENGTH_CHUNKED, True, []),
        (OK, b"GET", b"transfer-encoding: Chunked\r\n", LENGTH_CHUNKED, True, []),
        (OK, b"GET", b"content-length: 5\r\n" + CHUNKED, LENGTH_CHUNKED, False, []),
        (OK, b"GET", CHUNKED + b"content-length: 5\r\n", LENGTH_CHUNKED, False, []),
        (OK, b"GET", b"", LENGTH_UNTIL_END, False, []),
        (OK, b"GET", b"connection: close\r\ncontent-length: 5\r\n", 5, False, [b"5"]),
        (OK, b"GET", b"connection: x, CLOSE\r\ncontent-length: 5\r\n", 5, False, [b"5"]),
        (OK, b"GET", b"connection: keep-alive\r\ncontent-length: 5\r\n", 5, True, [b"5"]),
        (OK, b"HEAD", b"content-length: 5\r\n", 0, False, [b"5"]),
        (OK, b"HEAD", b"", 0, False, []),
        (b"HTTP/1.1 304 Not Modified", b"GET", b"content-length: 5\r\n", 0, True, [b"5"]),
        (b"HTTP/1.1 204 No Content", b"GET", b"content-length: 0\r\n", 0, True, []),
        (b"HTTP/1.1 204 No Content", b"GET", b"content-length: 5\r\n", 0, False, []),
        (b"HTTP/1.1 204 No Content", b"GET", CHUNKED, 0, False, []),
        (b"HTTP/1.1 100 Continue", b"GET", b"content-length: 5\r\n", 0, True, []),
        (b"HTTP/1.0 200 OK", b"GET", b"content-length: 5\r\n", 5, False, [b"5"]),
        (b"HTTP/1.0 200 OK", b"GET", CHUNKED, LENGTH_CHUNKED, False, []),
        (b"HTTP/1.1 200", b"GET", b"content-length: 5\r\n", 5, True, [b"5"]),
    ],
)
def test_how_long_a_body_is(
    first: bytes, method: bytes, fields: bytes, length: int, keeps: bool, told: list[bytes]
) -> None:
    found, kept, left = head_of(fields, method=method, first=first)
    assert (found, kept) == (length, keeps)
    assert [value for name, value in left if name == b"content-length"] == told  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: x\r\n",
        b"content-length: \r\n",
        b"content-length: -1\r\n",
        b"content-length: +5\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5, 6\r\n",
        b"content-length: " + b"9" * 20 + b"\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: identity\r\n",
        CHUNKED + CHUNKED,
        b"name : value\r\n",
        b"na me: value\r\n",
        b": value\r\n",
        b"name\r\n",
        b"name: a\x00b\r\n",
        b"name: a\rb\r\n",
        b" folded: at the beginning\r\n",
    ],
)
def test_heads_that_are_refused(fields: bytes) -> None:
    with pytest.raises(Http1Error):
        head_of(fields)


@pytest.mark.parametrize(
    "first", [b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 099 x", b"HTTP/1.1  200 OK", b"HTTP/1.1 200OK"]
)
def test_status_lines_that_are_refused(first: bytes) -> None:
    with pytest.raises(Http1Error):
        head_of(b"", first=first)


def test_lines_may_end_in_lf_and_be_folded() -> None:
    data = b"HTTP/1.1 200 OK\nA: b \n  c\t\nD:\n\n"
    assert end_of_head(data) == len(data)
    assert read_head(data, method=b"GET").fields == [(b"a", b"b c"), (b"d", b"")]


def test_a_head_in_pieces() -> None:
    data = b"HTTP/1.1 200 OK\r\na: b\r\n\r\nbody"
    head = len(data) - len(b"body")
    for size in range(1, head):
        assert end_of_head(data[:size], size - 1) == 0
    assert end_of_head(data[:head], head - 1) == end_of_head(data, head - 1) == head


@pytest.mark.parametrize("data", [b"S", b"HTTP/2", b"\x00\x00", b"http/1.1 200", b"<html>"])
def test_other_words_are_known_at_once(data: bytes) -> None:
    with pytest.raises(Http1Error):
        end_of_head(data)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_has_a_bound(end: bytes) -> None:
    assert end_of_head(b"HTTP/1.1 200 OK\r\na: " + bytes(MAX_HEAD_BYTES - 100)) == 0
    with pytest.raises(Http1Error):
        end_of_head(b"HTTP/1.1 200 OK\r\na: " + bytes(MAX_HEAD_BYTES) + end)


LINE = st.sampled_from(
    [
        b"content-length: 5",
        b"content-length: 6",
        b"Content-Length: 5,5",
        b"transfer-encoding: chunked",
        b"transfer-encoding: gzip",
        b"connection: close",
        b"connection: keep-alive",
        b"x: y",
        b"X-A:",
        b" folded",
        b"bad name: x",
        b"x: a\x00",
        b"nothing",
    ]
)
STATUS = st.sampled_from(
    [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304", b"SSH"]
)
METHOD = st.sampled_from([b"GET", b"HEAD"])


@given(STATUS, METHOD, st.lists(LINE, max_size=4), st.sampled_from([b"\r\n", b"\n"]))
def test_heads_are_read_as_h11_reads_them(
    first: bytes, method: bytes, lines: list[bytes], end: bytes
) -> None:
    data = end.join([first, *lines]) + end + end
    theirs = h11.Connection(h11.CLIENT)
    theirs.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"x")]))
    theirs.send(h11.EndOfMessage())
    theirs.receive_data(data)
    try:
        event = theirs.next_event()
        assert isinstance(event, h11.Response)
    except h11.RemoteProtocolError:
        with pytest.raises(Http1Error):
            end_of_head(data)
            read_head(data, method=method)
        return
    ours = read_head(data, method=method)
    assert ours.status == event.status_code
    without_lengths = [item for item in event.headers if item[0] != b"content-length"]
    assert [item for item in ours.fields if item[0] != b"content-length"] == without_lengths
    if ours.keeps:
        assert theirs.states[h11.SERVER] is not h11.MUST_CLOSE
        if ours.length == 0:
            assert isinstance(theirs.next_event(), h11.EndOfMessage)
            theirs.start_next_cycle()
    if ours.length > 0:
        theirs.receive_data(bytes(ours.length))
        body = theirs.next_event()
        assert isinstance(body, h11.Data)
        assert len(body.data) == ours.length
        assert isinstance(theirs.next_event(), h11.EndOfMessage)


# Chunks of answers.


def chunks_in(*reads: bytes) -> tuple[bytes, bool, bytes, list[Field]]:
    chunks = Chunks()
    body, rest = b"", b""
    for data in reads:
        pieces, left = chunks.take(memoryview(data))
        body += b"".join(pieces)
        rest += bytes(left)
    return body, chunks.ended, rest, chunks.trailers


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"0\r\n\r\n", (b"", True, b"", [])),
        (b"5\r\nhello\r\n0\r\n\r\n", (b"hello", True, b"", [])),
        (b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", (b"hello world", True, b"", [])),
        (b"5;name=value\r\nhello\r\n0;x\r\n\r\n", (b"hello", True, b"", [])),
        (b"00005 \r\nhello\r\n000\r\n\r\n", (b"hello", True, b"", [])),
        (b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", (b"0123456789" * 2, True, b"", [])),
        (b"0\r\n\r\nrest", (b"", True, b"rest", [])),
        (b"0\r\nX-Sum: 1\r\nB: 2\r\n\r\nrest", (b"", True, b"rest", [(b"x-sum", b"1"), (b"b", b"2")])),
        (b"5\r\nhel", (b"hel", False, b"", [])),
        (b"0\r\nx", (b"", False, b"", [])),
        (b"", (b"", False, b"", [])),
    ],
)
def test_chunks(data: bytes, told: tuple[bytes, bool, bytes, list[Field]]) -> None:
    assert chunks_in(data) == told
    assert chunks_in(*(data[at : at + 1] for at in range(len(data)))) == told


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"0x5\r\n",
        b"5\n",
        b"5\r5\r\n",
        b"5\r\r\n",
        b"5;a\rb\r\n",
        b"11111111111111111\r\n",
        b"1;" + bytes(5000),
        b"5\r\nhellox",
        b"5\r\nhello\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhello\r0",
        b"0\r\nx y: z\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nx: " + b"y" * MAX_HEAD_BYTES,
    ],
)
def test_chunks_that_are_refused(data: bytes) -> None:
    with pytest.raises(Http1Error):
        chunks_in(data)
    with pytest.raises(Http1Error):
        chunks_in(*(data[at : at + 1] for at in range(len(data))))


@given(
    st.lists(st.binary(min_size=1, max_size=30), max_size=4),
    st.binary(max_size=8),
    st.integers(0, 200),
    st.integers(1, 20),
)
def test_chunks_are_read_as_h11_reads_them(pieces: list[bytes], noise: bytes, at: int, size: int) -> None:
    """Chunks with a few bytes of something else in them, in reads of any size."""
    data = b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    at = min(at, len(data))
    data = data[:at] + noise + data[at + len(noise) :]
    theirs = h11.Connection(h11.CLIENT)
    theirs.send(h11.Request(method=b"GET", target=b"/", headers=[(b"host", b"x")]))
    theirs.send(h11.EndOfMessage())
    theirs.receive_data(b"HTTP/1.1 200 OK\r\n" + CHUNKED + b"\r\n")
    theirs.next_event()
    theirs.receive_data(data)
    expected, ended = b"", False
    try:
        while isinstance(event := theirs.next_event(), h11.Data):
            expected += event.data
        ended = isinstance(event, h11.EndOfMessage)
    except h11.RemoteProtocolError:
        with pytest.raises(Http1Error):
            chunks_in(*(data[begin : begin + size] for begin in range(0, len(data), size)))
        return
    try:
        body, did_end, _, _ = chunks_in(*(data[begin : begin + size] for begin in range(0, len(data), size)))
    except Http1Error:
        assert not ended, "what h11 has yet to see the end of"
        return
    assert (body, did_end) == (expected, ended)
