"""Connections that cannot be made, and what the errors say; TLS and ALPN against real servers."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import DialError, UnavailableError
from shared.net.dial import Origin, dial, dial_http2, dial_protocol, dial_socket, reason
from shared.net.http2.connection import Connection
from shared.net.legs.tcp import TcpLeg
from shared.net.names.dns_query import ResolveError
from shared.net.names.endpoint import Endpoint
from shared.net.tls.contexts import ALPN_H2, server_context
from tests.shared.conftest import Credentials
from tests.shared.http2.dialogue import POST
from tests.shared.net.hasty_loop import hasty
from tests.shared.net.in_memory import joined
from tests.shared.net.loopback import PATIENCE_S, App, connected, dialled, not_connected, until
from tests.support.http2_peer import Service
from tests.support.metadata_server import closed_port, listening
from tests.support.network import needs_ipv6

NO_SUCH_HOST = "no-such-host.invalid"
"""RFC 6761 section 6.4: never resolves."""


async def over(leg: TcpLeg) -> None:
    leg.abort()
    await until(lambda: leg._transport.is_closing())
    await asyncio.sleep(0)


async def refused(address: Address, timeout_s: float = PATIENCE_S) -> str:
    """Why `address` cannot be dialled."""
    with pytest.raises(DialError) as caught:
        await dial(address, timeout_s)
    return str(caught.value)


# TCP.


async def test_a_name() -> None:
    app = App()
    leg = await dial(Address("localhost", app.port), PATIENCE_S)
    assert leg.peer_name == f"127.0.0.1:{app.port}"
    await over(leg)
    await app.close()


async def test_a_bare_socket() -> None:
    app = App()
    with await dial_socket(Address("localhost", app.port), PATIENCE_S) as sock:
        assert not sock.getblocking()
        assert sock.getpeername() == ("127.0.0.1", app.port)
    await app.close()


async def test_no_bare_socket(full_port: int) -> None:
    port = closed_port()
    with pytest.raises(DialError) as caught:
        await dial_socket(Address("localhost", port), PATIENCE_S)
    assert str(caught.value) == f"connect to localhost:{port}: connection refused"
    with pytest.raises(DialError) as caught:
        await dial_socket(Address("127.0.0.1", full_port), 0.2)
    assert str(caught.value) == f"connect to 127.0.0.1:{full_port}: no answer within 0.2 s"


async def test_dial() -> None:
    async with dialled() as (leg, peer):
        host, port = peer.sock.getsockname()
        assert leg.peer_name == f"{host}:{port}"
        sock = leg._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "small writes are not held back"
        await peer.send(b"220 ready")
        seen = joined(leg)
        await until(lambda: seen.story == [b"220 ready"])


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_to_loopback_the_connection_is_there_at_once(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        leg = await dial(Address(host, server.getsockname()[1]), timeout_s=0)  # no time is needed
        await over(leg)


async def test_nobody_listens() -> None:
    port = closed_port()
    with pytest.raises(DialError) as caught:
        await dial(Address("127.0.0.1", port), PATIENCE_S)
    assert str(caught.value) == f"connect to 127.0.0.1:{port}: connection refused"
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_no_such_host() -> None:
    text = await refused(Address(NO_SUCH_HOST, 80))
    assert text == f"connect to {NO_SUCH_HOST}:80: no such name: none that ends in .invalid exists"


@hasty
async def test_no_answer(full_port: int) -> None:
    """Though loopback, it has its time."""
    address = Address("127.0.0.1", full_port)
    assert await refused(address, 2.5) == f"connect to {address}: no answer within 2.5 s"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "connection refused"),
        (ConnectionResetError(104, "Connection reset by peer"), "connection reset"),
        (OSError(113, "No route to host"), "No route to host"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (
            OSError("Multiple exceptions: [Errno 111] a, [Errno 113] b"),
            "Multiple exceptions: [Errno 111] a, [Errno 113] b",
        ),
        (OSError(), "OSError"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"), "TLS failed: "),
        (ssl.SSLError(), "TLS failed: "),
        (ssl.SSLCertVerificationError("name does not fit"), "certificate refused: "),
    ],
)
def test_reason(error: OSError, text: str) -> None:
    assert reason(error).startswith(text)
    assert "127.0.0.1" not in reason(error)


# HTTP/2.


async def test_h2c() -> None:
    async with Service.listening() as service:
        address = Address("127.0.0.1", service.port)
        async with connected(Origin("http", "service", address)) as connection:
            stream = connection.open(POST)
            (await service.request()).respond(200)
            assert await stream.response(PATIENCE_S) == 200
            assert connection.peer_name == str(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_tls(credentials: Credentials, host: str) -> None:
    context = server_context(credentials.certificate, credentials.key)
    async with Service.listening(context) as service:
        origin = Origin("https", host, Address("127.0.0.1", service.port), credentials.ca)
        async with connected(origin) as connection:
            assert connection._transport is not None
            tls = connection._transport.get_extra_info("ssl_object")
            assert (tls.selected_alpn_protocol(), tls.version()) == (ALPN_H2, "TLSv1.3")
            stream = connection.open(POST)
            (await service.request()).respond(204)
            assert await stream.response(PATIENCE_S) == 204


async def test_a_certificate_of_somebody_else(credentials: Credentials) -> None:
    context = server_context(credentials.certificate, credentials.key)
    async with Service.listening(context) as service:
        address = Address("127.0.0.1", service.port)
        for ca in (credentials.other_ca, None):
            text = await not_connected(Origin("https", "localhost", address, ca))
            assert re.fullmatch("certificate refused: .*certificate.*", text), text
        text = await not_connected(Origin("https", "hello.a.run.app", address, credentials.ca))
        assert text.startswith("certificate refused: Hostname")


async def test_a_server_without_http2(credentials: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate, credentials.key)
    async with Service.listening(context) as service:
        address = Address("127.0.0.1", service.port)
        text = await not_connected(Origin("https", "localhost", address, credentials.ca))
        assert text == "the server does not offer HTTP/2 (ALPN h2)"
        await until(lambda: all(peer.lost for peer in service.connections))


async def test_a_server_without_tls(credentials: Credentials) -> None:
    async def not_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()

    async with listening(not_tls) as port:
        origin = Origin("https", "localhost", Address("127.0.0.1", port), credentials.ca)
        assert (await not_connected(origin)).startswith("TLS failed: ")


async def test_a_server_that_hangs_up_in_the_handshake(credentials: Credentials) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with listening(hang_up) as port:
        origin = Origin("https", "localhost", Address("127.0.0.1", port), credentials.ca)
        assert await not_connected(origin)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nobody_listens_for_http2(credentials: Credentials, scheme: str) -> None:
    origin = Origin(scheme, "localhost", Address("127.0.0.1", closed_port()), credentials.ca)
    assert await not_connected(origin) == "connection refused"


@hasty
async def test_a_handshake_that_hangs(credentials: Credentials) -> None:
    app = App()
    origin = Origin("https", "localhost", Address("127.0.0.1", app.port), credentials.ca)
    assert await not_connected(origin, 3) == "not connected within 3 s"
    await app.close()


async def test_a_ca_file_that_is_not_there(tmp_path: Path) -> None:
    origin = Origin("https", "localhost", Address("127.0.0.1", closed_port()), tmp_path / "none.pem")
    with pytest.raises(UnavailableError, match=f"^trusted certificates: {tmp_path}/none.pem: No such file"):
        await dial_http2(origin, PATIENCE_S, lambda: Connection(client=True))


def test_equal_origins_share() -> None:
    one = Origin("https", "h", Address("a", 1), Path("ca.pem"))
    assert len({one, Origin("https", "h", Address("a", 1), Path("ca.pem"))}) == 1
    for other in (
        Origin("http", "h", Address("a", 1), Path("ca.pem")),
        Origin("https", "i", Address("a", 1), Path("ca.pem")),
        Origin("https", "h", Address("a", 2), Path("ca.pem")),
        Origin("https", "h", Address("a", 1), None),
    ):
        assert other != one


async def test_a_protocol_of_one_s_own() -> None:
    class Noting(asyncio.Protocol):
        def __init__(self, sock: socket.socket | None) -> None:
            self.sock = sock
            self.over = asyncio.Event()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def connection_lost(self, exc: Exception | None) -> None:
            self.over.set()

    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            protocol = await dial_protocol(Address(host, port), PATIENCE_S, Noting)
            assert protocol.sock is not None
            assert protocol.transport.get_extra_info("peername")[1] == port
            protocol.transport.abort()  # type: ignore[attr-defined]
            await asyncio.wait_for(protocol.over.wait(), PATIENCE_S)
    with pytest.raises(DialError, match="connection refused"):
        await dial_protocol(Address("127.0.0.1", closed_port()), PATIENCE_S, Noting)


def test_an_origin_s_name_is_absolute_unless_an_operator_has_written_where_to_dial() -> None:
    address = Address("ztunnel.demo", 15008)
    assert Origin("https", "x", address).to_look_up == Address("ztunnel.demo.", 15008)
    assert Origin("https", "x", address, searched=True).to_look_up == address
    assert Origin("https", "x", address) != Origin("https", "x", address, searched=True)


async def test_a_name_is_looked_up_as_the_origin_says() -> None:
    asked: list[Address] = []

    async def look_up(address: Address) -> list[Endpoint]:
        asked.append(address)
        raise ResolveError("no_name", "no such name")

    for searched in (False, True):
        with pytest.raises(DialError, match=r"connect to http://x at db\.prod:80: no such name"):
            origin = Origin("http", "x", Address("db.prod", 80), searched=searched)
            await dial_http2(origin, PATIENCE_S, lambda: Connection(client=True), look_up)
    assert [address.host for address in asked] == ["db.prod.", "db.prod"]
