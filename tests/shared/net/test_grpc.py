"""One gRPC call: to a server by others, and to peers that break off, say nothing, or are something else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest

from shared.address import Address
from shared.errors import DialError, UpstreamError
from shared.http2 import frames
from shared.http2.grpc_message import framed
from shared.net.grpc import Reply, call
from shared.net.tls.contexts import client_context, server_context
from shared.tasks import spawn
from tests.shared.conftest import Credentials
from tests.support.http2_peer import PeerStream, Service
from tests.support.metadata_server import PATIENCE_S, closed_port, listening

GRPC = [(b"content-type", b"application/grpc")]
GOOD = [(b"grpc-status", b"0")]

Handler = Callable[[bytes, grpc.ServicerContext], bytes]


@contextmanager
def grpc_server(credentials: Credentials, handler: Handler) -> Iterator[Address]:
    """A real one, by grpcio, with one method, `/test.Echo/Call`."""
    server = grpc.server(ThreadPoolExecutor(2))
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Echo", {"Call": method})])
    pair = (credentials.key.read_bytes(), credentials.certificate.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        server.stop(grace=0).wait(PATIENCE_S)


@asynccontextmanager
async def scripted(credentials: Credentials) -> AsyncIterator[Service]:
    """HTTP/2 over TLS, answered by the test."""
    async with Service.listening(server_context(credentials.certificate, credentials.key)) as service:
        yield service


async def ask(
    credentials: Credentials,
    port: int,
    *,
    path: str = "/test.Echo/Call",
    message: bytes = b"hello",
    metadata: dict[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
    max_bytes: int = 100_000,
    tls: ssl.SSLContext | None = None,
    server_name: str = "localhost",
) -> Reply:
    return await call(
        Address("127.0.0.1", port),
        path,
        message,
        tls=tls or client_context(credentials.ca, 0.0),
        server_name=server_name,
        metadata=metadata or {},
        timeout_s=timeout_s,
        max_bytes=max_bytes,
    )


# A server by others.


async def test_a_message_and_its_answer(credentials: Credentials) -> None:
    def echo(message: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata())
        return message + str(metadata["who"]).encode() + bytes(context.time_remaining() > 5)

    with grpc_server(credentials, echo) as address:
        reply = await ask(credentials, address.port, message=b"x" * 90_000, metadata={"who": "me"})
    assert reply == Reply("OK", "", b"x" * 90_000 + b"me" + bytes(1))


async def test_a_refusal_and_what_it_says(credentials: Credentials) -> None:
    def refuse(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not für you:\n100 %")
        raise AssertionError("abort raises")

    with grpc_server(credentials, refuse) as address:
        reply = await ask(credentials, address.port)
        unknown = await ask(credentials, address.port, path="/test.Echo/Nothing")
    assert reply == Reply("PERMISSION_DENIED", "not für you:\n100 %", b"")
    assert unknown.code == "UNIMPLEMENTED"


def test_an_answer_is_not_shown() -> None:
    assert "secret" not in repr(Reply("OK", "", b"secret"))


# Peers that do as the test says.


async def answered(
    credentials: Credentials,
    play: Callable[[PeerStream], object],
    *,
    timeout_s: float = PATIENCE_S,
    max_bytes: int = 100_000,
) -> Reply:
    """What comes of a call that is answered by `play`."""
    async with scripted(credentials) as service:

        async def serve() -> None:
            stream = await service.request()
            assert await stream.rest() == framed(b"hello")
            play(stream)

        serving = spawn(serve(), name="the far side")
        try:
            return await ask(credentials, service.port, timeout_s=timeout_s, max_bytes=max_bytes)
        finally:
            await serving


def say(stream: PeerStream, body: bytes, trailers: list[tuple[bytes, bytes]]) -> None:
    stream.respond(200, GRPC)
    stream.peer.act(lambda h2: h2.send_data(stream.number, body))
    stream.end(trailers)


async def test_the_connection_is_closed_after_the_call(credentials: Credentials) -> None:
    async with scripted(credentials) as service:
        answer = spawn(ask(credentials, service.port), name="call")
        stream = await service.request()
        say(stream, framed(b"done"), GOOD)
        assert (await answer).message == b"done"
        await stream.peer.until(lambda: stream.peer.lost)


async def test_a_server_that_says_goaway_with_the_answer(credentials: Credentials) -> None:
    def play(stream: PeerStream) -> None:
        say(stream, framed(b"done"), GOOD)
        stream.peer.say_goaway(stream.number)

    assert (await answered(credentials, play)).message == b"done"


async def test_answers_that_are_none(credentials: Credentials) -> None:
    for body, complaint in (
        (b"", "there is no message"),
        (framed(b"one")[:-1], "not one whole message"),
        (framed(b"one") * 2, "not one whole message"),
        (b"\1" + framed(b"one")[1:], "compressed"),
    ):
        with pytest.raises(UpstreamError, match=rf"broken answer from 127\.0\.0\.1:\d+: .*{complaint}"):
            await answered(credentials, lambda stream, body=body: say(stream, body, GOOD))  # type: ignore[misc]  # lambda's default


async def test_a_web_page(credentials: Credentials) -> None:
    def play(stream: PeerStream) -> None:
        stream.respond(200, [(b"content-type", b"text/html")])
        stream.peer.act(lambda h2: h2.send_data(stream.number, b"<html>", end_stream=True))

    assert await answered(credentials, play) == Reply("UNKNOWN", "not the answer of a gRPC server", b"")


async def test_an_answer_that_is_too_long(credentials: Credentials) -> None:
    assert (await answered(credentials, lambda s: say(s, framed(bytes(50)), GOOD), max_bytes=50)).code == "OK"
    with pytest.raises(UpstreamError, match=r"answer from 127\.0\.0\.1:\d+ is longer than 49 bytes"):
        await answered(credentials, lambda s: say(s, framed(bytes(50)), GOOD), max_bytes=49)


async def test_it_breaks_off(credentials: Credentials) -> None:
    with pytest.raises(UpstreamError, match=r"call of 127\.0\.0\.1:\d+ failed: .*REFUSED_STREAM"):
        await answered(credentials, lambda stream: stream.reset(frames.REFUSED_STREAM))
    with pytest.raises(UpstreamError, match=r"call of 127\.0\.0\.1:\d+ failed: "):
        await answered(credentials, lambda stream: stream.peer.drop())


async def test_it_never_answers(credentials: Credentials) -> None:
    with pytest.raises(UpstreamError, match=r"no complete answer from 127\.0\.0\.1:\d+ within 0\.3 s"):
        await answered(credentials, lambda stream: stream.respond(200, GRPC), timeout_s=0.3)


async def test_a_call_that_is_given_up_leaves_nothing(credentials: Credentials) -> None:
    async with scripted(credentials) as service:
        answer = spawn(ask(credentials, service.port), name="call")
        stream = await service.request()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await stream.peer.until(lambda: stream.peer.lost)


# No connection.


async def test_nobody_listens(credentials: Credentials) -> None:
    with pytest.raises(DialError, match=r"connect to 127\.0\.0\.1:\d+: connection refused"):
        await ask(credentials, closed_port())


async def test_a_server_of_another_authority(credentials: Credentials) -> None:
    async with scripted(credentials) as service:
        other = ssl.create_default_context(cafile=str(credentials.other_ca))
        address = Address("127.0.0.1", service.port)
        for tls, name, complaint in (
            (other, "localhost", "certificate refused: "),
            (ssl.create_default_context(cafile=str(credentials.ca)), "istiod.example", "istiod.example"),
        ):
            with pytest.raises(DialError, match=rf"connect to {address} as {name}: .*{complaint}"):
                await ask(credentials, service.port, tls=tls, server_name=name)


async def test_a_server_without_http2(credentials: Credentials) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(credentials.certificate, credentials.key)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent, tls=context) as port:
        with pytest.raises(DialError, match=r"does not offer HTTP/2"):
            await ask(credentials, port)


async def test_a_peer_that_says_nothing_at_all(credentials: Credentials) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silent) as port:
        with pytest.raises(UpstreamError, match=r"no complete answer from 127\.0\.0\.1:\d+ within 0\.3 s"):
            await ask(credentials, port, timeout_s=0.3)
