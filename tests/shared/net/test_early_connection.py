"""A connection that is there before what speaks HTTP/2 on it."""

from __future__ import annotations

import math

from shared.address import Address
from shared.net.dial import Origin, dial_http2
from shared.net.early_connection import EarlyConnection
from shared.net.http2.connection import Connection
from shared.net.legs.read_buffer import READ_BYTES
from shared.net.tls.contexts import server_context
from tests.shared.conftest import Credentials
from tests.shared.http2.dialogue import POST
from tests.shared.net.loopback import PATIENCE_S, App, until
from tests.support.http2_peer import Service


def to(port: int, credentials: Credentials | None = None) -> Origin:
    scheme, ca = ("http", None) if credentials is None else ("https", credentials.ca)
    return Origin(scheme, "localhost", Address("127.0.0.1", port), ca)


async def test_what_the_server_says_first_is_kept(credentials: Credentials) -> None:
    """The stand-in for a service sends its SETTINGS at once."""
    context = server_context(credentials.certificate, credentials.key)
    async with Service.listening(context) as service:
        early = await dial_http2(to(service.port, credentials), PATIENCE_S, EarlyConnection)
        await until(lambda: bool(early._early))
        connection = early.hand_over(Connection(client=True))
        assert connection.speaks_http2, "it has the SETTINGS"
        assert math.isfinite(connection.certificate_ends)
        connection.open(POST)
        stream = await service.request()
        stream.respond(200, end=True)
        connection.close()


async def test_it_holds_little_of_a_server_that_says_much() -> None:
    app = App()
    early = await dial_http2(to(app.port), PATIENCE_S, EarlyConnection)
    server = await app.accept()
    server.send_soon(bytes(8 << 20))
    assert early._transport is not None
    await until(lambda: len(early._early) >= READ_BYTES)
    assert not early._transport.is_reading()
    assert len(early._early) < 2 * READ_BYTES
    connection = early.hand_over(Connection(client=True))
    assert connection.lost, "zeros are no HTTP/2"
    await app.close()


async def test_a_server_that_ends_it_at_once() -> None:
    app = App()
    early = await dial_http2(to(app.port), PATIENCE_S, EarlyConnection)
    await (await app.accept()).rst()
    await until(lambda: early.lost)
    await app.close()


async def test_nobody_needs_it_any_more() -> None:
    app = App()
    early = await dial_http2(to(app.port), PATIENCE_S, EarlyConnection)
    server = await app.accept()
    early.abort("enough")
    assert await server.ended()
    await app.close()
