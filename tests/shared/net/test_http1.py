"""One request: to a server that answers as told, breaks off, talks nonsense, never ends or is not there."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.credentials.certificates.authority import Authority
from shared.errors import DialError, UpstreamError
from shared.net.http1 import (
    Response,
    Target,
    get,
    request,
)
from shared.net.tls import contexts
from tests.support import odd_chains
from tests.support.http1_server import server_tls
from tests.support.metadata_server import PATIENCE_S, closed_port, listening
from tests.support.system_trust import system_trusts

SECRET = "eyJhbGciOiJSUzI1NiJ9.eyJzZWNyZXQiOjF9.c2lnbmF0dXJl"


class Seen:
    """What the server got to see, and where it listens."""

    request = b""
    port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/a/b?c=d%2Fe"


@asynccontextmanager
async def server(
    answer: bytes, *, hang: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Seen]:
    """Reads one request, sends `answer` as it is and closes, or with `hang` waits until the block ends."""
    seen = Seen()
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(PATIENCE_S):
            seen.request = await reader.readuntil(b"\r\n\r\n")
            _, said, rest = seen.request.partition(b"content-length: ")
            seen.request += await reader.readexactly(int(rest.partition(b"\r\n")[0]) if said else 0)
        writer.write(answer)
        if hang:
            await over.wait()

    async with listening(handle, tls=tls) as seen.port:
        try:
            yield seen
        finally:
            over.set()


async def fetch(url: str, *, timeout_s: float = PATIENCE_S, max_bytes: int = 1000) -> Response:
    return await get(url, headers={"Metadata-Flavor": "Google"}, timeout_s=timeout_s, max_bytes=max_bytes)


# Answers.


async def test_a_post_has_its_body_and_says_how_long_it_is() -> None:
    async with server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as seen:
        response = await request(
            "POST",
            seen.url,
            headers={"content-type": "application/json"},
            body=b'{"audience":"A"}',
            timeout_s=PATIENCE_S,
            max_bytes=1000,
        )
    assert response.body == b"{}"
    head, _, body = seen.request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a/b?c=d%2Fe HTTP/1.1\r\n")
    assert b"content-length: 16" in head
    assert body == b'{"audience":"A"}'


async def test_request_and_answer() -> None:
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello") as far:
        response = await fetch(far.url)
    assert (response.status, response.body) == (200, b"hello")
    assert response.headers == {"content-length": "5", "x-a": "1, 2"}
    assert far.request.decode() == (
        "GET /a/b?c=d%2Fe HTTP/1.1\r\n"
        f"host: 127.0.0.1:{far.port}\r\n"
        "connection: close\r\n"
        "Metadata-Flavor: Google\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno", 404, b"no"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 301 Moved\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", 301, b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 1000, 200, b"x" * 1000),
    ],
)
async def test_shapes_of_an_answer(answer: bytes, status: int, body: bytes) -> None:
    async with server(answer) as far:
        response = await fetch(far.url)
    assert (response.status, response.body) == (status, body)


async def test_an_answer_is_complete_before_the_connection_ends() -> None:
    async with server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", hang=True) as far:
        assert (await fetch(far.url)).body == b"ok"


async def test_https_with_a_trust_of_its_own(tmp_path: Path) -> None:
    authority = Authority.create("demo.local")
    authority.write(tmp_path, authority.issue(ip_addresses=["127.0.0.1"]))
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(tmp_path / "certificates.pem", tmp_path / "private_key.pem")
    trusting = ssl.create_default_context(cadata=authority.root_pem.decode())
    async with server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", tls=serving) as far:
        url = f"https://127.0.0.1:{far.port}/"
        response = await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=10, tls=trusting)
        assert response.body == b"ok"
        with pytest.raises(DialError, match="certificate refused: unable to get local issuer certificate"):
            await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=10)


@pytest.mark.parametrize("name", ["by the book", "no key identifiers", "issuing authority"])
async def test_https_with_the_system_s_trust(tmp_path: Path, name: str) -> None:
    """An authority that a company has put into its machines' store, as its tools made it long ago."""
    chain = odd_chains.all_chains()[name]
    chain.write(tmp_path / "chain")
    serving = contexts.server_context(tmp_path / "chain" / "shown.pem", tmp_path / "chain" / "key.pem")
    serving.set_alpn_protocols(["h2", "http/1.1"])
    async with server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", tls=serving) as far:
        url = f"https://localhost:{far.port}/"
        with system_trusts(tmp_path / "chain" / "trusted.pem"):
            response = await get(url, headers={}, timeout_s=PATIENCE_S, max_bytes=10)
    assert response.body == b"ok"


async def test_a_large_answer_whose_server_closes_at_once() -> None:
    """uvloop drops what it holds back when the end comes: 18 of 20 answers of a kube-apiserver were cut."""
    authority = Authority.create("google.example")
    tls = server_tls(authority.issue(ip_addresses=["127.0.0.1"]))
    body = bytes(1_400_000)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener.accept()[0] as accepted, tls.wrap_socket(accepted, server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(answer)

    with listener:
        serving = threading.Thread(target=serve)
        serving.start()
        response = await get(
            f"https://127.0.0.1:{listener.getsockname()[1]}/",
            headers={},
            timeout_s=PATIENCE_S,
            max_bytes=len(body),
            tls=ssl.create_default_context(cadata=authority.root_pem.decode()),
        )
        serving.join()
    assert response.body == body


async def test_a_socket_in_a_folder(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /path HTTP/1.1\r\nhost: name\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    path = tmp_path / "socket"
    with pytest.raises(DialError, match=f"cannot connect to {path}: No such file or directory"):
        await get("http://name/path", headers={}, timeout_s=PATIENCE_S, max_bytes=10, unix=path)
    async with await asyncio.start_unix_server(answer, path):
        got = await get("http://name/path", headers={}, timeout_s=PATIENCE_S, max_bytes=10, unix=path)
    assert got.body == b"ok"


# Failures.


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort " + SECRET.encode(),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + SECRET.encode() + b"\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"\x16\x03\x03\x00\x02\x02\x28",
        SECRET.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\na",
    ],
)
async def test_broken_answers_name_the_server_and_quote_nothing(answer: bytes) -> None:
    async with server(answer) as far:
        with pytest.raises(UpstreamError) as caught:
            await fetch(far.url)
    assert f"127.0.0.1:{far.port}" in str(caught.value)
    assert SECRET not in str(caught.getrepr())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 500_000,
    ],
)
async def test_a_body_has_a_bound(answer: bytes) -> None:
    async with server(answer, hang=True) as far:
        with pytest.raises(UpstreamError, match=f"127.0.0.1:{far.port} is longer than 1000 bytes"):
            await fetch(far.url)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_the_whole_exchange_has_a_deadline(answer: bytes) -> None:
    async with server(answer, hang=True) as far:
        with pytest.raises(
            UpstreamError, match=rf"no complete answer from 127.0.0.1:{far.port} within 0.05 s"
        ):
            await fetch(far.url, timeout_s=0.05)


async def test_a_deadline_that_is_over_before_the_connection_stands() -> None:
    port = closed_port()
    with pytest.raises(DialError, match=f"cannot connect to 127.0.0.1:{port}: no connection within 0 s"):
        await fetch(f"http://127.0.0.1:{port}/", timeout_s=0)


async def test_nobody_listens() -> None:
    port = closed_port()
    with pytest.raises(DialError, match=f"cannot connect to 127.0.0.1:{port}: "):
        await fetch(f"http://127.0.0.1:{port}/")


async def test_a_host_that_no_lookup_takes() -> None:
    with pytest.raises(DialError, match=r"cannot connect to a{64}\.local:80"):
        await fetch(f"http://{'a' * 64}.local/")


@pytest.mark.parametrize(
    ("headers", "path"),
    [({"x": f"{SECRET}\r\ninjected: 1"}, "/"), ({"bad name": SECRET}, "/"), ({"x": SECRET + "\x00"}, "/")],
)
async def test_headers_that_cannot_be_sent_are_not_quoted(headers: dict[str, str], path: str) -> None:
    with pytest.raises(ValueError, match="malformed header") as caught:
        await get(f"http://127.0.0.1:1{path}", headers=headers, timeout_s=1, max_bytes=1)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


# URLs.


@pytest.mark.parametrize(
    ("url", "shown", "authority", "target"),
    [
        (
            "http://metadata.google.internal/x?y=z",
            "metadata.google.internal:80",
            "metadata.google.internal",
            "/x?y=z",
        ),
        ("https://Example.COM", "example.com:443", "Example.COM", "/"),
        ("http://[::1]:8080/x", "[::1]:8080", "[::1]:8080", "/x"),
        ("http://127.0.0.1:1/#part", "127.0.0.1:1", "127.0.0.1:1", "/"),
    ],
)
def test_where_a_url_leads(url: str, shown: str, authority: str, target: str) -> None:
    parsed = Target.parse(url)
    assert (str(parsed), parsed.authority, parsed.request_target) == (shown, authority, target)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://host/",
        "http://",
        "http:///x",
        "http://me:pw@host/",
        "http://host:0/",
        "http://host:65536/",
        "http://host:x/",
        "http://[::1/",
        "http://host/a b",
        "http://host/a\r\nb",
        "http://hóst/",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError):
        Target.parse(url)


def test_bodies_stay_out_of_repr() -> None:
    assert SECRET not in repr(Response(200, {}, SECRET.encode()))


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b"[1]", b"1" * 5000, b"[" * 100_000])
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    assert Response(200, {}, body).json_object() is None


def test_a_json_object() -> None:
    assert Response(200, {}, b' {"a": [1]} ').json_object() == {"a": [1]}
