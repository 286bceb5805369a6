"""nghttpd and Envoy as judges of a request's pseudo-header fields: what both refuse is refused, what both
take is taken, but for what stands in KNOWN."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from shared.http2.header_rules import Shape, examine
from tests.path.programs import envoy, start
from tests.shared.http2.dialogue import (
    FRAME_HEADER_BYTES,
    PREFACE,
    headers,
    settings,
)
from tests.support.envoy_config import Json, bootstrap, http_chain
from tests.support.world import PATIENCE_S, find_program, free_port, said

Fields = list[tuple[bytes, bytes]]

NAMES = (b":method", b":scheme", b":authority", b":path")


def asked(method: bytes, scheme: bytes, authority: bytes | None, path: bytes, *hosts: bytes) -> Fields:
    """A request's fields; None leaves the authority out."""
    values = zip(NAMES, (method, scheme, authority, path), strict=True)
    return [(n, v) for n, v in values if v is not None] + [(b"host", host) for host in hosts]


CASES: dict[str, Fields] = {
    **{
        f"method {v!r}": asked(v, b"http", b"a", b"/")
        for v in (b"get", b"G3T!", b"", b"G T", b"G/", b"G\x01")
    },
    **{f"scheme {v!r}": asked(b"GET", v, b"a", b"/") for v in (b"HTTP", b"ftp", b"", b"1x", b"a:b", b"h p")},
    **{
        f"path {v!r}": asked(b"GET", b"http", b"a", v)
        for v in (b"/", b"", b"x", b"*", b"/a b", b"/\t", b"/\x01", b"/\x7f", b"/#b", b"/\xc3\xa9", b'/"<>')
    },
    **{
        f"authority {v!r}": asked(b"GET", b"http", v, b"/")
        for v in (
            *(b"a:80", b"a:", b"a:x", b"", b"u@a", b"a b", b"a/x", b"a?x", b"a#x", b"a\\x", b"a_b", b"%41"),
            *(
                b"[::1]:80",
                b"::1",
                b"[::1",
                b"[zz]",
                b"a,b",
                b"a!$&'()*+;=b",
                b'a"b',
                b"{a}",
                b"a|b",
                b"a\x01",
            ),
        )
    },
    **{
        f"host {v!r}": asked(b"GET", b"http", b"a", b"/", v)
        for v in (b"a", b"A", b"a:80", b"a:81", b"b", b"")
    },
    "host twice": asked(b"GET", b"http", b"a", b"/", b"a", b"a"),
    "host in place of the authority": asked(b"GET", b"http", None, b"/", b"a"),
    "neither": asked(b"GET", b"http", None, b"/"),
    "OPTIONS *": asked(b"OPTIONS", b"http", b"a", b"*"),
}

KNOWN = {
    # A fragment is not sent (RFC 9110 section 7.1): Envoy answers 400, nghttpd takes it.
    "path b'/#b'",
    # Userinfo must not be sent (RFC 9113 section 8.3.1): Envoy refuses it, nghttpd takes it.
    "authority b'u@a'",
    # Neither looks at more than characters. RFC 3986 section 3.2 has digits as a port, and IPv6 in brackets.
    "authority b'a:x'",
    "authority b'::1'",
    "authority b'[::1'",
    "authority b'[zz]'",
    # Neither compares the two; RFC 9113 section 8.3.1 says that one should.
    "host b'a:81'",
    "host b'b'",
}
"""What we refuse, and at least one of them takes."""


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The ports of nghttpd and Envoy."""
    folder = tmp_path_factory.mktemp("judges")
    (folder / "index.html").write_text("here")
    port = free_port()
    program = find_program("nghttpd")
    with envoy("judge", _configuration(), folder) as address:
        nghttpd = start("nghttpd", [program, "--no-tls", "-v", "-d", folder, str(port)], folder)
        try:
            nghttpd.wait_for(lambda record: said(record).startswith("IPv4: listen"), PATIENCE_S)
            yield port, address.port
        finally:
            nghttpd.stop()


def _configuration() -> Json:
    return bootstrap(
        http_chain(
            "judge",
            [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}],
            codec_type="HTTP2",
            delayed_close_timeout="0.01s",  # it says nothing, and closes
        )
    )


def takes(port: int, fields: Fields) -> bool:
    """Whether a server answers such a request, be it with 404; not with 400, a reset or an end."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(PREFACE + settings() + headers(1, fields, end=True))
        wire = b""
        while data := sock.recv(1 << 16):
            wire += data
            verdict = _verdict(wire)
            if verdict is not None:
                return verdict
    return False


def _verdict(wire: bytes) -> bool | None:
    while len(wire) >= FRAME_HEADER_BYTES:
        frame, size = Frame.parse_frame_header(memoryview(wire[:FRAME_HEADER_BYTES]))
        body, wire = wire[FRAME_HEADER_BYTES:][:size], wire[FRAME_HEADER_BYTES + size :]
        if len(body) < size:
            return None
        match frame:
            case HeadersFrame():
                return not body.startswith(b"\x8c")  # 400 in HPACK's static table
            case RstStreamFrame() | GoAwayFrame():
                return False
            case DataFrame():
                return True
    return None


@pytest.mark.parametrize("name", CASES)
def test_the_same_verdict_as_nghttpd_and_envoy(judges: tuple[int, int], name: str) -> None:
    fields = CASES[name]
    by_others = {takes(port, fields) for port in judges}
    ours = examine(fields).shape is Shape.REQUEST
    if name in KNOWN:
        assert not ours and True in by_others, "no longer a difference, or one that nobody knew"
    else:
        assert by_others == {ours}
