"""The proxy to services: what an app sends there, what a service gets and answers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent.config.probe import Probe
from agent.config.settings import Settings
from agent.launch.startup import ready
from agent.services.service_names import ServiceName
from agent.services.service_proxy import OwnPlace, ServiceProxy
from agent.services.service_requests import ServiceRequests
from shared.address import Address
from shared.credentials.tokens.minting import Minted
from shared.errors import NoRouteError, TokenError, UnavailableError
from shared.http2.frames import REFUSED_STREAM
from shared.net.dial import Origin
from shared.tasks import spawn
from tests.support.gke_server import Machine
from tests.support.http2_peer import Http2Peer, Service
from tests.support.metadata_server import closed_port
from tests.support.network_namespace import NoNetworkError, network
from tests.support.process import run, started
from tests.support.tcp_peer import PATIENCE_S, TcpPeer

T = TypeVar("T")

HOST = b"hello-123.us-east1.run.app"


class CountingMinter:
    """Gives tokens with a number."""

    identity = "counting"

    def __init__(self) -> None:
        self.audiences: list[str] = []
        self.error: TokenError | None = None

    async def mint(self, audience: str) -> Minted:
        self.audiences.append(audience)
        if self.error is not None:
            raise self.error
        return Minted(f"token-{len(self.audiences)}", time.time() + 3600)


class World:
    """A proxy, and the service that all names of services lead to."""

    def __init__(self, service: Service, port: int, minter: CountingMinter) -> None:
        self.service = service
        self.port = port
        self.minter = minter

    async def curl(self, url: str, *options: str) -> tuple[int, str]:
        """A client's exit code and output, by way of the proxy."""
        proxy = f"http://127.0.0.1:{self.port}"
        code, out, err = await run("curl", "-sS", "-m", "20", "-x", proxy, *options, url)
        return code, (out or err).decode()


@asynccontextmanager
async def world(*, most: int = 100, connections: int = 100, port: int = 0) -> AsyncIterator[World]:
    async with Service.listening() as service:
        minter = CountingMinter()
        place = OwnPlace("127.0.0.1:1", "123")
        place._known["region"] = "us-east1"  # as the metadata server would have said
        requests = ServiceRequests(
            place.host,
            minter,
            most=most,
            origin=lambda host: Origin("http", host, Address("127.0.0.1", port or service.port)),
        )
        proxy = ServiceProxy(Settings(max_connections=connections), requests=requests)
        address = await proxy.start(Address("127.0.0.1", 0))
        try:
            yield World(service, address.port, minter)
        finally:
            await proxy.close()
            assert requests.open_requests == 0


def asked(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A client that is under way."""
    return spawn(work, name="client")


async def test_a_request_gets_a_token_and_its_answer() -> None:
    async with world() as it:
        told = ("-H", "x-own: 1", "-H", "Connection: x-hop", "-H", "x-hop: 1")
        client = asked(it.curl("http://hello/a?b=c", *told))
        there = await it.service.request()
        assert (there[b":method"], there[b":scheme"], there[b":path"]) == (b"GET", b"https", b"/a?b=c")
        assert there[b":authority"] == HOST
        assert there[b"authorization"] == b"Bearer token-1"
        assert there[b"x-own"] == b"1"
        names = {name for name, _ in there.fields}
        assert names.isdisjoint({b"host", b"x-hop", b"proxy-connection", b"connection"})
        there.respond(200, [(b"x-there", b"2"), (b"content-length", b"2")])
        await there.send(b"hi")
        there.end()
        assert await client == (0, "hi")
        assert it.minter.audiences == ["https://hello-123.us-east1.run.app"]


async def test_the_token_is_used_again_until_the_service_rejects_it() -> None:
    async with world() as it:
        for status, token in ((200, b"token-1"), (401, b"token-1"), (200, b"token-2")):
            client = asked(it.curl("http://hello.us-west1/", "-o", "/dev/null", "-w", "%{http_code}"))
            there = await it.service.request()
            assert there[b"authorization"] == b"Bearer " + token
            assert there[b":authority"] == b"hello-123.us-west1.run.app"
            there.respond(status, end=True)
            assert await client == (0, str(status))


async def test_an_authorization_of_the_app_s_own_stays() -> None:
    async with world() as it:
        client = asked(it.curl("http://hello/", "-H", "Authorization: Basic x"))
        there = await it.service.request()
        assert there[b"authorization"] == b"Basic x"
        there.respond(204, end=True)
        assert await client == (0, "")
        assert it.minter.audiences == []


async def test_strangers_are_refused_and_get_no_token() -> None:
    async with world() as it:
        for url in ("http://example.com/", "http://metadata.google.internal/", "http://hello:8080/"):
            code, told = await it.curl(url, "-w", "%{http_code}")
            assert (code, told[-3:], told.startswith("krun: ")) == (0, "502", True), told
            assert len(told.splitlines()) == 2
        assert (it.minter.audiences, it.service.asked) == ([], False)


async def test_a_refusal_leaves_the_connection_to_further_requests() -> None:
    async with world() as it, TcpPeer.connected(it.port) as client:
        for _ in range(2):
            await client.send(b"GET http://example.com/ HTTP/1.1\r\nhost: example.com\r\n\r\n")
            assert (await client.read_until(b"directly\n")).startswith(b"HTTP/1.1 502 ")


async def test_a_tunnel_is_refused() -> None:
    async with world() as it:
        code, told = await it.curl("https://hello/")
        assert (code, "502" in told) == (56, True)


async def test_without_a_token_nothing_is_sent() -> None:
    async with world() as it:
        it.minter.error = TokenError("no metadata server", "unreachable")
        _, told = await it.curl("http://hello/", "-w", "%{http_code}")
        assert told.endswith("502") and "no metadata server" in told
        assert not it.service.asked


async def test_a_service_that_is_not_there() -> None:
    async with world(port=closed_port()) as it:
        _, told = await it.curl("http://hello/", "-w", "%{http_code}")
        assert told.endswith("502") and "connect to http://hello-123.us-east1.run.app" in told
        assert it.minter.audiences == []


async def test_large_bodies_both_ways_on_a_connection_that_is_kept() -> None:
    size = 3 << 20
    async with world() as it:
        upload = f"head -c {size} /dev/zero | curl -sS -x http://127.0.0.1:{it.port} --data-binary @-"
        twice = f"{upload} -w '%{{num_connects}}' http://hello/ http://hello/ | tail -c 5"
        client = asked(run("sh", "-c", twice))
        for body in (bytes(size), b""):
            there = await it.service.request()
            received = 0
            while received < size:
                received += len(await there.read(min(65536, size - received)))
            there.respond(200)
            await there.send(body)
            there.end()
        _, out, err = await client
        assert (out[-3:], err) == (b"\0" + b"10", b""), "connections for the first, and for the second"


async def test_a_chunked_body_trailers_and_an_interim_answer() -> None:
    async with world() as it, TcpPeer.connected(it.port) as client:
        await client.send(
            b"POST http://hello/ HTTP/1.1\r\nhost: hello\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n0\r\nx-sum: 7\r\n\r\n"
        )
        there = await it.service.request()
        assert await there.rest() == b"abc"
        there.respond(103, [(b"link", b"x")])
        there.respond(200)
        await there.send(b"de")
        there.end([(b"x-end", b"8")])
        told = await client.read_until(b"x-end: 8\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert told.endswith(b"\r\n\r\n2\r\nde\r\n0\r\nx-end: 8\r\n\r\n")


async def test_an_answer_that_is_cut_off_looks_so() -> None:
    async with world() as it:
        client = asked(it.curl("http://hello/"))
        there = await it.service.request()
        there.respond(200)
        await there.send(b"half")
        there.reset(2)
        code, _ = await client
        assert code in (18, 56)


async def test_a_client_that_leaves_takes_its_request_along() -> None:
    async with world() as it:
        async with TcpPeer.connected(it.port) as client:
            await client.send(b"GET http://hello/ HTTP/1.1\r\nhost: hello\r\n\r\n")
            there = await it.service.request()
            client.reset()
        await there.broken()


async def test_what_is_malformed() -> None:
    async with world() as it, TcpPeer.connected(it.port) as client:
        await client.send(b"GET http://hello/ HTTP/1.1\r\nno colon\r\n\r\n")
        assert (await client.read_until(b"Bad Request\n")).startswith(b"HTTP/1.1 400 ")


async def test_what_a_service_has_refused_is_sent_once_more() -> None:
    async with world() as it:
        client = asked(it.curl("http://hello/", "-d", "body"))
        there = await it.service.request()
        assert await there.rest() == b"body"
        there.reset(REFUSED_STREAM)
        again = await it.service.request()
        assert (await again.rest(), again[b"authorization"]) == (b"body", b"Bearer token-1")
        again.respond(200, end=True)
        assert await client == (0, "")


async def test_two_requests_at_once_are_answered_in_turn() -> None:
    ask = b"GET http://hello/%d HTTP/1.1\r\nhost: hello\r\n\r\n"
    async with world() as it, TcpPeer.connected(it.port) as client:
        await client.send(ask % 1 + ask % 2)
        for number in (b"1", b"2"):
            there = await it.service.request()
            assert (there[b":path"], it.service.asked) == (b"/" + number, False)
            there.respond(200, [(b"content-length", b"1")])
            await there.send(number)
            there.end()
            assert (await client.read_until(b"\r\n\r\n" + number)).startswith(b"HTTP/1.1 200 ")


async def test_a_client_of_http10_that_has_ended_its_side() -> None:
    async with world() as it, TcpPeer.connected(it.port) as client:
        await client.send(b"GET http://hello/ HTTP/1.0\r\n\r\n")
        client.end()
        there = await it.service.request()
        there.respond(103, [(b"link", b"x")])
        there.respond(200)
        await there.send(b"all")
        there.end()
        told = await client.rest()
        assert told.startswith(b"HTTP/1.1 200 ") and told.endswith(b"\r\n\r\nall")
        assert b"transfer-encoding" not in told.lower()


async def test_head() -> None:
    async with world() as it:
        client = asked(it.curl("http://hello/", "-I"))
        there = await it.service.request()
        assert there[b":method"] == b"HEAD"
        there.respond(200, [(b"content-length", b"7")], end=True)
        code, told = await client
        assert (code, "content-length: 7" in told.lower()) == (0, True)


async def test_an_answer_shorter_than_it_said_is_no_whole_one() -> None:
    async with world() as it:
        client = asked(it.curl("http://hello/"))
        there = await it.service.request()
        there.respond(200, [(b"content-length", b"7")])
        await there.send(b"half")
        there.end()
        assert (await client)[0] in (18, 56)


async def test_a_client_that_does_not_read_stops_the_service() -> None:
    async with world() as it, TcpPeer.connected(it.port) as client:
        client.pause()
        await client.send(b"GET http://hello/ HTTP/1.1\r\nhost: hello\r\n\r\n")
        there = await it.service.request()
        there.respond(200)
        assert 0 < await there.fill() < 64 << 20


async def test_connections_without_a_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.services.service_proxy.IDLE_S", 0.05)
    async with world() as it, TcpPeer.connected(it.port) as client:
        await client.send(b"GET http")
        assert await client.rest() == b""


async def test_http2_and_grpc() -> None:
    async with world() as it, Http2Peer.connected(it.port) as client:
        fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
        stream = client.request(b"POST", b"/a.B/C", fields, authority=b"hello")
        there = await it.service.request()
        assert (there[b":authority"], there[b"te"], there[b":path"]) == (HOST, b"trailers", b"/a.B/C")
        await stream.send(b"one")
        assert await there.read(3) == b"one"
        there.respond(200)
        await there.send(b"two")
        assert await stream.status() == 200
        assert await stream.read(3) == b"two"
        stream.end()
        there.end([(b"grpc-status", b"0")])
        assert await stream.rest() == b""
        assert stream.trailers == [(b"grpc-status", b"0")]
        other = client.request(b"GET", b"/", end=True, authority=b"example.com")
        assert await other.status() == 502


async def test_grpc_s_own_client_by_way_of_http_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the proxy for a tunnel, whatever the server."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.mesh.grpc_app"), env={**os.environ, "PORT": str(port := closed_port())}
    )
    try:
        assert await ready(Probe(Address("127.0.0.1", port)), PATIENCE_S, asyncio.Future())
        async with world(port=port) as it:
            client = [sys.executable, "-c", GRPC_CLIENT]
            environ = {"http_proxy": f"http://127.0.0.1:{it.port}", "no_proxy": "", "no_grpc_proxy": ""}
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            code, told, complaint = await run(*client)
        assert (code, told) == (0, b"b'HELLO' [3, 100000]\n"), complaint
        assert it.minter.audiences == ["https://hello-123.us-east1.run.app"]
    finally:
        server.kill()
        await server.wait()


GRPC_CLIENT = """
import grpc
with grpc.insecure_channel("hello:80") as channel:
    one = channel.unary_unary("/hbone.Echo/Unary")(b"hello", timeout=20, wait_for_ready=True)
    many = channel.stream_stream("/hbone.Echo/Stream")(iter([b"one", bytes(100_000)]), timeout=20)
    print(one, [len(message) for message in many])
"""


async def test_bounds() -> None:
    async with world(most=1, connections=2) as it, Http2Peer.connected(it.port) as client:
        first = client.request(b"GET", b"/", end=True, authority=b"hello")
        there = await it.service.request()
        second = client.request(b"GET", b"/", end=True, authority=b"hello")
        assert await second.status() == 503
        assert b"HBONE_MAX_REQUESTS" in await second.rest()
        there.respond(200, end=True)
        assert await first.status() == 200
        async with TcpPeer.connected(it.port), TcpPeer.connected(it.port) as surplus:
            with pytest.raises(ConnectionResetError):
                await surplus.read_until(b"x")


# Our own place.


async def test_project_and_region_are_asked_once() -> None:
    told = {"project/numeric-project-id": "123", "instance/region": "projects/123/regions/us-east1"}
    async with Machine(told=told) as machine:
        place = OwnPlace(machine.host)
        hosts = await asyncio.gather(*(place.host(ServiceName("hello", "")) for _ in range(5)))
        assert set(hosts) == {HOST.decode()}
        assert sorted(machine.requests) == ["instance/region", "project/numeric-project-id"]
        machine.told["instance/region"] = "projects/123/regions/evil.example/x?"
        with pytest.raises(UnavailableError, match="is no region"):
            await OwnPlace(machine.host, "123").host(ServiceName("hello", ""))


async def test_a_metadata_server_that_is_not_there_is_asked_again() -> None:
    place = OwnPlace(f"127.0.0.1:{closed_port()}")
    for _ in range(2):
        with pytest.raises(UnavailableError, match="set PROJECT_NUMBER"):
            await place.host(ServiceName("hello", "us-east1"))
    with pytest.raises(NoRouteError):
        await OwnPlace("", "123").host(ServiceName("a" * 62, "us-east1"))


# With a real krun, before the stand-in for Cloud Run.


async def test_an_app_of_krun_s_reaches_a_service(tmp_path: Path) -> None:
    url = "https://hello-1.us-central1.run.app"
    try:
        with network(tmp_path) as there:
            there.hosts.write_text("127.0.0.1 localhost\n127.0.0.9 hello-1.us-central1.run.app\n")
            async with (
                Service.listening() as container,
                started(
                    *(
                        "hbone",
                        "cloudrun",
                        "--audience",
                        url,
                        "--listen",
                        "127.0.0.9:443",
                        "--dir",
                        str(tmp_path),
                    ),
                    *("--metadata", "127.0.0.9:80", "--container", f"127.0.0.1:{container.port}"),
                ) as cloudrun,
            ):
                while not (await cloudrun.stdout.readline()).startswith(b"GCE_METADATA_HOST"):
                    pass
                environ = {
                    "HBONE_SERVICES": "127.0.0.1:15005",
                    "GCE_METADATA_HOST": "127.0.0.9:80",
                    "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
                    "HBONE_STARTUP_PROBE": "-",
                }
                command = ("curl", "-sS", "http://hello.us-central1/there", "http://elsewhere.example/")
                async with started("agent", *command, environ=environ) as krun:
                    asked_for = await container.request()
                    assert asked_for[b":path"] == b"/there"
                    asked_for.respond(200, [(b"content-length", b"3")])
                    await asked_for.send(b"hi\n")
                    asked_for.end()
                    code, told, log = await krun.ended()
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert (code, told.splitlines()[0]) == (0, "hi")
    assert told.splitlines()[1].startswith("krun: elsewhere.example is no SERVICE or SERVICE.REGION")
    assert "services of the project on http://127.0.0.1:15005" in log
