"""The admin server against curl, and against raw sockets that do what curl would not."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.address import Address
from shared.errors import UnavailableError, UpstreamError
from shared.ops.http_server import Handler, HttpServer, Limits, Request, Response
from tests.shared.net.loopback import until
from tests.support.network import needs_ipv6
from tests.support.process import run
from tests.support.world import find_program

ANY_PORT = Address("127.0.0.1", 0)
PATIENCE_S = 10.0
QUICK = Limits(request_s=0.5, idle_s=0.2)
LARGE = b"x" * (16 << 20)  # more than the kernel keeps between two sockets


def ready(_: Request) -> Response:
    return Response.text(200, "ready")


async def echo(request: Request) -> Response:
    query = ",".join(f"{key}={value}" for key, value in request.query.items())
    return Response.text(200, f"{request.method} {request.path} {query} {request.body.decode()}")


def fail(_: Request) -> Response:
    raise ZeroDivisionError("a secret detail")


async def fail_foreseeably(_: Request) -> Response:
    raise UpstreamError("hello.a.run.app: connection lost")


async def never(_: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/healthz/ready"): ready,
    ("GET", "/echo"): echo,
    ("POST", "/echo"): echo,
    ("POST", "/quitquitquit"): ready,
    ("GET", "/fail"): fail,
    ("GET", "/fail/foreseeably"): fail_foreseeably,
    ("GET", "/never"): never,
    ("GET", "/large"): lambda _: Response(200, "application/octet-stream", LARGE),
}


@asynccontextmanager
async def running(
    routes: Mapping[tuple[str, str], Handler] = ROUTES,
    limits: Limits | None = None,
    *,
    local_only: bool = False,
) -> AsyncIterator[tuple[HttpServer, Address]]:
    server = HttpServer(routes, name="admin", limits=limits or Limits(), local_only=local_only)
    try:
        yield server, await server.start(ANY_PORT)
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await server.close()


@asynccontextmanager
async def serving(
    routes: Mapping[tuple[str, str], Handler] = ROUTES, limits: Limits | None = None
) -> AsyncIterator[Address]:
    async with running(routes, limits) as (_, address):
        yield address


async def curl(address: Address, path: str, *options: str) -> str:
    """What curl prints: with -i the head of the response too."""
    code, output, _ = await run(find_program("curl"), "-s", *options, f"http://{address}{path}")
    assert code == 0
    return output.decode().replace("\r\n", "\n")


GET_READY = b"GET /healthz/ready HTTP/1.1\r\nhost: x\r\n\r\n"
READY = (200, b"ready\n")


class Client:
    """A raw socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, bytes]:
        """Status and body of the next response."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            return status, await self.reader.readexactly(length)

    async def ask(self, request: bytes = GET_READY) -> tuple[int, bytes]:
        self.send(request)
        return await self.response()

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


@asynccontextmanager
async def client(address: Address, source: str = "127.0.0.1") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(
        address.host, address.port, limit=1 << 20, local_addr=(source, 0)
    )
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


# With curl.


async def test_get() -> None:
    async with serving() as address:
        head, _, body = (await curl(address, "/healthz/ready", "-i")).partition("\n\n")
    assert body == "ready\n"
    status, *headers = head.splitlines()
    assert status.startswith("HTTP/1.1 200")
    assert {"content-type: text/plain; charset=utf-8", "content-length: 6"} <= set(headers)
    assert [h for h in headers if h.startswith("date: ") and h.endswith(" GMT")]


async def test_get_answers_head_too() -> None:
    async with serving() as address:
        output = await curl(address, "/healthz/ready", "--head")
        missing = await curl(address, "/missing", "--head")
    assert output.startswith("HTTP/1.1 200") and "content-length: 6\n" in output
    assert output.endswith("\n\n")
    assert missing.startswith("HTTP/1.1 404")


async def test_query_and_body_reach_the_handler() -> None:
    async with serving() as address:
        asked = await curl(address, "/echo?level=mod:debug&reset&a=%41+b&a=2")
        posted = await curl(address, "/echo?x", "--data", "hello")
    assert asked == "GET /echo level=mod:debug,reset=,a=2 \n"
    assert posted == "POST /echo x= hello\n"


async def test_unknown_path_lists_the_known() -> None:
    async with serving({("POST", "/b"): ready, ("GET", "/b"): ready, ("GET", "/a"): ready}) as address:
        output = await curl(address, "/nothing", "-i")
    assert output.startswith("HTTP/1.1 404")
    assert output.endswith("\n\nno such path; known paths:\nGET /a\nGET /b\nPOST /b\n")


async def test_wrong_method_says_which_are_right() -> None:
    async with serving() as address:
        posted = await curl(address, "/healthz/ready", "-i", "-X", "POST")
        gotten = await curl(address, "/quitquitquit", "-i")
        headed = await curl(address, "/quitquitquit", "--head")
    assert posted.startswith("HTTP/1.1 405") and "\nallow: GET, HEAD\n" in posted
    assert gotten.startswith("HTTP/1.1 405") and "\nallow: POST\n" in gotten
    assert headed.startswith("HTTP/1.1 405") and "\nallow: POST\n" in headed


async def test_a_failing_handler_is_one_line_here_and_more_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as address:
        output = await curl(address, "/fail", "-i")
        foreseen = await curl(address, "/fail/foreseeably", "-i")
        after = await curl(address, "/healthz/ready")
    assert output.startswith("HTTP/1.1 500")
    assert output.endswith("\n\ninternal error: the log says more\n")
    assert foreseen.startswith("HTTP/1.1 500")
    assert foreseen.endswith("\n\nhello.a.run.app: connection lost\n")
    assert after == "ready\n"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "task admin GET /fail failed: ZeroDivisionError: a secret detail",
        "admin GET /fail/foreseeably failed: hello.a.run.app: connection lost",
    ]


async def test_large_response() -> None:
    async with serving() as address:
        output = await curl(address, "/large")
    assert len(output) == len(LARGE)


async def test_body_within_and_beyond_the_limit(tmp_path: Path) -> None:
    (tmp_path / "within").write_bytes(b"x" * 65536)
    (tmp_path / "beyond").write_bytes(b"x" * 65537)
    async with serving() as address:
        within = await curl(address, "/echo", "-i", "--data-binary", f"@{tmp_path / 'within'}")
        beyond = await curl(address, "/echo", "-i", "--data-binary", f"@{tmp_path / 'beyond'}")
        chunked = await curl(
            address,
            "/echo",
            "-i",
            "--data-binary",
            f"@{tmp_path / 'beyond'}",
            "-H",
            "Transfer-Encoding: chunked",
        )
    assert " 200 " in within and within.endswith("x" * 65536 + "\n")
    assert " 413 " in beyond and beyond.endswith("bad request: request body too long\n")
    assert " 413 " in chunked


async def test_expect_100_continue() -> None:
    async with serving() as address:
        output = await curl(address, "/echo", "-i", "-H", "Expect: 100-continue", "--data", "hello")
    first, _, second = output.partition("\n\n")
    assert first.startswith("HTTP/1.1 100")
    assert second.startswith("HTTP/1.1 200")


async def test_curl_keeps_its_connection() -> None:
    async with serving() as address:
        again = f"http://{address}/echo"
        output = await curl(address, "/healthz/ready", again, "-w", "%{num_connects} new\n")
    assert output == "GET /echo  \n1 new\nready\n0 new\n"


async def test_http_1_0_and_a_proxys_way_of_asking() -> None:
    async with serving() as address:
        old = await curl(address, "/healthz/ready", "--http1.0")
        absolute = await curl(address, "/healthz/ready", "--proxy", f"http://{address}", "--noproxy", "")
    assert (old, absolute) == ("ready\n", "ready\n")


# Ports.


async def test_a_port_in_use_is_named_with_what_it_was_for() -> None:
    async with serving() as address:
        other = HttpServer(ROUTES, name="metrics")
        with pytest.raises(UnavailableError, match=rf"^metrics: .*127\.0\.0\.1:{address.port}.* in use"):
            await other.start(address)
        await other.close()


@needs_ipv6
async def test_several_addresses_and_a_port_free_again() -> None:
    find_program("curl")  # before anything is open
    server = HttpServer(ROUTES)
    first, second = await server.start(ANY_PORT), await server.start(Address("::1", 0))
    assert await curl(first, "/healthz/ready") == await curl(second, "/healthz/ready") == "ready\n"
    await server.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(first.host, first.port)
    again = HttpServer(ROUTES)
    assert await again.start(first) == first
    await again.close()


# With raw sockets: requests.


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as address, client(address) as one:
        paths = (b"/echo?1", b"/missing", b"/echo?2")
        one.send(b"".join(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n" for path in paths))
        assert await one.response() == (200, b"GET /echo 1= \n")
        assert (await one.response())[0] == 404
        assert await one.response() == (200, b"GET /echo 2= \n")


async def test_pipelined_flood_is_taken_bit_by_bit() -> None:
    async with serving() as address, client(address) as one:
        one.send(GET_READY * 3000)
        for _ in range(3000):
            assert await one.response() == READY


async def test_a_request_byte_by_byte() -> None:
    async with serving() as address, client(address) as one:
        sock = one.writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GET_READY:
            one.send(bytes([byte]))
            await one.writer.drain()
            await asyncio.sleep(0)
        assert await one.response() == READY


async def test_a_half_closed_client_gets_its_answers() -> None:
    async with serving() as address, client(address) as one:
        one.send(GET_READY * 2)
        one.writer.write_eof()
        assert await one.response() == READY
        assert await one.response() == READY
        assert await one.rest() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # HTTP/2 without TLS
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a ClientHello
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT 10.0.0.1:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /echo?" + b"&".join([b"a"] * 101) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
async def test_bad_requests_are_answered_and_closed(data: bytes) -> None:
    async with serving() as address, client(address) as one:
        one.send(data)
        status, body = await one.response()
        assert status == 400
        assert body.startswith(b"bad request: ") and body.count(b"\n") == 1
        assert await one.rest() == b""


@pytest.mark.parametrize("line_end", [b"\r\n\r\n", b""])
@pytest.mark.parametrize("size", [17_000, 3_000_000])
async def test_giant_header(size: int, line_end: bytes) -> None:
    async with serving() as address, client(address) as one:
        one.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * size + line_end)
        status, _ = await one.response()
        assert status == 431
        assert await one.rest() == b""


async def test_header_at_the_limit() -> None:
    async with serving() as address, client(address) as one:
        one.send(b"GET /healthz/ready HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 16_000 + b"\r\n\r\n")
        assert await one.response() == READY


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_upset_the_server(data: bytes, after_a_start: bool) -> None:
    async def send() -> None:
        async with serving() as address:
            async with client(address) as one:
                one.send(b"POST /echo HTTP/1.1\r\n" * after_a_start + data)
                one.writer.write_eof()
                await one.rest()
            async with client(address) as one:
                assert await one.ask() == READY

    asyncio.run(send())


# Deadlines.


LATE = (408, b"request not complete within 0.5 seconds\n")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        pytest.param(b"GET /healthz/ready HTTP/1.1\r\nhost", LATE, id="header"),
        pytest.param(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhell", LATE, id="body"),
        pytest.param(
            b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n", (503, b"no answer within 0.5 seconds\n"), id="handler"
        ),
    ],
)
async def test_what_takes_too_long(sent: bytes, answer: tuple[int, bytes]) -> None:
    async with serving(limits=QUICK) as address, client(address) as one:
        assert await one.ask(sent) == answer
        assert await one.rest() == b""


async def test_silent_and_idle_connections_are_closed() -> None:
    async with serving(limits=QUICK) as address, client(address) as silent, client(address) as idle:
        assert await idle.ask() == READY
        assert await silent.rest() == b""
        assert await idle.rest() == b""


async def test_a_client_that_does_not_take_its_response_is_cut_off() -> None:
    async with running(limits=QUICK) as (server, address), client(address) as stuck:
        stuck.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        begun = await stuck.reader.readexactly(1)
        assert server.open_connections == 1
        await until(lambda: not server.open_connections)
        assert len(begun + await stuck.rest()) < len(LARGE)


def reset(one: Client) -> None:
    sock = one.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.writer.transport.abort()


async def test_a_client_that_resets_upsets_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as address:
        for data in (b"", b"GET /never", b"bad\r\n\r\n", b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n"):
            async with client(address) as one:
                one.send(data)
                reset(one)
            assert await curl(address, "/healthz/ready") == "ready\n"
    assert not caplog.records


async def test_a_client_that_resets_before_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        begun.set()
        await may_end.wait()
        return Response(200, "application/octet-stream", LARGE)

    async with serving({("GET", "/slow"): slow}) as address, client(address) as one:
        one.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        reset(one)
        may_end.set()
    assert not caplog.records


# Many connections.


async def test_an_idle_connection_makes_room() -> None:
    limits = Limits(connections=2)
    async with serving(limits=limits) as address, client(address) as idle, client(address) as busy:
        assert await idle.ask() == READY
        busy.send(b"GET /ne")
        for _ in range(3):  # by then the server has read it
            assert await idle.ask() == READY
        assert await curl(address, "/healthz/ready") == "ready\n"
        assert await idle.rest() == b""


@asynccontextmanager
async def clients(address: Address, count: int, said: bytes = b"") -> AsyncIterator[list[Client]]:
    """As many clients that have `said` something, and the server knows of all of them."""
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            one = await stack.enter_async_context(client(address))
            one.send(said)
            opened.append(one)
        yield opened


async def test_probes_are_answered_while_others_say_next_to_nothing() -> None:
    """From one address, as all of them are to a server behind a NAT."""
    async with running() as (server, address), clients(address, 130, b"G"):
        for _ in range(36):
            async with client(address) as probe:
                assert await probe.ask() == READY
        assert server.open_connections <= Limits().connections
        assert 130 - 64 <= server.counts.evicted <= 130 + 36 - 64
        assert server.counts.refused["full"] == 0


async def test_silence_makes_room_too() -> None:
    async with serving() as address, clients(address, 200):
        assert await curl(address, "/healthz/ready") == "ready\n"


async def test_the_oldest_unfinished_request_makes_room() -> None:
    limits = Limits(connections=2)
    async with serving(limits=limits) as address, client(address) as first, client(address) as second:
        first.send(b"GET /he")
        assert await curl(address, "/healthz/ready") == "ready\n"
        assert await first.rest() == b"", "without a word: it said too little to be answered"
        assert await second.ask() == READY


async def test_a_response_that_is_not_taken_makes_room() -> None:
    async with serving(limits=Limits(connections=1)) as address, client(address) as stuck:
        stuck.send(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await stuck.reader.readexactly(1)
        assert await curl(address, "/healthz/ready") == "ready\n"


async def test_those_that_do_not_close_make_room() -> None:
    """They have had their answer, and wait for nothing but their own close."""
    ask = GET_READY.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with serving(limits=Limits(connections=2)) as address, clients(address, 8, ask) as lingering:
        for one in lingering:
            assert await one.response() == READY
        assert await curl(address, "/healthz/ready") == "ready\n"


async def test_requests_that_are_being_answered_stay(caplog: pytest.LogCaptureFixture) -> None:
    ask = b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n"
    async with (
        running(limits=Limits(connections=2)) as (server, address),
        clients(address, 2, ask),
        client(address) as third,
        client(address) as fourth,
    ):
        third.send(GET_READY)
        assert await third.response() == (503, b"no room for another connection\n")
        assert await third.rest() == b""
        assert (await fourth.response())[0] == 503
        assert server.counts.refused["full"] == 2
        await server.close(0)
    assert [record.getMessage() for record in caplog.records] == [
        "admin: refused, 1 times since the start: all places are taken by requests that are being answered"
    ], "once a minute"


async def test_requests_that_wait_for_their_turn_make_room_for_another_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A port that is flooded with whole requests still answers the probes of somebody else."""

    def slow(_: Request) -> Response:
        time.sleep(0.002)
        return Response.text(200, "slow")

    routes: dict[tuple[str, str], Handler] = {("GET", "/slow"): slow, ("GET", "/healthz/ready"): ready}
    ask = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(routes, Limits(connections=8)) as address, clients(address, 60, ask * 20):
        for _ in range(10):
            async with client(address, source="127.0.0.2") as probe:
                assert await probe.ask() == READY
    assert "all 8 places were taken: a slow or idle connection made room" in caplog.text


async def test_one_source_does_not_crowd_out_another() -> None:
    """In namespaces' place: the whole network 127.0.0.0/8 is this machine's."""
    limits = Limits(connections=8)
    async with serving(limits=limits) as address, client(address, source="127.0.0.2") as honest:
        honest.send(GET_READY[:-2])
        async with clients(address, 100, b"G"):
            assert await curl(address, "/healthz/ready") == "ready\n"
            assert await honest.ask(b"\r\n") == READY


# Answers in turn.


async def test_a_flood_of_requests_holds_up_a_probe_for_a_few_answers_at_most() -> None:
    """Of another port in the same process, whose handlers take their time."""
    order: list[str] = []

    def slow(_: Request) -> Response:
        order.append("admin")
        time.sleep(0.01)
        return Response.text(200, "much")

    def quick(_: Request) -> Response:
        order.append("probe")
        return Response.text(200, "ready")

    async with (
        serving({("GET", "/x"): slow}) as admin,
        serving({("GET", "/healthz/ready"): quick}) as health,
        client(health) as probe,
        clients(admin, 40) as flood,
    ):
        for one in flood:
            one.send(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await probe.ask() == READY
        for one in flood:
            assert await one.response() == (200, b"much\n")
    assert order.count("admin") == 40
    assert order.index("probe") <= 5


# Requests that a web page may have sent.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "[::1]"])
@pytest.mark.parametrize("port", ["", ":15000"])
async def test_a_local_port_answers_to_its_own_names(host: str, port: str) -> None:
    async with running(local_only=True) as (server, address):
        assert await curl(address, "/healthz/ready", "-H", f"Host: {host}{port}") == "ready\n"
        assert server.counts.refused["host"] == 0


async def test_a_name_that_leads_to_a_local_port_is_refused() -> None:
    """As the browser asks whose page has a name that leads there by now."""
    async with running(local_only=True) as (server, address):
        rebound = f"rebound.example:{address.port}:{address.host}"
        url = f"http://rebound.example:{address.port}/healthz/ready"
        _, said, _ = await run("curl", "-s", "-i", "--noproxy", "*", "--resolve", rebound, url)
        output = said.decode()
        assert output.startswith("HTTP/1.1 403") and "connection: close" in output
        assert output.endswith("this port answers to localhost, 127.0.0.1 and [::1]\n")
        assert (server.counts.refused["host"], server.counts.refused["site"]) == (1, 0)


async def test_another_site_s_page_is_refused() -> None:
    async with running(local_only=True) as (server, address):
        posted = await curl(address, "/quitquitquit", "-i", "-X", "POST", "-H", "Origin: http://a.example")
        fetched = await curl(address, "/healthz/ready", "-i", "-H", "Sec-Fetch-Site: cross-site")
        assert posted.startswith("HTTP/1.1 403") and fetched.startswith("HTTP/1.1 403")
        assert server.counts.refused["site"] == 2
        own = f"Origin: http://{address}"
        assert await curl(address, "/quitquitquit", "-X", "POST", "-H", own) == "ready\n"


async def test_clients_without_a_host() -> None:
    async with running(local_only=True) as (_, address), client(address) as one:
        assert await one.ask(b"GET /healthz/ready HTTP/1.0\r\n\r\n") == READY


async def test_other_ports_answer_to_any_name() -> None:
    async with serving() as address:
        assert await curl(address, "/healthz/ready", "-H", "Host: hgate.mesh.svc") == "ready\n"


# The end.


async def test_close_lets_a_running_request_end() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(_: Request) -> Response:
        begun.set()
        await may_end.wait()
        return Response.text(200, "done")

    server = HttpServer({("GET", "/slow"): slow, ("GET", "/healthz/ready"): ready})
    address = await server.start(ANY_PORT)
    async with client(address) as running, client(address) as idle, client(address) as silent:
        assert await idle.ask() == READY
        running.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(server.close())
            assert await idle.rest() == b""
            assert await silent.rest() == b""
            may_end.set()
            head = await running.reader.readuntil(b"\r\n\r\n")
            assert b"connection: close\r\n" in head.lower()
            assert await running.rest() == b"done\n"
            running.writer.close()


@pytest.mark.parametrize(
    ("request_s", "grace_s"), [(0.2, None), (1000, 0.1)], ids=["a request's deadline", "what it is told"]
)
async def test_close_does_not_wait_for_ever(request_s: float, grace_s: float | None) -> None:
    server = HttpServer({("GET", "/never"): never}, limits=Limits(request_s=request_s))
    address = await server.start(ANY_PORT)
    async with client(address) as one:
        one.send(b"GET /nev")
        async with asyncio.timeout(PATIENCE_S):
            await server.close(grace_s)
